"""Conformal prediction sets by histograms of calibration scores, which add up over sites.

A calibration image with label y has the score 1 − p(y). With the ⌈(n + 1)·coverage⌉-th smallest score q of n images,
the set {c : 1 − p(c) ≤ q} holds the label of a new image with at least that probability, if calibration images and new
images are exchangeable: in any order they are equally likely (Vovk et al. 2005; Lei et al. 2018). By class, q is taken
among the images of that class, and the same holds within each class (Mondrian).

A histogram knows a score only up to its bin. q is rounded up to the bin's upper edge, so that coverage never falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel

BINS = 1000


class Calibration(BaseModel):
    """How many calibration images of each class have a score in (k/`BINS`, (k + 1)/`BINS`], by class and k."""

    by_class: dict[str, dict[int, int]]

    @property
    def images(self) -> int:
        """The number of calibration images."""
        return sum(sum(bins.values()) for bins in self.by_class.values())

    def threshold(self, coverage: float) -> float:
        """q over all images; 1 (every class is in the set) if there are too few."""
        return quantile(_sum(self.by_class.values()), coverage)

    def thresholds(self, coverage: float) -> dict[str, float]:
        """q of each class that has calibration images."""
        return {name: quantile(bins, coverage) for name, bins in self.by_class.items() if bins}


def calibration_of(labels: ArrayLike, probabilities: ArrayLike, names: Sequence[str]) -> Calibration:
    """The histogram of labels (N,), of which −1 does not count, and probabilities (N, C) of the classes ``names``."""
    truth, told = np.asarray(labels), np.asarray(probabilities, dtype=float)
    found: dict[str, dict[int, int]] = {}
    for k, name in enumerate(names):
        scores = 1 - told[truth == k, k]
        bins, counts = np.unique(score_bins(scores, BINS), return_counts=True)
        found[name] = dict(zip(bins.tolist(), counts.tolist(), strict=True))
    return Calibration(by_class=found)


def score_bins(scores: ArrayLike, bins: int) -> NDArray[np.int64]:
    """The bin k of each score s in (k/bins, (k + 1)/bins]; 0 is in the first."""
    found: NDArray[np.int64] = np.clip(np.ceil(np.asarray(scores) * bins).astype(np.int64) - 1, 0, bins - 1)
    return found


def added(parts: Iterable[Calibration]) -> Calibration:
    """The histogram of all sites' images together."""
    names: dict[str, list[Mapping[int, int]]] = {}
    for part in parts:
        for name, bins in part.by_class.items():
            names.setdefault(name, []).append(bins)
    return Calibration(by_class={name: _sum(each) for name, each in names.items()})


def quantile(bins: Mapping[int, int], coverage: float) -> float:
    """The upper edge of the bin of the ⌈(n + 1)·coverage⌉-th smallest of n scores; 1 if there are fewer scores."""
    wanted, reached = math.ceil((sum(bins.values()) + 1) * coverage), 0
    for k in sorted(bins):
        reached += bins[k]
        if reached >= wanted:
            return (k + 1) / BINS
    return 1.0


def prediction_set(
    probabilities: Mapping[str, float], threshold: float, thresholds: Mapping[str, float] | None = None
) -> list[str]:
    """The classes whose score is at most the threshold, or their own one, the likeliest first.

    A class without calibration images is always in a set by class: nothing is known of it.
    """
    limits = {name: thresholds.get(name, 1.0) if thresholds is not None else threshold for name in probabilities}
    inside = [name for name, p in probabilities.items() if 1 - p <= limits[name]]
    return sorted(inside, key=lambda name: -probabilities[name])


def _sum(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for bins in parts:
        for k, count in bins.items():
            total[k] = total.get(k, 0) + count
    return dict(sorted(total.items()))
