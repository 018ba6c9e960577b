"""Figures of a classifier's answers: calibration, macro-F1, accuracy by class. All are functions of plain arrays.

Calibration: Guo et al., "On Calibration of Modern Neural Networks", 2017, Eq. 3 (ECE with equal bins). Unseen classes:
Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples", 2017 (the confidence
of what was predicted is the score; known classes are the positives).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

BINS = 15
ONE_CLASS, FREQUENT = 0.9, 0.1
Floats = NDArray[np.float64]


def finite(numbers: ArrayLike) -> NDArray[np.float64]:
    """The numbers as float64. Raises ValueError if one is not finite: no order of it is right."""
    array = np.asarray(numbers, dtype=float)
    if not np.isfinite(array).all():
        wrong = int((~np.isfinite(array)).sum())
        raise ValueError(
            f"{wrong} of {array.size} scores are not finite: the model has diverged, or the file is damaged"
        )
    return array


def calibration_error(confidence: ArrayLike, right: ArrayLike, bins: int = BINS) -> float:
    """ECE = Σ n_b/N·|accuracy_b − confidence_b| over equal bins (lower, upper] of confidences (N,) in [0, 1].

    ``right`` (N,): whether each answer was.

    Raises:
        ValueError: the lists are empty or differ in length, or a number is not finite.
    """
    sure, hits = finite(confidence), finite(right)
    if len(sure) != len(hits) or not len(sure):
        raise ValueError(f"{len(sure)} confidences for {len(hits)} answers")
    place = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    inside = [place == k for k in range(bins) if (place == k).any()]
    return sum(int(bin.sum()) / len(sure) * abs(float(hits[bin].mean()) - float(sure[bin].mean())) for bin in inside)


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
    occurrences = np.bincount(truth[truth >= 0], minlength=size) + np.bincount(answers, minlength=size)
    hits = np.bincount(truth[truth == answers], minlength=size)
    return float(np.mean(2 * hits[occurrences > 0] / occurrences[occurrences > 0]))


def mean_auroc(labels: ArrayLike, probabilities: ArrayLike) -> float | None:
    """The mean over classes of the area under the ROC curve of labels (N,) and probabilities (N, C).

    Classes without an image, or without an image of another class, do not count; None if no class counts.
    """
    from scipy.stats import rankdata

    truth, found = np.asarray(labels), []
    for k, scores in enumerate(np.asarray(probabilities).T):
        of_class = truth == k
        n, others = int(of_class.sum()), int((~of_class).sum())
        if n and others:
            found.append((float(rankdata(scores)[of_class].sum()) - n * (n + 1) / 2) / (n * others))
    return float(np.mean(found)) if found else None


def fitted_temperature(labels: ArrayLike, logits: ArrayLike) -> float:
    """T between 0.05 and 20 with the least mean cross-entropy of logits (N, C)/T under labels (N,) (Guo et al.)."""
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    truth, scores = np.asarray(labels, dtype=np.int64), finite(logits)

    def loss(exponent: float) -> float:
        return -float(log_softmax(scores / math.exp(exponent), axis=1)[np.arange(len(truth)), truth].mean())

    bounds = (math.log(0.05), math.log(20))
    return math.exp(float(minimize_scalar(loss, bounds=bounds, method="bounded").x))


def largest_share(classes: ArrayLike) -> float:
    """The share of the most frequent of ``classes (N,)``; −1 is none of them."""
    indices = np.asarray(classes, dtype=np.int64)
    return float(np.bincount(indices[indices >= 0], minlength=1).max()) / len(indices)


def nearly_one_class(one_answer: float | None, majority: float | None = None) -> bool:
    """Whether nearly all answers are one class; where labels are known, only if no class is nearly as frequent.

    It needs no labels: a domain that is shifted as a whole shows itself so.
    """
    return one_answer is not None and one_answer >= ONE_CLASS and round(one_answer - (majority or 0.0), 4) >= FREQUENT


def _pair(labels: ArrayLike, predicted: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    truth, answers = np.asarray(labels, dtype=np.int64), np.asarray(predicted, dtype=np.int64)
    if len(truth) != len(answers) or not len(truth):
        raise ValueError(f"{len(truth)} labels for {len(answers)} answers")
    return truth, answers


def average_precision(truth: NDArray[np.bool_], scores: Floats, weights: Floats) -> Floats:
    """Σ (R_k − R_{k−1})·P_k over the distinct scores, from the highest down, for each row of ``weights (B, N)``.

    Raises:
        ValueError: a score is not finite.
    """
    order = np.argsort(-finite(scores), kind="stable")
    ends = np.flatnonzero(np.diff(scores[order], append=-np.inf))  # the last image of each score
    drawn = weights[:, order]
    hits = np.cumsum(drawn * truth[order], axis=1)[:, ends]
    taken = np.cumsum(drawn, axis=1)[:, ends]
    precision = hits / np.maximum(taken, 1e-300)
    steps = np.diff(hits, axis=1, prepend=0.0)
    areas: Floats = (steps * precision).sum(axis=1) / np.maximum(hits[:, -1], 1e-300)
    return areas


def mean_average_precision(labels: ArrayLike, scores: ArrayLike) -> float | None:
    """The mean over classes of `average_precision`, of labels (N, C) that are 1, 0 or −1 (unknown) and scores (N, C).

    Classes without an image that has them, or without one that lacks them, do not count; None if no class counts.

    Raises:
        ValueError: a score is not finite.
    """
    truth, said = np.asarray(labels), finite(scores)
    found = []
    for k in range(truth.shape[1]):
        labelled = truth[:, k] >= 0
        present = truth[labelled, k] == 1
        if present.any() and not present.all():
            found.append(float(average_precision(present, said[labelled, k], np.ones((1, len(present))))[0]))
    return float(np.mean(found)) if found else None
