"""The disclosure floor: what leaves a site tells of no count below the floor, except that it is below.

A count of k cases leaves as the range of `floor` numbers that k lies in, such as 0 to 9 or 30 to 39, and every
proportion is computed from such ranges, never from the counts: no fraction can be turned back into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

FLOOR = 10


class Range(BaseModel):
    """A count as it leaves a site: ``low`` to ``high``, both included."""

    model_config = ConfigDict(frozen=True)

    low: Annotated[int, Field(ge=0, le=1 << 53)]
    high: Annotated[int, Field(ge=0, le=1 << 53)]

    @property
    def middle(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2


def coded(count: int, floor: int) -> Range:
    """The range of a count."""
    width = max(1, floor)
    low = count - count % width
    return Range(low=low, high=low + width - 1)


@dataclass(frozen=True)
class Accuracy:
    """An accuracy of a test set as it leaves: computed from the ranges of all its images and of the rarer answers."""

    value: float
    images: Range


def coded_accuracy(right: int, count: int, floor: int, patients: int | None = None) -> Accuracy | None:
    """The accuracy of ``count`` images; None below twice the floor, where right or wrong answers are always few.

    The range of ``count`` is the same in every round, and that of the rarer answers, right or wrong, holds ``floor``
    numbers whatever the count is: neither the other rounds nor the exact count narrow it.
    """
    least = min(count, count if patients is None else patients)
    if count == 0:
        return None
    if floor <= 1:
        return Accuracy(right / count, coded(count, floor))
    if least < 2 * floor:
        return None
    images, wrong = coded(count, floor), count - right
    rarer = coded(min(right, wrong), floor).middle / images.middle
    return Accuracy(min(rarer, 0.5) if right < wrong else max(1 - rarer, 0.5), images)


def coded_mean(value: float, count: int, floor: int) -> float:
    """A mean over ``count`` images of numbers from 0 to 1 as it leaves: their sum is told as a count is.

    Where the numbers are 0 or 1, the sum is a count: a Brier score of a classifier that is always sure is that of its
    wrong answers.
    """
    if floor <= 1:
        return value
    return min(1.0, coded(int(round(value * count, 6)), floor).middle / coded(count, floor).middle)
