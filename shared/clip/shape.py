"""The sizes of a loaded backbone."""

from __future__ import annotations

from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.spec.spec import BackboneShape


def shape_of(backbone: Backbone) -> BackboneShape:
    """The sizes that a coordinator, which has no backbone, needs to create prompts.

    Sizes are None for a tower that is missing or does not take prompts.
    """
    supports = backbone.supports
    return BackboneShape(
        d_t=backbone.d_t if supports.text_prompts else None,
        d_v=backbone.d_v if supports.visual_prompts else None,
        d_e=backbone.d_e,
        text_layers=backbone.text_layers or None,
        vision_layers=backbone.vision_layers or None,
        context_length=backbone.context_length if backbone.has_text else None,
        patch_size=backbone.patch_size,
        patch_tokens=backbone.patch_tokens,
        **backbone.sizes,
    )
