"""``promptfed-emoji``: the tiny backbone, read on with emoji of several designers. Importing this imports no open_clip.

Its weights are those of `promptfed.shared.clip.tiny` where they did not change: the table of tokens is not stored
twice.
"""

from __future__ import annotations

from pathlib import Path

from promptfed.shared.clip import tiny

MODEL = "promptfed-emoji"
"""The model's name in open_clip, once registered."""

PRETRAINED = "embedded"
"""The pretrained tag that stands for the weights beside this file."""

FROM_TINY = ("token_embedding.weight",)
"""Tensors that are promptfed-tiny's own and therefore not in this model's file."""

_FOLDER = Path(__file__).parent


def register() -> None:
    """Make ``MODEL`` and the tiny one, whose tokens it has, known to open_clip. Doing it again changes nothing."""
    import open_clip

    tiny.register()
    if MODEL not in open_clip.list_models():
        open_clip.add_model_config(_FOLDER)


def weights_path() -> Path:
    """The weights in half precision, without those of `FROM_TINY`."""
    return _FOLDER / "weights.safetensors"
