"""The sizes of a backbone by its name, from open_clip's configuration: nothing is downloaded or built."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.spec.spec import BackboneShape

PLAIN_VISION = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"}
PLAIN_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "hf_tokenizer_name"}


def shape_by_name(model: str) -> BackboneShape | None:
    """The sizes of ``model``; None if its configuration lacks them or is not among open_clip's. Nothing is imported."""
    config = EMBEDDED[model].config() if model in EMBEDDED else _registered(model)
    if config is None:
        return None
    text, vision = config["text_cfg"], config["vision_cfg"]
    if model in EMBEDDED and "timm_model_name" in vision:
        text_sizes = {"text_layers": text["layers"], "context_length": text["context_length"], "heads_t": text["heads"]}
        return BackboneShape(d_t=text["width"], d_e=config["embed_dim"], **text_sizes)
    if "hf_model_name" in text or "timm_model_name" in vision or not isinstance(vision.get("layers"), int):
        return None
    return _shape(config["embed_dim"], text, vision)


def _registered(model: str) -> dict[str, Any] | None:
    """What the installed open_clip has under the name."""
    library = find_spec("open_clip")
    name = model.replace("/", "-") + ".json"
    for folder in (library and library.submodule_search_locations) or ():
        if os.sep not in name and (file := Path(folder, "model_configs", name)).is_file():
            return dict(json.loads(file.read_text(encoding="utf-8")))
    return None


def _shape(d_e: int, text: dict[str, Any], vision: dict[str, Any]) -> BackboneShape | None:
    try:
        return BackboneShape(
            d_t=text["width"],
            d_v=vision["width"],
            d_e=d_e,
            text_layers=text["layers"],
            vision_layers=vision["layers"],
            context_length=text["context_length"],
            patch_size=vision["patch_size"],
            **_inside(text, vision),
        )
    except (KeyError, ValueError, TypeError):
        return None


def _inside(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, int]:
    """The inner sizes of plain towers; empty for other towers, whose sizes only the model itself determines."""
    if set(vision) - PLAIN_VISION or set(text) - PLAIN_TEXT:
        return {}
    width, patches = vision["width"], (vision["image_size"] // vision["patch_size"]) ** 2
    return {
        "mlp_width": int(width * vision.get("mlp_ratio", 4.0)),
        "patch_tokens": patches,
        "positions": patches + 1,
        "heads_v": width // vision.get("head_width", 64),
        "heads_t": text["heads"],
    }
