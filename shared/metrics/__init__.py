"""Figures of a classifier's answers: calibration, macro-F1, accuracy by class. All are functions of plain arrays.

Calibration: Guo et al., "On Calibration of Modern Neural Networks", 2017, Eq. 3 (ECE with equal bins). Unseen classes:
Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples", 2017 (the confidence
of what was predicted is the score; known classes are the positives).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

BINS = 15


def finite(numbers: ArrayLike) -> NDArray[np.float64]:
    """The numbers as float64. Raises ValueError if one is not finite: no order of it is right."""
    known = np.asarray(numbers, dtype=float)
    if not np.isfinite(known).all():
        wrong = int((~np.isfinite(known)).sum())
        raise ValueError(
            f"{wrong} of {known.size} scores are not finite: the model has diverged, or the file is damaged"
        )
    return known


@dataclass(frozen=True)
class Bin:
    """Images whose confidence lies in (lower, upper]; means are 0 where there is none."""

    lower: float
    upper: float
    count: int
    confidence: float
    accuracy: float


def reliability(confidence: ArrayLike, right: ArrayLike, bins: int = BINS) -> list[Bin]:
    """The reliability diagram of confidences (N,) in [0, 1] and whether each answer was ``right`` (N,).

    Raises:
        ValueError: the lists are empty or differ in length, or a number is not finite.
    """
    sure, hits = finite(confidence), finite(right)
    if len(sure) != len(hits) or not len(sure):
        raise ValueError(f"{len(sure)} confidences for {len(hits)} answers")
    place = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    groups = []
    for k in range(bins):
        inside = place == k
        count = int(inside.sum())
        means = (float(sure[inside].mean()), float(hits[inside].mean())) if count else (0.0, 0.0)
        groups.append(Bin(k / bins, (k + 1) / bins, count, *means))
    return groups


def calibration_error(confidence: ArrayLike, right: ArrayLike, bins: int = BINS) -> float:
    """ECE = Σ n_b/N·|accuracy_b − confidence_b| over equal bins. Raises ValueError as `reliability`."""
    filled = reliability(confidence, right, bins)
    total = sum(group.count for group in filled)
    return sum(group.count / total * abs(group.accuracy - group.confidence) for group in filled)


def class_accuracies(labels: ArrayLike, predicted: ArrayLike) -> dict[int, float]:
    """The share of each class's images (of those classes that occur in ``labels``) that was told rightly."""
    truth, answers = _pair(labels, predicted)
    return {int(k): float((answers[truth == k] == k).mean()) for k in np.unique(truth)}


def macro_f1(labels: ArrayLike, predicted: ArrayLike) -> float:
    """The mean of 2·tp/(2·tp + fp + fn) over the classes that occur among ``labels`` or ``predicted`` (N,).

    A class without either has no F1, and does not count.

    A label of −1 is an image of none of the classes: whatever is answered to it is wrong.
    """
    truth, answers = _pair(labels, predicted)
    size = int(max(truth.max(), answers.max())) + 1
    told = np.bincount(truth[truth >= 0], minlength=size) + np.bincount(answers, minlength=size)
    hits = np.bincount(truth[truth == answers], minlength=size)
    return float(np.mean(2 * hits[told > 0] / told[told > 0]))


def _pair(labels: ArrayLike, predicted: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    truth, answers = np.asarray(labels, dtype=np.int64), np.asarray(predicted, dtype=np.int64)
    if len(truth) != len(answers) or not len(truth):
        raise ValueError(f"{len(truth)} labels for {len(answers)} answers")
    return truth, answers
