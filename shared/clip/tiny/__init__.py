"""The embedded backbone: a small CLIP pre-trained by the project, so that everything runs without a download.

Importing this package does not import open_clip; ``register`` does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = "promptfed-tiny"
"""The model's name in open_clip, once registered."""

PRETRAINED = "embedded"
"""The pretrained tag that stands for the weights beside this file."""

_FOLDER = Path(__file__).parent


def register() -> None:
    """Register ``MODEL`` with open_clip. Repeated calls have no effect."""
    import open_clip

    if MODEL not in open_clip.list_models():
        open_clip.add_model_config(_FOLDER)


def config() -> dict[str, Any]:
    """The model's configuration, as open_clip has it."""
    return dict(json.loads((_FOLDER / f"{MODEL}.json").read_text(encoding="utf-8")))


def weights_path() -> Path:
    """The file of the weights in half precision; ``open_clip.create_model(MODEL, pretrained=str(path))`` reads it."""
    return _FOLDER / "weights.safetensors"
