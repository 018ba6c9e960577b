"""Small vision transformers that timm knows by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from timm.models._registry import register_model
from timm.models.vision_transformer import VisionTransformer

from promptfed.shared.clip import load_backbone
from promptfed.shared.clip.loading import VisualBackbone

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "small_plain": {}, "small_registers": {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.3},
    "small_average": {"global_pool": "avg", "class_token": False}, "small_prenorm": {"pre_norm": True},
    "small_map": {"global_pool": "map", "class_token": False},
}  # fmt: skip


class Altered(VisionTransformer):
    """Not plain: what its forward pass does is its own affair."""


def entry(name: str, kind: type[VisionTransformer], options: dict[str, Any]) -> None:
    """Register a small model under a name."""

    def make(pretrained: bool = False, **given: Any) -> VisionTransformer:
        known = {key: value for key, value in given.items() if key in ("num_classes",)}
        model = kind(**SMALL, **options, **known)
        model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0}
        return model

    make.__name__ = name
    register_model(make)


def register() -> None:
    """Register the small models, and one that is no plain vision transformer."""
    for name, options in KINDS.items():
        entry(name, VisionTransformer, options)
    entry("small_altered", Altered, {})


@cache
def of_timm(name: str, dtype: torch.dtype = torch.float32) -> VisualBackbone:
    """One of the small models as a backbone."""
    backbone = load_backbone(f"timm:{name}", None, allow_unregistered=True)
    assert isinstance(backbone, VisualBackbone)
    backbone.model.to(dtype)
    return backbone
