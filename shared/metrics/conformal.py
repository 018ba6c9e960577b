"""Conformal prediction sets by histograms of calibration scores, which add up over sites.

A calibration image with label y has the score 1 − p(y). With the ⌈(n + 1)·coverage⌉-th smallest score q of n images,
the set {c : 1 − p(c) ≤ q} holds the label of a new image with at least that probability, if calibration images and new
images are exchangeable: in any order they are equally likely (Vovk et al. 2005; Lei et al. 2018). By class, q is taken
among the images of that class, and the same holds within each class (Mondrian).

A histogram knows a score only up to its bin. q is rounded up to the bin's upper edge, so that coverage never falls.
Images of one patient are not exchangeable with those of others: of each patient one image counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel

from promptfed.shared.metrics.score_sums import ScoreSums, UnknownGroup

BINS = 1000
Counts = NDArray[np.int64]
ByClass = dict[str, dict[int, int]]


class Calibration(BaseModel):
    """How many calibration images of each class have a score in (k/`BINS`, (k + 1)/`BINS`], by class and k.

    ``by_group``: the same by column and value of the images' subgroups, such as a scanner.
    """

    by_class: ByClass
    by_group: dict[str, dict[str, ByClass]] = {}

    @property
    def images(self) -> int:
        """The number of calibration images."""
        return sum(sum(bins.values()) for bins in self.by_class.values())

    def of(self, group: tuple[str, str] | None) -> ScoreSums:
        """The counts by class, of all images or of those with a value in a column. Raises UnknownGroup."""
        bins_by_class = self.by_class
        if group is not None:
            column, value = group
            if value not in self.by_group.get(column, {}):
                raise UnknownGroup(f"{column}={at}" for column, values in self.by_group.items() for at in values)
            bins_by_class = self.by_group[column][value]
        counts = np.zeros((len(bins_by_class), BINS), dtype=np.int64)
        for row, bins in enumerate(bins_by_class.values()):
            counts[row, list(bins)] = list(bins.values())
        return ScoreSums(counts, 1, classes=tuple(bins_by_class))


@dataclass(frozen=True)
class Histograms:
    """Which histograms of scores there are: a row for each of ``values`` of ``column``, and in it for each class.

    ``classes`` 0: all classes are counted together. Without ``values``, all images.
    """

    bins: int
    classes: int = 0
    column: str | None = None
    values: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """The number of rows."""
        return (len(self.values) or 1) * (self.classes or 1)

    def counts(
        self,
        labels: ArrayLike,
        probabilities: ArrayLike,
        subgroups: Mapping[str, Sequence[str]],
        patients: Sequence[str] | None = None,
    ) -> Counts:
        """The histograms ``(rows, bins)`` of labels (N,) under probabilities (N, C).

        A label −1, and another value than `values`, do not count. Of each of ``patients (N,)`` the first image counts.
        """
        truth, told = np.asarray(labels), np.asarray(probabilities, dtype=float)
        rows = np.where(truth >= 0, truth, -1) if self.classes else np.where(truth >= 0, 0, -1)
        if self.values:
            place = {value: k for k, value in enumerate(self.values)}
            own = np.array([place.get(value, -1) for value in subgroups[self.column or ""]])
            rows = np.where((rows < 0) | (own < 0), -1, own * (self.classes or 1) + rows)
        kept = np.flatnonzero(rows >= 0)
        if patients is not None:
            first = {patients[row]: row for row in reversed(kept.tolist())}
            kept = np.array(sorted(first.values()), dtype=np.int64)
        counts = np.zeros((self.rows, self.bins), dtype=np.int64)
        np.add.at(counts, (rows[kept], score_bins(1 - told[kept, truth[kept]], self.bins)), 1)
        return counts


def calibration_of(
    labels: ArrayLike,
    probabilities: ArrayLike,
    names: Sequence[str],
    *,
    patients: Sequence[str] | None = None,
    subgroups: Mapping[str, Sequence[str]] | None = None,
) -> Calibration:
    """The histograms of labels (N,) among ``names`` under probabilities (N, C), also by value of each subgroup."""
    subgroups = subgroups or {}

    def by_class(layout: Histograms) -> ByClass:
        counts = layout.counts(labels, probabilities, subgroups, patients)
        return {
            name: {int(k): int(own[k]) for k in np.flatnonzero(own)} for name, own in zip(names, counts, strict=True)
        }

    by_group = {
        column: {value: by_class(Histograms(BINS, len(names), column, (value,))) for value in sorted(set(values))}
        for column, values in subgroups.items()
    }
    return Calibration(by_class=by_class(Histograms(BINS, len(names))), by_group=by_group)


def score_bins(scores: ArrayLike, bins: int) -> NDArray[np.int64]:
    """The bin k of each score s in (k/bins, (k + 1)/bins]; 0 is in the first."""
    found: NDArray[np.int64] = np.clip(np.ceil(np.asarray(scores) * bins).astype(np.int64) - 1, 0, bins - 1)
    return found


def added(parts: Sequence[Calibration]) -> Calibration:
    """The histograms of all sites' images together."""
    columns = dict.fromkeys(column for part in parts for column in part.by_group)
    groups = {column: [part.by_group.get(column, {}) for part in parts] for column in columns}
    by_group = {
        column: {value: _added(own.get(value, {}) for own in of_parts) for value in sorted(set().union(*of_parts))}
        for column, of_parts in groups.items()
    }
    return Calibration(by_class=_added(part.by_class for part in parts), by_group=by_group)


def prediction_set(
    probabilities: Mapping[str, float], threshold: float, thresholds: Mapping[str, float] | None = None
) -> list[str]:
    """The classes whose score is at most the threshold, or their own one, the likeliest first.

    A class without calibration images is always in a set by class: nothing is known of it.
    """
    limits = {name: thresholds.get(name, 1.0) if thresholds is not None else threshold for name in probabilities}
    inside = [name for name, p in probabilities.items() if 1 - p <= limits[name]]
    return sorted(inside, key=lambda name: -probabilities[name])


def _added(parts: Iterable[Mapping[str, Mapping[int, int]]]) -> ByClass:
    total: ByClass = {}
    for part in parts:
        for name, bins in part.items():
            own = total.setdefault(name, {})
            for k, count in bins.items():
                own[k] = own.get(k, 0) + count
    return {name: dict(sorted(bins.items())) for name, bins in total.items()}
