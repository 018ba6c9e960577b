"""The sizes of a backbone that a coordinator, which has none, needs to make prompts."""

from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.spec import BackboneShape


def shape_of(backbone: Backbone) -> BackboneShape:
    """Widths and depths; none for a tower that is not there or that prompts cannot enter."""
    supports = backbone.supports
    return BackboneShape(
        d_t=backbone.d_t if supports.text_prompts else None,
        d_v=backbone.d_v if supports.visual_prompts else None,
        d_e=backbone.d_e,
        text_layers=backbone.text_layers or None,
        vision_layers=backbone.vision_layers or None,
        context_length=backbone.context_length if backbone.has_text else None,
        patch_size=backbone.patch_size,
    )
