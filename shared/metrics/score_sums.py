"""Thresholds of prediction sets from the sum of sites' histograms of calibration scores (`conformal`).

With C scores up to a bin's upper edge and U above it, the edge is high enough where C ≥ ⌈(C + U + 1)·coverage⌉. Counts
that sites round down to multiples of a floor, and noise, are allowed for in the direction that raises the threshold.
Noise lowers it with a probability of `FAILURE` at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FAILURE = 1e-6


class UnknownGroup(ValueError):
    """There are no calibration scores of a group. The message names those that there are."""

    def __init__(self, known: Iterable[str]):
        super().__init__(", ".join(known) or "none")


@dataclass(frozen=True)
class ScoreSums:
    """The sum of the sites' histograms.

    Attributes:
        counts: (rows, bins), a row for each value of ``column``, and within it for each class where ``classes`` are
            given; one row without both.
        sites: how many histograms are in the sum.
        slack: the most by which rounding at the sites has lowered a count of the sum.
        epsilon: of the discrete Laplace noise that each site has added to each of its counts; None: no noise.
    """

    counts: NDArray[np.int64]
    sites: int
    slack: int = 0
    epsilon: float | None = None
    classes: tuple[str, ...] = ()
    column: str | None = None
    values: tuple[str, ...] = ()

    def of(self, group: tuple[str, str] | None) -> ScoreSums:
        """The sums of the images with a value in a column; None: of all. Raises UnknownGroup."""
        if group is None:
            return self
        column, value = group
        if column != self.column or value not in self.values:
            raise UnknownGroup(f"{self.column}={each}" for each in self.values)
        own = np.split(self.counts, len(self.values))[self.values.index(value)]
        return replace(self, counts=own, column=None, values=())

    def threshold(self, coverage: float) -> float:
        """The threshold for all classes; 1 where there are too few scores."""
        return self._threshold(self.counts, coverage)

    def thresholds(self, coverage: float) -> dict[str, float] | None:
        """By class; None where the classes were counted together. 1 (always in the set) without scores of a class."""
        if not self.classes:
            return None
        by_class = self.counts.reshape(-1, len(self.classes), self.counts.shape[1])
        return {name: self._threshold(by_class[:, k], coverage) for k, name in enumerate(self.classes)}

    def _threshold(self, rows: NDArray[np.int64], coverage: float) -> float:
        below, bins = np.cumsum(rows.sum(axis=0)), int(rows.shape[1])
        for k in range(bins):
            above = int(below[-1] - below[k]) + self.slack * len(rows) * (bins - k - 1)
            wanted = math.ceil((int(below[k]) + above + 1) * coverage)
            if int(below[k]) - self._margin(coverage, k, bins, len(rows)) >= wanted:
                return (k + 1) / bins
        return 1.0

    def _margin(self, coverage: float, k: int, bins: int, rows: int) -> float:
        """What the noise of (1 − coverage)·C − coverage·U exceeds with a probability of `FAILURE`/bins at most.

        This is Chernoff's bound, (log(bins/`FAILURE`) + log E e^(t·noise))/t for any t > 0.
        """
        if self.epsilon is None:
            return 0.0
        lower, upper = self.sites * rows * (k + 1), self.sites * rows * (bins - k - 1)
        t = np.linspace(0, self.epsilon / max(coverage, 1 - coverage), 400)[1:-1]
        exponent = lower * self._exponent((1 - coverage) * t) + upper * self._exponent(coverage * t)
        return float(np.min((math.log(bins / FAILURE) + exponent) / t))

    def _exponent(self, t: NDArray[np.float64]) -> NDArray[np.float64]:
        """log E e^(t·k) of P(k) ∝ e^(−ε·|k|), for |t| < ε."""
        assert self.epsilon is not None
        p = math.exp(-self.epsilon)
        found: NDArray[np.float64] = 2 * math.log1p(-p) - np.log1p(-p * np.exp(t)) - np.log1p(-p * np.exp(-t))
        return found
