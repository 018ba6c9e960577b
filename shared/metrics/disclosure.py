"""The disclosure floor: what leaves a site tells of no count below the floor, except that it is below.

A count of k cases leaves as the range of `floor` numbers that k lies in, such as 0 to 9 or 30 to 39, and every
proportion is computed from such ranges, never from the counts: no fraction can be turned back into them. Counts that
add up to one another could still tell more together: where two sums are known to be equal, both leave only if every
part keeps its whole range (complementary suppression). All other totals are computed from ranges that have left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from promptfed.shared.metrics.clinical import Estimate, proportion

FLOOR = 10
UNKNOWN = 1 << 40  # the upper end of a count of which only its patients are too few


class Range(BaseModel):
    """A count as it leaves a site: ``low`` to ``high``, both included."""

    model_config = ConfigDict(frozen=True)

    low: Annotated[int, Field(ge=0, le=1 << 53)]
    high: Annotated[int, Field(ge=0, le=1 << 53)]

    @property
    def middle(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        if self.high >= UNKNOWN:
            return "few patients"
        return f"<{self.high + 1}" if not self.low else f"{self.low} to {self.high}"


def coded(count: int, floor: int, patients: int | None = None) -> Range:
    """The range of a count. Where ``patients`` are known and fewer than the floor, it says nothing."""
    width = max(1, floor)
    if patients is not None and patients < floor <= count:
        return Range(low=0, high=UNKNOWN)
    low = count - count % width
    return Range(low=low, high=low + width - 1)


def total(ranges: Iterable[Range]) -> Range:
    """The range of a sum."""
    parts = list(ranges)
    return Range(low=sum(part.low for part in parts), high=min(UNKNOWN, sum(part.high for part in parts)))


def share(hits: Range, misses: Range, floor: int) -> Estimate | None:
    """hits/(hits + misses) by the middles; None where they may be fewer cases than the floor.

    The interval contains Wilson's of every count in the ranges; the standard error includes their width.
    """
    least = hits.low + misses.low
    if least < max(1, floor) or UNKNOWN in (hits.high, misses.high):
        return None
    lowest, highest = proportion(hits.low, hits.low + misses.high), proportion(hits.high, hits.high + misses.low)
    assert lowest is not None
    assert highest is not None
    h, m = hits.middle, misses.middle
    spread = [((part.high - part.low + 1) ** 2 - 1) / 12 / (part.middle + 0.5) ** 2 for part in (hits, misses)]
    se = math.sqrt(1 / (h + 0.5) + 1 / (m + 0.5) + sum(spread))
    return Estimate(value=h / (h + m), low=lowest.low, high=highest.high, se=se)


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


@dataclass(frozen=True)
class Table:
    """Answers about one class: true and false positives and negatives; None: not told, or not separately."""

    tp: Range
    fn: Range
    fp: Range | None = None
    tn: Range | None = None

    @property
    def positives(self) -> Range:
        """Images of the class."""
        return total([self.tp, self.fn])


@dataclass(frozen=True)
class Answers:
    """What may leave of the answers to a set of images: a table for each class, and how many are right and wrong.

    Of images that have one class each, true negatives follow from the other numbers.
    """

    tables: tuple[Table | None, ...]
    right: Range
    wrong: Range


def leaves_room(ones: Sequence[Range], others: Sequence[Range], floor: int) -> bool:
    """Whether two sums that are known to be equal leave every part its whole range."""
    return may_exceed(ones, others, floor) and may_exceed(others, ones, floor)


def may_exceed(ones: Sequence[Range], others: Sequence[Range], floor: int) -> bool:
    """Whether a sum that is known to be at least another one leaves every part of both its whole range."""
    return total(ones).high - total(others).low >= floor - 1


def exclusive_answers(confusion: Sequence[Sequence[Range]], right: Range, wrong: Range, floor: int) -> Answers:
    """What may leave where each image has one class; ``confusion``: of each class tp, fn and fp.

    The hits of all classes add up to the right answers. Their misses add up to the wrong ones, and so do their false
    alarms: those leave only where misses and false alarms leave each other room.
    """
    hits, missed, alarms = ([row[at] for row in confusion] for at in range(3))
    right = right if leaves_room([right], hits, floor) else total(hits)
    wrong_leaves = leaves_room([wrong], missed, floor)
    wrong = wrong if wrong_leaves else total(missed)
    told = len(confusion) == 2 or (_apart(missed, alarms, floor) and leaves_room([wrong], alarms, floor))
    images, tables = total([right, wrong]), []
    for k, (tp, fn, fp) in enumerate(confusion):
        own, tn = total([tp, fn]), None
        if len(confusion) == 2:
            tn = hits[1 - k]
        elif told:
            tn = Range(low=max(0, images.low - own.high - fp.high), high=images.high - own.low - fp.low)
        tables.append(Table(tp, fn, fp if told else None, tn))
    return Answers(tuple(tables), right, wrong)


def _apart(missed: Sequence[Range], alarms: Sequence[Range], floor: int) -> bool:
    """Whether misses and false alarms, which have one sum, leave each other room.

    A class has no more of one kind than the other classes have of the other.
    """
    return leaves_room(missed, alarms, floor) and all(
        total([*several[:k], *several[k + 1 :]]).high - part.low >= floor - 1
        for parts, several in ((alarms, missed), (missed, alarms))
        for k, part in enumerate(parts)
    )


def several_answers(tables: Sequence[Table], floor: int) -> tuple[Table | None, ...]:
    """What may leave where an image may have several classes: each class's answers add up to the same images."""
    kept: list[Table | None] = []
    for table in tables:
        sums = [_cells(other) for other in kept if other is not None]
        kept.append(table if all(leaves_room(_cells(table), other, floor) for other in sums) else None)
    return tuple(kept)


def _cells(table: Table) -> list[Range]:
    return [cell for cell in (table.tp, table.fn, table.fp, table.tn) if cell is not None]


def parts_may_leave(whole: Table, parts: Sequence[Table], floor: int) -> bool:
    """Whether hits and misses in disjoint ``parts`` of the images leave each other room beside the ``whole``'s."""
    return all(leaves_room([getattr(whole, at)], [getattr(part, at) for part in parts], floor) for at in ("tp", "fn"))
