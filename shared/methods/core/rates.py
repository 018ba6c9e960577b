"""Swept learning rates by method and backbone, since a paper's rate is for the paper's backbone.

Chosen on held-out training images of small sites (symbols in rare styles, signs, emoji, digits), by the mean over them,
at the defaults of everything else; docs/reference/methods.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EMBEDDED = ("promptfed-tiny", "embedded")
SWEPT: Mapping[tuple[str, str], Mapping[str, float]] = {EMBEDDED: {"promptfl": 0.1, "coop": 0.1}}


def swept_for(method: str) -> list[dict[str, Any]]:
    """The swept rates of a method as ``GET /v1/methods/{name}`` tells them, each with its backbone."""
    return [
        {"model": model, "pretrained": pretrained, "learning_rate": rates[method]}
        for (model, pretrained), rates in SWEPT.items()
        if method in rates
    ]


def swept_rate(raw: Mapping[str, Any], method: str, backbone: Mapping[str, Any]) -> float | None:
    """The rate for ``method`` on ``backbone`` (a spec's, nothing left out), where ``raw`` leaves it open.

    A spec that names another optimizer than the one that was swept has the rate that the method gives.
    """
    training = raw.get("training")
    if isinstance(training, Mapping) and ({"learning_rate", "optimizer"} & set(training)):
        return None
    return SWEPT.get((str(backbone.get("model")), str(backbone.get("pretrained"))), {}).get(method)
