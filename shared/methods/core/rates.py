"""Default learning rates on the embedded backbones, whose towers are about a fifth as wide as those of the papers.

A paper's rate suits towers of width 512 and more, and hundreds of rounds. On the embedded ones, of width 112 and 128,
small rates of Adam and AdamW, whose steps have the length of the rate, are multiplied by 100, and those of SGD by 10 on
`promptfed-tiny`; `promptfed-emoji` loses with more.
Methods that fine-tune the pretrained weights themselves (`trainable`) keep their rates: they forget at higher ones.
Swept on held-out training images of six data sets; docs/reference/methods.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from promptfed.shared.methods.core.interface.base import Method

TINY, EMOJI = ("promptfed-tiny", "embedded"), ("promptfed-emoji", "embedded")
FACTORS = {TINY: {"sgd": 10, "adam": 100, "adamw": 100}, EMOJI: {"adam": 100, "adamw": 100}}
SMALL = 0.01  # rates from here on are not multiplied: they are of methods that scale them
USUAL = 0.002  # the rate of methods that give none
SWEPT = {TINY: {"promptfl": 0.1}}
"""Rates of their own, from an earlier sweep with ten rounds."""


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
    given = training.get("learning_rate", USUAL)
    factor = FACTORS.get(backbone, {}).get(training.get("optimizer", "sgd"))
    has_rate = "learning_rate" in training or "m" in fields
    own = method.__module__.startswith("promptfed.shared.methods.")
    if factor is None or given >= SMALL or "trainable" in fields or not (has_rate and own):
        return None
    return SWEPT.get(backbone, {}).get(method.name, float(f"{given * factor:.3g}"))
