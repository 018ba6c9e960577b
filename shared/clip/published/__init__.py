"""Architectures that sites use and open_clip lacks, and what the hub says of text towers. There are no weights here.

`--backbone-file` gives the weights: of MedSigLIP (``google/medsiglip-448``: SigLIP SO400M with images of 448 x 448
pixels) and of CONCH (``MahmoodLab/CONCH``). ``text_models.json`` has the ``config.json`` of each text model that
open_clip's configurations and BiomedCLIP name, so that nothing has to be fetched to build them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MEDSIGLIP, CONCH = "ViT-SO400M-14-SigLIP-448", "conch_ViT-B-16"
PREPARATIONS: dict[str, dict[str, Any]] = {
    MEDSIGLIP: {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear", "resize_mode": "squash"},
    CONCH: {
        "mean": (0.48145466, 0.4578275, 0.40821073),
        "std": (0.26862954, 0.26130258, 0.27577711),
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    },
}


def register() -> None:
    """Register the architectures with open_clip. Repeated calls have no effect."""
    import open_clip

    if MEDSIGLIP not in open_clip.list_models():
        open_clip.add_model_config(FOLDER)


def fit(model: Any) -> None:
    """Give the image tower as many positions as its configuration's image size has; timm's name may have fewer."""
    trunk = getattr(model.visual, "trunk", None)
    has: Any = getattr(getattr(trunk, "patch_embed", None), "img_size", None)
    if trunk is None or has is None or not hasattr(trunk, "set_input_size"):
        return
    wanted = tuple(model.visual.image_size)
    if tuple(has) != wanted:
        trunk.set_input_size(wanted)


@cache
def text_models() -> dict[str, dict[str, Any]]:
    """The published ``config.json`` of text models on the hub, by name."""
    known: dict[str, dict[str, Any]] = json.loads((FOLDER / "text_models.json").read_text(encoding="utf-8"))
    return known


@contextmanager
def known_text_models() -> Iterator[None]:
    """In the block open_clip takes the configurations of known text models from here instead of from the hub."""
    try:
        from open_clip import hf_model
        from transformers import AutoConfig
    except ImportError:
        yield
        return

    class Configurations:
        """What open_clip asks transformers' `AutoConfig` for."""

        @staticmethod
        def from_pretrained(name: str, **options: Any) -> Any:
            if name in text_models():
                return AutoConfig.for_model(**text_models()[name])
            return AutoConfig.from_pretrained(name, **options)

    usual, hf_model.AutoConfig = hf_model.AutoConfig, Configurations
    try:
        yield
    finally:
        hf_model.AutoConfig = usual
