"""The embedded backbone: a small CLIP that the project pre-trained itself, so that everything runs without a download.

Importing this package does not import open_clip; ``register`` does.
"""

from __future__ import annotations

from pathlib import Path

MODEL = "promptfed-tiny"
"""The model's name in open_clip, once registered."""

PRETRAINED = "embedded"
"""The pretrained tag that stands for the weights beside this file."""

_FOLDER = Path(__file__).parent


def register() -> None:
    """Make ``MODEL`` known to open_clip. Doing it again changes nothing."""
    import open_clip

    if MODEL not in open_clip.list_models():
        open_clip.add_model_config(_FOLDER)


def weights_path() -> Path:
    """The weights, in half precision; ``open_clip.create_model(MODEL, pretrained=str(path))`` reads them."""
    return _FOLDER / "weights.safetensors"
