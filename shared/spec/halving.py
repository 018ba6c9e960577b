"""Successive halving: many candidates train for a few rounds, the better ones for more, the last ones to the end.

A candidate is anything that can be compared, such as a method with a learning rate. Scores are accuracies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

CANDIDATES_FACTOR = 3  # candidates of a rung for each that goes on
ROUNDS_FACTOR = 2  # rounds of a rung for each round of the one before
DECADES = 4
Key = TypeVar("Key")


@dataclass(frozen=True)
class Rung:
    """``candidates`` train for ``rounds`` rounds from the start."""

    candidates: int
    rounds: int


def rungs(candidates: int, rounds: int, last: int = 2) -> tuple[Rung, ...]:
    """The rungs for ``candidates``, from many with few rounds to at most ``last`` with all ``rounds``.

    A rung has a third of the candidates of the one before, and twice its rounds.

    Raises:
        ValueError: a number is below 1.
    """
    if min(candidates, rounds, last) < 1:
        raise ValueError("candidates, rounds and last must be at least 1")
    counts = [candidates]
    while counts[-1] > last:
        counts.append(max(last, math.ceil(counts[-1] / CANDIDATES_FACTOR)))
    steps = range(len(counts) - 1, -1, -1)
    return tuple(
        Rung(count, math.ceil(rounds / ROUNDS_FACTOR**step)) for count, step in zip(counts, steps, strict=True)
    )


def ranked(scores: Mapping[Key, float]) -> list[Key]:
    """The candidates from the highest score to the lowest; equal ones in the order of ``scores``."""
    return sorted(scores, key=lambda key: -scores[key])


def survivors(
    scores: Mapping[Key, float], keep: int, default: Key, group: Callable[[Key], Hashable] | None = None, most: int = 2
) -> list[Key]:
    """The ``keep`` best candidates in the order of their scores. The ``default`` always survives, if need be as last.

    With ``group`` at most ``most`` candidates of one group survive, such as the rates of one method.

    Raises:
        ValueError: ``keep`` is below 1, or the default has no score.
    """
    if keep < 1 or default not in scores:
        raise ValueError("at least one candidate must be kept, and the default must have a score")
    best: list[Key] = []
    for key in ranked(scores):
        if group is None or sum(group(other) == group(key) for other in best) < most:
            best.append(key)
    return best[:keep] if default in best[:keep] else [*best[: keep - 1], default]


def grid(centre: float, decades: float = DECADES, per_decade: int = 1) -> tuple[float, ...]:
    """Rates in equal ratios over ``decades``, in ascending order, with ``centre`` in the middle."""
    half = math.ceil(decades * per_decade / 2)
    steps = range(-half, half + 1)
    return tuple(_short(centre * 10 ** (step / per_decade)) if step else centre for step in steps)


def _short(rate: float) -> float:
    """The rate with two digits, as it is written into a spec."""
    return float(f"{rate:.2g}")
