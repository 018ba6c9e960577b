"""A site's calibration scores in a validation, as they leave it beside its figures, under the disclosure floor.

Each count of a histogram leaves as the largest multiple of the floor that it reaches. The scores tell of the same
images as the figures: a score of at most 1/2 belongs to a right answer, one above 1 − 1/C of C classes to a wrong one.
Scores leave only if every count keeps its whole range: of sums that are known to be equal or ordered, and of the hits
and misses of each class in each subgroup, which the scores of a subgroup and the figures of a class bound together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from promptfed.shared.metrics.conformal import Counts, Histograms
from promptfed.shared.metrics.disclosure import UNKNOWN, Range, coded, leaves_room, may_exceed
from promptfed.shared.metrics.site_figures import Answered, GroupFigures, SiteFigures

Floats = NDArray[np.float64]


def site_scores(answered: Answered, layout: Histograms, figures: SiteFigures) -> list[list[int]] | None:
    """The histograms ``(rows, bins)`` of ``answered``, whose images have one class each; None: they do not leave.

    ``figures``: what leaves of the same answers.
    """
    floor = figures.floor
    counts = layout.counts(answered.truth.argmax(axis=1), answered.scores, answered.subgroups, answered.patients)
    if floor > 1:
        by_value = counts.reshape(len(layout.values) or 1, layout.classes or 1, layout.bins)
        told = _Told(answered, layout, figures, by_value)
        if not all(part.leaves_room(floor) for part in told.parts()) or not told.leaves_subgroups_room():
            return None
    lows: list[list[int]] = (counts - counts % floor).tolist()
    return lows


@dataclass(frozen=True)
class _Part:
    """Histograms of some images, and their right and wrong answers. ``same``: both are of the same images."""

    histograms: Sequence[Sequence[Range]]
    right: Range
    wrong: Range
    surely_right: NDArray[np.bool_]
    surely_wrong: NDArray[np.bool_]
    same: bool

    def leaves_room(self, floor: int) -> bool:
        """Whether the histograms leave the answers their whole range, and the reverse."""
        right, wrong, every = self._those(self.surely_right), self._those(self.surely_wrong), self._those(None)
        both = [self.right, self.wrong]
        room = may_exceed([self.right], right, floor) and may_exceed([self.wrong], wrong, floor)
        if not self.same:
            return room and may_exceed(both, every, floor)
        maybe_right, maybe_wrong = self._those(~self.surely_wrong), self._those(~self.surely_right)
        room = room and may_exceed(maybe_right, [self.right], floor) and may_exceed(maybe_wrong, [self.wrong], floor)
        return room and leaves_room(both, every, floor)

    def _those(self, kept: NDArray[np.bool_] | None) -> list[Range]:
        return [each for row in self.histograms for k, each in enumerate(row) if kept is None or kept[k]]


class _Told:
    """What leaves of a site's answers; ``counts (V, C or 1, bins)`` are its scores."""

    def __init__(self, answered: Answered, layout: Histograms, figures: SiteFigures, counts: Counts):
        self.answered, self.layout, self.figures, self.counts = answered, layout, figures, counts
        self.classes = len(answered.names)
        ends = np.arange(layout.bins + 1) / layout.bins
        self.surely_right, self.surely_wrong = ends[1:] <= 0.5, ends[:-1] >= 1 - 1 / self.classes
        groups = {group.value: group for group in figures.groups if group.column and group.column == layout.column}
        self.groups = [groups.get(value) for value in layout.values]
        values = list(answered.subgroups[layout.column]) if layout.column is not None else []
        self.sizes = [values.count(value) for value in layout.values]
        self.others = [group for value, group in groups.items() if value not in layout.values]

    def parts(self) -> Iterator[_Part]:
        """All images, those of each value, and each class in these."""
        yield from self._parts_of(self.counts, self.figures.groups[0], len(self.answered.truth))
        for k, group in enumerate(self.groups):
            if group is not None:
                yield from self._parts_of(self.counts[k : k + 1], group, self.sizes[k])

    def _parts_of(self, counts: Counts, group: GroupFigures, images: int) -> Iterator[_Part]:
        rows = [
            [coded(int(count), self.figures.floor) for count in row] for row in counts.reshape(-1, self.layout.bins)
        ]
        about = self.surely_right, self.surely_wrong, int(counts.sum()) == images
        if group.right is not None and group.wrong is not None:
            yield _Part(rows, group.right, group.wrong, *about)
        for k, each in enumerate(group.classes if self.layout.classes else ()):
            if each.tp is not None and each.fn is not None:
                yield _Part(rows[k :: self.layout.classes], each.tp, each.fn, *about)

    def leaves_subgroups_room(self) -> bool:
        """Whether the hits and the misses of each class in each subgroup can still be any number below the floor."""
        if not self.layout.values:
            return True
        lows = self.counts - self.counts % self.figures.floor
        highs = lows + self.figures.floor - 1
        more = np.subtract(self.sizes, self.counts.sum(axis=(1, 2)))[:, None]  # images that do not count
        sides = ("tp", self.surely_right, self.surely_wrong), ("fn", self.surely_wrong, self.surely_right)
        for (name, surely, surely_not), (other, _, _) in zip(sides, sides[::-1], strict=True):
            low, high = self._by_totals(other)
            least = np.maximum(lows[:, :, surely].sum(axis=2), lows.sum(axis=2) - high)
            most = np.minimum(highs[:, :, ~surely_not].sum(axis=2), highs.sum(axis=2) - low) + more
            if not self._leaves_room(name, least, most):
                return False
        return True

    def _by_totals(self, name: str) -> tuple[Floats, Floats]:
        """The ends of hits or misses of each subgroup, ``(V, C or 1)``, by the figures and those of the whole site."""
        low, high = self._ranges([self.figures.groups[0]], name)
        own_low, own_high = self._ranges([*self.groups, *self.others], name)
        within = np.minimum(own_high, high)
        least = np.maximum(own_low, low - (within.sum(axis=0) - within))[: len(self.groups)]
        most = np.minimum(own_high, high - (own_low.sum(axis=0) - own_low))[: len(self.groups)]
        if self.layout.classes:
            return least, most
        return least.sum(axis=1, keepdims=True), most.sum(axis=1, keepdims=True)

    def _leaves_room(self, name: str, least: Floats, most: Floats) -> bool:
        """For hits or misses, of which each subgroup has ``least`` to ``most`` ``(V, C or 1)`` by its scores."""
        room, by_class = self.figures.floor - 1, bool(self.layout.classes)
        low, high = self._ranges([self.figures.groups[0]], name)  # (1, C)
        own_low, own_high = self._ranges([*self.groups, *self.others], name)
        more = ((0, len(self.others)), (0, 0))
        least, most = np.pad(least, more), np.pad(most, more, constant_values=UNKNOWN)
        most_each, least_each = np.minimum(own_high, most), np.maximum(own_low, least if by_class else 0)
        small = least_each < self.figures.floor
        may_be_none = (least_each <= 0) & (most_each.sum(axis=0) - most_each >= low)
        may_be_some = (most_each >= room) & (high - (least_each.sum(axis=0) - least_each) >= room)
        if not by_class:  # the other classes may take what the subgroup has at least, and leave what it may have
            within = np.minimum(own_high, high)
            may_be_none &= within.sum(axis=1, keepdims=True) - within >= least
            may_be_some &= most - (own_low.sum(axis=1, keepdims=True) - own_low) >= room
        return bool((~small | (may_be_none & may_be_some)).all())

    def _ranges(self, groups: Sequence[GroupFigures | None], name: str) -> tuple[Floats, Floats]:
        """The ends of what is told of each class's hits or misses, ``(G, C)``."""
        none = [None] * self.classes
        told = [[getattr(each, name) for each in group.classes] if group is not None else none for group in groups]
        low = np.array([[0.0 if each is None else each.low for each in row] for row in told])
        high = np.array([[float(UNKNOWN) if each is None else each.high for each in row] for row in told])
        return low, high
