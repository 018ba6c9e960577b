"""Figures of a classifier's answers: calibration, macro-F1, accuracy by class. All are functions of plain arrays.

Calibration: Guo et al., "On Calibration of Modern Neural Networks", 2017, Eq. 3 (ECE with equal bins). Unseen classes:
Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples", 2017 (the confidence
of what was predicted is the score; known classes are the positives).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict

BINS = 15
ONE_CLASS, FREQUENT = 0.9, 0.1
ZERO_SHOT = "zero-shot"  # the template's answers stand as a further classifier's, split@zero-shot
DRAWS = 1000
Z = 1.959963984540054  # the normal distribution's 97.5 % point
_CELLS = 1 << 22  # numbers in one part of the bootstrap
Floats = NDArray[np.float64]

POOLED = {
    "auroc": "AUROC",
    "average_precision": "average precision",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
}
"""Figures of a class, with their titles."""

LEAST_SE, MOST_SE = 1e-6, 1e6  # of a logit; a site may say any number
MOST_LOGIT = 28.0  # of one of 2⁴⁰ cases


def finite(numbers: ArrayLike) -> NDArray[np.float64]:
    """The numbers as float64. Raises ValueError if one is not finite: no order of it is right."""
    known = np.asarray(numbers, dtype=float)
    if not np.isfinite(known).all():
        wrong = int((~np.isfinite(known)).sum())
        raise ValueError(
            f"{wrong} of {known.size} scores are not finite: the model has diverged, or the file is damaged"
        )
    return known


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
    return sum(int(own.sum()) / len(sure) * abs(float(hits[own].mean()) - float(sure[own].mean())) for own in inside)


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


def mean_auroc(labels: ArrayLike, probabilities: ArrayLike) -> float | None:
    """The mean over classes of the area under the ROC curve of labels (N,) and probabilities (N, C).

    Classes without an image, or without an image of another class, do not count; None if no class counts.
    """
    from scipy.stats import rankdata

    truth, found = np.asarray(labels), []
    for k, scores in enumerate(np.asarray(probabilities).T):
        own = truth == k
        n, others = int(own.sum()), int((~own).sum())
        if n and others:
            found.append((float(rankdata(scores)[own].sum()) - n * (n + 1) / 2) / (n * others))
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
    known = np.asarray(classes, dtype=np.int64)
    return float(np.bincount(known[known >= 0], minlength=1).max()) / len(known)


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


@dataclass(frozen=True)
class Outcomes:
    """One client's answers on one test set after ``round``; ``split`` is ``split@variant`` of a further classifier.

    ``labels`` and ``predicted`` are indices in ``class_names``, ``confidence`` is the probability of what was
    predicted; ``auroc`` is the mean over the classes; ``images`` is a hash of the images in order: lists with the same
    hash can be paired image by image.
    """

    round: int
    client: str
    split: str
    class_names: tuple[str, ...]
    labels: tuple[int, ...]
    predicted: tuple[int, ...]
    confidence: tuple[float, ...]
    images: str
    auroc: float | None = None


Record = Callable[[Outcomes], None]


class Estimate(BaseModel):
    """A figure between 0 and 1 with its 95 % interval; ``se``: the standard error of its logit, where it has one."""

    model_config = ConfigDict(allow_inf_nan=False)

    value: float
    low: float
    high: float
    se: float | None = None


class ClassFigures(BaseModel):
    """Figures of one class against the rest; None where there are no positives or no negatives, or no such answer."""

    name: str
    positives: int
    negatives: int
    auroc: Estimate | None = None
    average_precision: Estimate | None = None
    sensitivity: Estimate | None = None
    specificity: Estimate | None = None
    balanced_accuracy: float | None = None


def class_figures(
    name: str, truth: ArrayLike, scores: ArrayLike, decided: ArrayLike, groups: Sequence[str] | None = None
) -> ClassFigures:
    """The figures of answers to N images: whether each is of the class, its probability, and what was decided.

    ``groups (N,)``: the patient of each image; images of one patient are drawn together in the bootstrap.

    Raises:
        ValueError: there are no images, the lists differ in length, or a score is not finite.
    """
    is_class, said = np.asarray(truth, dtype=bool), np.asarray(decided, dtype=bool)
    probability = finite(scores)
    if not len(is_class) or not len(is_class) == len(said) == len(probability):
        raise ValueError(f"{len(is_class)} labels, {len(probability)} scores and {len(said)} decisions")
    positives, negatives = int(is_class.sum()), int((~is_class).sum())
    hits, passed = int((said & is_class).sum()), int((~said & ~is_class).sum())
    both = positives > 0 and negatives > 0
    return ClassFigures(
        name=name,
        positives=positives,
        negatives=negatives,
        auroc=auroc_estimate(is_class, probability) if both else None,
        average_precision=precision_estimate(is_class, probability, groups) if both else None,
        sensitivity=proportion(hits, positives),
        specificity=proportion(passed, negatives),
        balanced_accuracy=(hits / positives + passed / negatives) / 2 if both else None,
    )


def proportion(hits: int, count: int) -> Estimate | None:
    """hits/count with Wilson's interval; None of nothing."""
    if not count:
        return None
    share, spread = hits / count, Z * Z / count
    middle, half = share + spread / 2, Z * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    low, high = (max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread)))
    # The usual half a case keeps the logit of 0 and 1, and its standard error, finite.
    se = math.sqrt(1 / (hits + 0.5) + 1 / (count - hits + 0.5))
    return Estimate(value=share, low=low, high=high, se=se)


def interval_text(estimate: Estimate | None) -> str:
    """An estimate in percent, as 81.2 [76.0, 85.5]."""
    if estimate is None:
        return "-"
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def auroc_estimate(truth: NDArray[np.bool_], scores: Floats) -> Estimate:
    """The area under the ROC curve with DeLong's interval. There must be positives and negatives.

    Raises:
        ValueError: a score is not finite.
    """
    from scipy.stats import rankdata

    scores = finite(scores)
    positive, negative = scores[truth], scores[~truth]
    within = [rankdata(part) for part in (positive, negative)]
    ranks = rankdata(np.concatenate([positive, negative]))
    m, n = len(positive), len(negative)
    above = (ranks[:m] - within[0]) / n  # the share of negatives below each positive
    below = 1 - (ranks[m:] - within[1]) / m  # the share of positives above each negative
    area = float(above.mean())
    variance = (above.var(ddof=1) / m if m > 1 else 0.0) + (below.var(ddof=1) / n if n > 1 else 0.0)
    return on_logit_scale(area, float(np.sqrt(variance)), min(m, n))


def on_logit_scale(value: float, se: float, cases: int, reach: float = Z) -> Estimate:
    """The estimate whose interval is ±``reach`` standard errors of the logit; at 0 or 1 Wilson's of ``cases`` cases."""
    from scipy import special

    spread = value * (1 - value)
    if spread <= 0 or se <= 0:
        bound = proportion(round(value * cases), cases)
        assert bound is not None
        return Estimate(value=value, low=min(value, bound.low), high=max(value, bound.high))
    middle, scaled = special.logit(value), se / spread
    low, high = (float(special.expit(middle + side * reach * scaled)) for side in (-1, 1))
    return Estimate(value=value, low=low, high=high, se=scaled)


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
        known = truth[:, k] >= 0
        own = truth[known, k] == 1
        if own.any() and not own.all():
            found.append(float(average_precision(own, said[known, k], np.ones((1, len(own))))[0]))
    return float(np.mean(found)) if found else None


def precision_estimate(truth: NDArray[np.bool_], scores: Floats, groups: Sequence[str] | None = None) -> Estimate:
    """Average precision; the standard error is that of bootstrap draws that hold a positive.

    With few positives normal intervals are too narrow: with n images (or groups) that hold a positive, the standard
    error is multiplied by √(n/(n − 1)), since draws vary less than samples, and the interval is that of Student's t.
    """
    from scipy import special

    value = float(average_precision(truth, scores, np.ones((1, len(truth))))[0])
    own = range(len(truth)) if groups is None else groups
    number = {group: k for k, group in enumerate(dict.fromkeys(own))}  # not by names, which differ between files
    place = np.array([number[group] for group in own])
    units, draws, values = len(number), np.random.default_rng(0), []
    rows = max(1, _CELLS // len(truth))
    for start in range(0, DRAWS, rows):
        counts = draws.multinomial(units, [1 / units] * units, size=min(rows, DRAWS - start)).astype(float)
        weights = counts[:, place]
        weights = weights[(weights * truth).sum(axis=1) > 0]
        values.append(average_precision(truth, scores, weights))
    drawn, free = np.concatenate(values), max(1, len(np.unique(place[truth])) - 1)
    se = float(drawn.std(ddof=1)) * math.sqrt((free + 1) / free) if len(drawn) > 1 else 0.0
    return on_logit_scale(value, se, int(truth.sum()), float(special.stdtrit(free, 0.975)))


class Pooled(BaseModel):
    """A mean over ``sites`` with its 95 % interval; ``prediction``: where the figure of a further site may lie.

    ``i2``: the share of the variation between sites that is not chance. ``tau2`` is on the scale that was pooled.
    """

    sites: int
    mean: float
    low: float
    high: float
    tau2: float
    i2: float
    prediction: tuple[float, float] | None


def pool(values: ArrayLike, variances: ArrayLike) -> Pooled:
    """The random-effects mean of ``values (k,)`` with ``variances (k,)``. At least three sites give a prediction.

    The factor of Hartung and Knapp is at least 1: sites that agree by chance say no more than their own images do.

    Raises:
        ValueError: there are fewer than two sites, a variance is not positive, or a number is not finite.
    """
    from scipy import stats

    y, v = finite(values), finite(variances)
    k = len(y)
    if k < 2 or len(v) != k or not (v > 0).all():
        raise ValueError("pooling takes two sites or more, each with a standard error above 0")
    fixed = 1 / v
    q = float((fixed * (y - (fixed * y).sum() / fixed.sum()) ** 2).sum())
    tau2 = max(0.0, (q - (k - 1)) / float(fixed.sum() - (fixed**2).sum() / fixed.sum()))
    weights = 1 / (v + tau2)
    mean = float((weights * y).sum() / weights.sum())
    factor = max(1.0, float((weights * (y - mean) ** 2).sum()) / (k - 1))
    se = math.sqrt(factor / float(weights.sum()))
    half = float(stats.t.ppf(0.975, k - 1)) * se
    prediction = None
    if k > 2:
        reach = float(stats.t.ppf(0.975, k - 2)) * math.sqrt(tau2 + se * se)
        prediction = (mean - reach, mean + reach)
    i2 = max(0.0, 1 - (k - 1) / q) if q > 0 else 0.0
    return Pooled(sites=k, mean=mean, low=mean - half, high=mean + half, tau2=tau2, i2=i2, prediction=prediction)


def pool_estimates(estimates: Sequence[Estimate]) -> Pooled | None:
    """The mean of figures between 0 and 1, pooled as logits; sites without a sound standard error are left out."""
    from scipy.special import expit, logit

    known = [(each.value, each.se) for each in estimates if each.se is not None and LEAST_SE <= each.se <= MOST_SE]
    if len(known) < 2:
        return None
    # A proportion of 0 or 1 keeps a finite logit: it moves by the half case that its standard error counts.
    logits = [logit(value) if 0 < value < 1 else _edge(value, se) for value, se in known]
    pooled = pool(np.clip(logits, -MOST_LOGIT, MOST_LOGIT), [se * se for _, se in known])
    mean, low, high = map(float, expit([pooled.mean, pooled.low, pooled.high]))
    ahead = None if pooled.prediction is None else tuple(map(float, expit(pooled.prediction)))
    return pooled.model_copy(update={"mean": mean, "low": low, "high": high, "prediction": ahead})


def _edge(value: float, se: float) -> float:
    """The logit of 0 or n of n cases with half a case added: ±log(2n + 1), where se² = 2 + 1/(n + 0.5).

    A figure of another standard error is no such proportion. It was rounded to an end at the fourth place, so it is
    at most 0.00005 away: ±log(20,001).
    """
    cases = 1 / (se * se - 2) - 0.5 if 2 < se * se < 4 else 1e4
    return math.copysign(math.log(2 * cases + 1), value - 0.5)
