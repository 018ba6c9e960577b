"""Estimates of a class's figures with standard errors and intervals of 95 %."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict

from promptfed.shared.metrics.figures import Floats, average_precision, finite

DRAWS = 1000
Z = 1.959963984540054  # the normal distribution's 97.5 % point
_CELLS = 1 << 22  # numbers in one part of the bootstrap


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
    low, high = mean_interval([(hits / count, count)])
    # The usual half a case keeps the logit of 0 and 1, and its standard error, finite.
    se = math.sqrt(1 / (hits + 0.5) + 1 / (count - hits + 0.5))
    return Estimate(value=hits / count, low=low, high=high, se=se)


def mean_interval(sites: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """The 95 % interval of the mean over sites, which count equally, of fractions of so many images, at least one.

    Wilson's for one site; normal with Agresti and Caffo's variances for several.
    """
    if len(sites) == 1:
        [(share, count)] = sites
        spread = Z * Z / count
        middle, half = share + spread / 2, Z * math.sqrt(share * (1 - share) / count + spread / (4 * count))
        return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))
    mean, half = math.fsum(share for share, _ in sites) / len(sites), _reach(sites, len(sites))
    return max(0.0, mean - half), min(1.0, mean + half)


def gain_margin(pairs: Sequence[tuple[float, float, int]]) -> float:
    """Half of the 95 % interval of the mean gain over sites, of the fractions before and after of so many images each.

    Both are of the same images, which fractions alone do not tell: this is rather too wide than too narrow.
    """
    return _reach([(share, count) for *both, count in pairs for share in both], len(pairs))


def _reach(shares: Sequence[tuple[float, int]], sites: int) -> float:
    moved = [((share * count + 1) / (count + 2), count + 2) for share, count in shares]
    return Z * math.sqrt(math.fsum(share * (1 - share) / count for share, count in moved)) / sites


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


def precision_estimate(truth: NDArray[np.bool_], scores: Floats, groups: Sequence[str] | None = None) -> Estimate:
    """Average precision; the standard error is that of bootstrap draws that hold a positive.

    With few positives normal intervals are too narrow: with n images (or groups) that hold a positive, the standard
    error is multiplied by √(n/(n − 1)), since draws vary less than samples, and the interval is that of Student's t.
    """
    from scipy import special

    value = float(average_precision(truth, scores, np.ones((1, len(truth))))[0])
    units_of = range(len(truth)) if groups is None else groups
    number = {group: k for k, group in enumerate(dict.fromkeys(units_of))}  # not by names, which differ between files
    place = np.array([number[group] for group in units_of])
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
