"""A spec's section ``calibration``: the federation's calibration scores, from which prediction sets follow."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from promptfed.shared.spec.spec_section import Section


class CalibrationSpec(Section):
    """Held-out training images whose scores are counted under the last state; the export has their sum."""

    share: Annotated[
        float, Field(gt=0, lt=1, description="share of each trainer's training images that is held out for it")
    ] = 0.2
    bins: Annotated[
        int,
        Field(
            ge=2,
            le=1000,
            description="of the scores 0...1. Secure sums allow many; noise, and the floor of a site, are per bin",
        ),
    ] = 20
    by_class: Annotated[bool, Field(description="count each class by itself, for sets that hold for each class")] = (
        False
    )
