"""A paired bootstrap (Efron and Tibshirani, 1993)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
Floats = NDArray[np.float64]


def paired_bootstrap(differences: Sequence[Floats], seed: int = 0, draws: int = DRAWS) -> tuple[float, float, float]:
    """The 95 % interval and the two-sided p-value of the mean difference of pairs.

    ``differences`` has one array for each list of pictures: ``(N,)``, or ``(seeds, N)`` if several seeds share the
    list. Pictures are resampled within their list, with all their seeds, so every draw has the same number of pictures
    of each list. p = 2·min(P(d ≤ 0), P(d ≥ 0)), each as (count + 1)/(draws + 1), at most 1.
    """
    lists = [np.atleast_2d(rows) for rows in differences]
    rng = np.random.default_rng(seed)
    sums = np.zeros(draws)
    for rows in (each.sum(axis=0) for each in lists):
        for start in range(0, draws, 500):
            size = min(500, draws - start)
            sums[start : start + size] += rows[rng.integers(len(rows), size=(size, len(rows)))].sum(axis=1)
    means = sums / sum(each.size for each in lists)
    low, high = (float(value) for value in np.quantile(means, [0.025, 0.975]))
    tails = [(int(count) + 1) / (draws + 1) for count in ((means <= 0).sum(), (means >= 0).sum())]
    return low, high, min(1.0, 2 * min(tails))
