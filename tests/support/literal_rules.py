"""The rules of robust aggregation as their papers write them: loops over Python numbers."""

from __future__ import annotations

from itertools import accumulate
from math import dist, fsum, sqrt

Vector = list[float]


def weighted_median(values: list[float], weights: list[float]) -> float:
    """The middle of the minimisers of Σ w·|v − x|, tried one after the other (they begin and end at values)."""

    def cost(x: float) -> float:
        return fsum(w * abs(v - x) for v, w in zip(values, weights, strict=True))

    least = min(cost(v) for v in values)
    best = [v for v in values if cost(v) <= least * (1 + 1e-9) + 1e-15]
    return (min(best) + max(best)) / 2


def trimmed_mean(values: list[float], weights: list[float], cut: float) -> float:
    """Without the share ``cut`` of the weight at either end."""
    ordered = sorted(zip(values, weights, strict=True))
    ends = list(accumulate(weight for _, weight in ordered))
    total = 0.0
    for (value, weight), end in zip(ordered, ends, strict=True):
        total += value * max(0.0, min(end, 1 - cut) - max(end - weight, cut))
    return total / (1 - 2 * cut)


def plain_trimmed_mean(values: list[float], each_side: int) -> float:
    """Yin et al.: the mean without the b smallest and the b largest values."""
    kept = sorted(values)[each_side : len(values) - each_side]
    return fsum(kept) / len(kept)


def krum_scores(vectors: list[Vector], faulty: int) -> list[float]:
    """Blanchard et al.: the sum of squared distances to the n − f − 2 nearest others."""
    scores = []
    for i, vector in enumerate(vectors):
        others = sorted(dist(vector, other) ** 2 for j, other in enumerate(vectors) if j != i)
        scores.append(fsum(others[: len(vectors) - faulty - 2]))
    return scores


def krum(vectors: list[Vector], faulty: int) -> Vector:
    """The vector with the least score."""
    scores = krum_scores(vectors, faulty)
    return vectors[scores.index(min(scores))]


def multi_krum(vectors: list[Vector], faulty: int) -> Vector:
    """The plain mean of the n − f − 2 vectors with the least scores."""
    scores = krum_scores(vectors, faulty)
    best = sorted(range(len(vectors)), key=lambda i: scores[i])[: len(vectors) - faulty - 2]
    return [fsum(vectors[i][d] for i in best) / len(best) for d in range(len(vectors[0]))]


def clip(vector: Vector, most: float) -> Vector:
    """v · min(1, most/‖v‖)."""
    length = sqrt(fsum(x * x for x in vector))
    return [x * min(1.0, most / length) if length else x for x in vector]
