"""A spec's section ``selection``: the best round on held-out training images becomes the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from promptfed.shared.spec.spec_section import Section

FINAL = "final-test"
"""The phase in which the chosen round's state is tested, once, after the last round."""


class SelectionSpec(Section):
    """Which round is exported. The clients' mean counts; of equal rounds the first is chosen."""

    metric: Annotated[Literal["accuracy", "macro_f1"], Field(description="of the clients' held-out images")] = (
        "accuracy"
    )
    split: Annotated[Literal["validation"], Field(description="what each round is measured on")] = "validation"
    share: Annotated[
        float, Field(gt=0, lt=1, description="share of each trainer's training images that is held out for it")
    ] = 0.2


def best(means: Mapping[int, float]) -> int | None:
    """The first of the rounds with the highest mean; None of none."""
    return min(means, key=lambda round: (-means[round], round), default=None)
