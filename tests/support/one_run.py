"""The lower bound on ε that guessing canaries in one run shows (Steinke, Nasr, Jagielski, 2023)."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

MOST_EPSILON = 50.0


def one_run_bound(guesses: int, right: int, canaries: int, delta: float, chance: float = 0.05) -> float:
    """The largest ε that ``right`` of ``guesses`` rule out, if each of ``canaries`` took part by a fair coin.

    Steinke et al., 2023, Theorem 5.2: under (ε, δ) at least v right have probability f(v) + 2mδ·max_i (f(v − i) −
    f(v))/i at most, f(v) = P[Bin(r, e^ε/(1 + e^ε)) ≥ v].
    """
    if guesses == 0 or _one_run_chance(0.0, guesses, right, canaries, delta) > chance:
        return 0.0
    low, high = 0.0, MOST_EPSILON
    while high - low > 1e-4:
        middle = (low + high) / 2
        if _one_run_chance(middle, guesses, right, canaries, delta) <= chance:
            low = middle
        else:
            high = middle
    return low


def _one_run_chance(epsilon: float, guesses: int, right: int, canaries: int, delta: float) -> float:
    sure = 1 / (1 + math.exp(-epsilon))
    at_least = stats.binom.sf(right - 1, guesses, sure)
    if right == 0 or delta == 0:
        return float(at_least)
    steps = np.arange(1, right + 1)
    more = (stats.binom.sf(right - 1 - steps, guesses, sure) - at_least) / steps
    return float(at_least + 2 * canaries * delta * more.max())
