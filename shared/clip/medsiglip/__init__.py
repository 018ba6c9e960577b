"""MedSigLIP's architecture, which open_clip lacks: SigLIP SO400M with images of 448 x 448 pixels. There are no weights.

Its weights are those of the ``google/medsiglip-448`` repository on the hub, given by ``--backbone-file``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL = "ViT-SO400M-14-SigLIP-448"
PREPROCESSING = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear", "resize_mode": "squash"}


def register() -> None:
    """Register ``MODEL`` with open_clip. Repeated calls have no effect."""
    import open_clip

    if MODEL not in open_clip.list_models():
        open_clip.add_model_config(Path(__file__).parent)


def fit(model: Any) -> None:
    """Give the image tower as many positions as its configuration's image size has; timm's name has fewer."""
    trunk = getattr(model.visual, "trunk", None)
    has: Any = getattr(getattr(trunk, "patch_embed", None), "img_size", None)
    if trunk is None or has is None or not hasattr(trunk, "set_input_size"):
        return
    wanted = tuple(model.visual.image_size)
    if tuple(has) != wanted:
        trunk.set_input_size(wanted)
