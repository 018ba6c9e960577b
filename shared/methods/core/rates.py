"""Default learning rates on the embedded backbones, whose towers are about a fifth as wide as those of the papers.

A paper's rate suits towers of width 512 and more, and hundreds of rounds. On the embedded ones, of width 112 and 128,
small rates of Adam and AdamW, whose steps have the length of the rate, are multiplied by 100, and on `promptfed-tiny`
those of SGD by 10, but CoOp's 0.002 by 5; `promptfed-emoji` loses with more.
Visual prompts need larger steps than contexts: a block of the image tower passes on little of them. Methods that
fine-tune the pretrained weights themselves (`trainable`) forget at higher rates: they keep them, but for Adam's and
AdamW's on `promptfed-tiny`, which are multiplied by 10.
Swept on held-out training images of six data sets; docs/reference/methods.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from promptfed.shared.methods.core.interface.base import Method

TINY, EMOJI = ("promptfed-tiny", "embedded"), ("promptfed-emoji", "embedded")
FACTORS = {TINY: {"sgd": 10, "adam": 100, "adamw": 100}, EMOJI: {"adam": 100, "adamw": 100}}
TOWER_FACTORS = {TINY: {"adam": 10, "adamw": 10}}  # of methods that train the image tower's weights
CONTEXT_FACTOR = 5  # of CoOp's rate, on promptfed-tiny
SMALL = 0.01  # rates from here on are not multiplied: they are of methods that scale them
USUAL = 0.002  # the rate of methods that give none
SWEPT = {
    TINY: {"promptfl": 0.1, "fedvpt": 0.64, "fedvpt_deep": 2.0, "singleset_vpt": 0.64},
    EMOJI: {"fedmaple": 0.035},
}
"""Rates of their own: promptfl's from an earlier sweep with ten rounds, and those of visual prompts."""


def swept_for(method: type[Method]) -> list[dict[str, Any]]:
    """The rates of a method as ``GET /v1/methods/{name}`` tells them, each with its backbone."""
    found = [(*backbone, _rate(method, backbone)) for backbone in FACTORS]
    names = ("model", "pretrained", "learning_rate")
    return [dict(zip(names, row, strict=True)) for row in found if row[2] is not None]


def swept_rate(raw: Mapping[str, Any], method: type[Method], backbone: Mapping[str, Any]) -> float | None:
    """The rate for ``method`` on ``backbone`` (a spec's, nothing left out), where ``raw`` leaves it open.

    A spec that names another optimizer than the one that was swept has the rate that the method gives.
    """
    training = raw.get("training")
    if isinstance(training, Mapping) and ({"learning_rate", "optimizer"} & set(training)):
        return None
    return _rate(method, (str(backbone.get("model")), str(backbone.get("pretrained"))))


def _rate(method: type[Method], backbone: tuple[str, str]) -> float | None:
    """The rate on an embedded backbone; None: what the method gives, as of a method of a package."""
    training, fields = method.defaults.get("training", {}), method.Hyper.model_fields
    given, optimizer = training.get("learning_rate", USUAL), training.get("optimizer", "sgd")
    has_rate = "learning_rate" in training or "m" in fields
    own = method.__module__.startswith("promptfed.shared.methods.")
    if given >= SMALL or not (has_rate and own):
        return None
    swept, factor = SWEPT.get(backbone, {}), FACTORS.get(backbone, {}).get(optimizer)
    if "trainable" in fields:
        factor = TOWER_FACTORS.get(backbone, {}).get(optimizer)
    elif (backbone, optimizer, given) == (TINY, "sgd", USUAL):
        factor = CONTEXT_FACTOR
    if factor is None or method.name in swept:
        return swept.get(method.name)
    return float(f"{given * factor:.3g}")
