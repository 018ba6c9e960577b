"""A small vision transformer of timm as a backbone without text."""

from __future__ import annotations

from functools import cache
from typing import Any

from promptfed.shared.clip import Backbone, load_backbone

MODEL = "timm:textless_small"


@cache
def textless_backbone() -> Backbone:
    """Images of 32 pixels, patches of 8, two blocks of width 24, random weights."""
    from timm.models._registry import register_model
    from timm.models.vision_transformer import VisionTransformer

    def textless_small(pretrained: bool = False, **given: Any) -> VisionTransformer:
        model = VisionTransformer(32, 8, embed_dim=24, depth=2, num_heads=2, num_classes=given["num_classes"])
        model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
        return model

    register_model(textless_small)
    return load_backbone(MODEL, None, allow_unregistered=True)
