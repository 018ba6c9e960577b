"""The sizes of a backbone from open_clip's configuration; nothing is downloaded or built."""

from __future__ import annotations

from typing import Any

from promptfed.shared.clip import tiny
from promptfed.shared.clip.weights import known_as
from promptfed.shared.spec.spec import BackboneShape

PLAIN_VISION = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"}
PLAIN_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "hf_tokenizer_name"}


def shape_by_name(model: str) -> BackboneShape | None:
    """The sizes of ``model``; None if its configuration lacks them or is not in open_clip's registry."""
    if ":" in model:
        return None
    import open_clip

    tiny.register()
    config = open_clip.get_model_config(known_as(model, None)[0].replace("/", "-"))
    if config is None:
        return None
    text, vision = config["text_cfg"], config["vision_cfg"]
    if "hf_model_name" in text or "timm_model_name" in vision or not isinstance(vision.get("layers"), int):
        return None
    return _shape(config["embed_dim"], text, vision)


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
    width = vision["width"]
    return {
        "mlp_width": int(width * vision.get("mlp_ratio", 4.0)),
        "positions": (vision["image_size"] // vision["patch_size"]) ** 2 + 1,
        "heads_v": width // vision.get("head_width", 64),
        "heads_t": text["heads"],
    }


BLOCK_KINDS = (
    "ln_1_weight",
    "ln_1_bias",
    "in_proj_weight",
    "in_proj_bias",
    "out_proj_weight",
    "out_proj_bias",
    "ln_2_weight",
    "ln_2_bias",
    "c_fc_weight",
    "c_fc_bias",
    "c_proj_weight",
    "c_proj_bias",
)
"""The weights of a transformer block, by the names that methods and states give them."""
