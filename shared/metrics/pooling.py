"""Random effects: the figure of several sites from each one's estimate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel

from promptfed.shared.metrics.estimates import Estimate
from promptfed.shared.metrics.figures import finite

POOLED = {
    "auroc": "AUROC",
    "average_precision": "average precision",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
}
"""Figures of a class, with their titles."""
LEAST_SE, MOST_SE = 1e-6, 1e6  # of a logit; a site may say any number
MOST_LOGIT = 28.0  # of one of 2⁴⁰ cases


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

    usable = [(each.value, each.se) for each in estimates if each.se is not None and LEAST_SE <= each.se <= MOST_SE]
    if len(usable) < 2:
        return None
    # A proportion of 0 or 1 keeps a finite logit: it moves by the half case that its standard error counts.
    logits = [logit(value) if 0 < value < 1 else _edge(value, se) for value, se in usable]
    pooled = pool(np.clip(logits, -MOST_LOGIT, MOST_LOGIT), [se * se for _, se in usable])
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
