"""``promptfed-emoji``: the tiny backbone, trained further on emoji of several designers.

Importing this package does not import open_clip. Unchanged weights, such as the token table, are read from
`promptfed.shared.clip.tiny`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from promptfed.shared.clip import tiny

MODEL = "promptfed-emoji"
"""The model's name in open_clip, once registered."""

PRETRAINED = "embedded"
"""The pretrained tag that stands for the weights beside this file."""

FROM_TINY = ("token_embedding.weight",)
"""Tensors that are promptfed-tiny's own and therefore not in this model's file."""

_FOLDER = Path(__file__).parent


def register() -> None:
    """Register ``MODEL`` and the tiny model, whose tokens it shares, with open_clip. Repeated calls have no effect."""
    import open_clip

    tiny.register()
    if MODEL not in open_clip.list_models():
        open_clip.add_model_config(_FOLDER)


def config() -> dict[str, Any]:
    """The model's configuration, as open_clip has it."""
    return dict(json.loads((_FOLDER / f"{MODEL}.json").read_text(encoding="utf-8")))


def weights_path() -> Path:
    """The file of the weights in half precision, without those of `FROM_TINY`."""
    return _FOLDER / "weights.safetensors"
