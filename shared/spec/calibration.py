"""A spec's section ``calibration``: the federation's calibration scores, from which prediction sets follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from promptfed.shared.metrics.conformal import Histograms
from promptfed.shared.spec.spec_section import Section, left_out

Name = Annotated[str, Field(min_length=1, max_length=100)]


class CalibrationSpec(Section):
    """Held-out training images whose scores are counted under the last state; the export has their sum."""

    share: Annotated[
        float,
        Field(
            gt=0,
            lt=1,
            description="share of each trainer's training images that is held out for it; a validation counts all "
            "test images",
        ),
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
    column: Annotated[
        Name | None,
        left_out(
            description="a column of the sites' data (`groups=`): count each of `values` by itself, for sets that hold "
            "for each; images of other values do not count"
        ),
    ] = None
    values: Annotated[
        list[Name],
        left_out([], default_factory=list, max_length=50, description="of `column`, such as [old, new]"),
    ]

    @model_validator(mode="after")
    def _values_are_of_a_column(self) -> CalibrationSpec:
        if (self.column is None) != (not self.values):
            raise ValueError("column and values belong together: give both, as in column: scanner, values: [old, new]")
        if len(set(self.values)) < len(self.values):
            raise ValueError("values names one value twice: leave one out")
        return self

    def histograms(self, class_names: Sequence[str]) -> Histograms:
        """The rows of the scores."""
        classes = len(class_names) if self.by_class else 0
        return Histograms(self.bins, classes, self.column, tuple(self.values))
