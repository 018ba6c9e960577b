"""Clinical figures against scikit-learn and statsmodels, their intervals against simulated sites."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import integrate, special, stats
from sklearn import metrics as reference

from promptfed.shared.metrics.estimates import (
    auroc_estimate,
    class_figures,
    gain_margin,
    mean_interval,
    on_logit_scale,
    precision_estimate,
    proportion,
)
from promptfed.shared.metrics.figures import average_precision

Floats = NDArray[np.float64]


def site(draws: np.random.Generator, area: float, share: float, count: int) -> tuple[NDArray[np.bool_], Floats]:
    """Images of a site: scores of positives are normal around √2·Φ⁻¹(AUROC), those of negatives around 0."""
    truth = draws.random(count) < share
    return truth, stats.norm.cdf(draws.normal(truth * math.sqrt(2) * stats.norm.ppf(area), 1))


@pytest.mark.parametrize("digits", [1, 16])
@pytest.mark.parametrize("seed", range(5))
def test_figures_equal_scikit_learns(seed: int, digits: int) -> None:
    """Also where many scores are equal."""
    truth, scores = site(np.random.default_rng(seed), 0.8, 0.3, 200)
    scores, said = np.round(scores, digits), scores > 0.6
    found = class_figures("cat", truth, scores, said)
    assert found.auroc is not None
    assert found.average_precision is not None
    assert found.balanced_accuracy is not None
    wanted = {
        found.auroc.value: reference.roc_auc_score(truth, scores),
        found.average_precision.value: reference.average_precision_score(truth, scores),
        found.balanced_accuracy: reference.balanced_accuracy_score(truth, said),
        found.sensitivity.value if found.sensitivity else -1: reference.recall_score(truth, said),
        found.specificity.value if found.specificity else -1: reference.recall_score(~truth, ~said),
    }
    assert all(abs(ours - theirs) < 1e-9 for ours, theirs in wanted.items())
    weights = np.random.default_rng(seed).multinomial(200, [1 / 200] * 200).astype(float)
    assert average_precision(truth, scores, weights[None])[0] == pytest.approx(
        reference.average_precision_score(truth, scores, sample_weight=weights), abs=1e-9
    )


def test_delong_equals_the_definition() -> None:
    """The variance of its structural components, pair by pair."""
    truth, scores = site(np.random.default_rng(3), 0.75, 0.4, 60)
    scores = np.round(scores, 1)
    wins = np.array([[float(p > n) + float(p == n) / 2 for n in scores[~truth]] for p in scores[truth]])
    rows, columns = wins.mean(axis=1), wins.mean(axis=0)
    se = math.sqrt(rows.var(ddof=1) / len(rows) + columns.var(ddof=1) / len(columns))
    found, area = auroc_estimate(truth, scores), wins.mean()
    assert found.value == pytest.approx(area, abs=1e-12)
    logit = math.log(area / (1 - area))
    half = stats.norm.ppf(0.975) * se / (area * (1 - area))
    assert found.low == pytest.approx(1 / (1 + math.exp(-(logit - half))), abs=1e-9)
    assert found.high == pytest.approx(1 / (1 + math.exp(-(logit + half))), abs=1e-9)


@pytest.mark.parametrize(("hits", "count"), [(0, 5), (5, 5), (3, 10), (299, 300)])
def test_proportions_have_wilsons_interval(hits: int, count: int) -> None:
    from statsmodels.stats.proportion import proportion_confint  # takes half a second, also of workers without it

    found = proportion(hits, count)
    assert found is not None
    low, high = proportion_confint(hits, count, method="wilson")
    assert (found.low, found.high) == pytest.approx((max(low, 0), min(high, 1)), abs=1e-9)


def test_what_cannot_be_measured_is_left_out() -> None:
    alone = class_figures("cat", [True, True], [0.9, 0.2], [True, False])
    assert alone.auroc is None
    assert alone.average_precision is None
    assert alone.specificity is None
    assert alone.sensitivity is not None
    none = class_figures("cat", [False, False], [0.9, 0.2], [True, False])
    assert (none.auroc, none.sensitivity, none.balanced_accuracy) == (None, None, None)
    assert none.specificity is not None
    assert proportion(0, 0) is None
    perfect = class_figures("cat", [True, False], [0.9, 0.2], [True, False])
    assert perfect.auroc is not None
    assert (perfect.auroc.value, perfect.auroc.high) == (1.0, 1.0)
    assert perfect.auroc.low < 1
    with pytest.raises(ValueError, match="0 labels"):
        class_figures("cat", [], [], [])
    for scores, decided in (([0.5], [True, False]), ([0.5, 0.5], [True])):
        with pytest.raises(ValueError, match="2 labels"):
            class_figures("cat", [True, False], scores, decided)


def test_images_of_one_patient_are_drawn_together() -> None:
    """Each image twice tells no more: grouped by image, the interval is that of the images once."""
    truth, scores = site(np.random.default_rng(5), 0.8, 0.3, 150)
    twice, patients = np.tile(truth, 2), [str(k % 150) for k in range(300)]
    once, grouped = (precision_estimate(truth, scores), precision_estimate(twice, np.tile(scores, 2), patients))
    alone = precision_estimate(twice, np.tile(scores, 2))
    assert once.se is not None
    assert grouped.se == pytest.approx(once.se, rel=0.15)
    assert alone.se is not None
    assert alone.se < 0.85 * once.se


@pytest.mark.parametrize(("groups", "se", "low"), [(None, 1.340667, 0.008059), ("aabbccdd", 0.734512, 0.099317)])
def test_a_precision_of_few_positives_has_a_wide_interval(groups: str | None, se: float, low: float) -> None:
    """Of three positives: draws vary √(3/2) times less than samples, and t has two degrees of freedom."""
    truth, scores = np.array([1, 0, 1, 0, 0, 1, 0, 0], dtype=bool), np.arange(9, 1, -1) / 10
    found = precision_estimate(truth, scores, groups and list(groups))
    assert (found.value, found.se, found.low) == pytest.approx((13 / 18, se, low), rel=1e-4)


@pytest.mark.parametrize(("positives", "reach"), [(1, 12.7062), (2, 12.7062), (3, 4.3027), (4, 3.1824)])
def test_the_interval_of_a_precision_is_students_with_one_degree_fewer(positives: int, reach: float) -> None:
    found = precision_estimate(np.isin(np.arange(12), [1, 4, 7, 9][:positives]), np.arange(12, 0, -1) / 12)
    assert found.se is not None
    assert (special.logit(found.value) - special.logit(found.low)) / found.se == pytest.approx(reach, rel=1e-4)


def test_an_interval_on_the_logit_scale_ends_between_0_and_1() -> None:
    told = on_logit_scale(1 - 1e-9, 0.5, 10)
    assert 0 <= told.low < told.value <= told.high <= 1


def true_precision(area: float, share: float) -> float:
    """The average precision of a site without end."""
    distance = math.sqrt(2) * stats.norm.ppf(area)
    cuts = np.linspace(-9, 9 + distance, 20_001)[::-1]
    recall, false = stats.norm.sf(cuts - distance), stats.norm.sf(cuts)
    return float(integrate.trapezoid(share * recall / (share * recall + (1 - share) * false), recall))


@pytest.mark.extended
def test_intervals_cover_what_they_promise() -> None:
    """95 % intervals of the AUROC, the sensitivity and the average precision hold the truth in 93 to 97 % of sites.

    The bound is wider by two standard errors: 1.4 points of 1,000 sites; 2.2 of the first 400, by which the average
    precision is judged, whose 1,000 draws a site take long.
    """
    area, share, count = 0.9, 0.2, 400  # far from the middle, where a normal interval of the figure itself would not
    draws, precision = np.random.default_rng(7), true_precision(area, share)
    held = {"auroc": 0, "average precision": 0, "sensitivity": 0}
    cut = stats.norm.ppf(0.6)
    sensitive = float(stats.norm.sf(cut - math.sqrt(2) * stats.norm.ppf(area)))
    for number in range(1000):
        truth, scores = site(draws, area, share, count)
        said = scores > 0.6
        found = proportion(int((said & truth).sum()), int(truth.sum()))
        assert found is not None
        held["sensitivity"] += found.low <= sensitive <= found.high
        held["auroc"] += (e := auroc_estimate(truth, scores)).low <= area <= e.high
        if number < 400:
            held["average precision"] += (e := precision_estimate(truth, scores)).low <= precision <= e.high
    precise = held.pop("average precision")
    assert all(930 - 14 <= times <= 970 + 14 for times in held.values()), held
    assert 0.93 - 0.022 <= precise / 400 <= 0.97 + 0.022


# The metrics against literal versions, image by image, and against figures worked out by hand.


@pytest.mark.parametrize(("truth", "scores", "value", "se", "low"), [
    ([1, 0, 0, 1, 0], [0.9, 0.8, 0.1, 0.4, 0.3], 5 / 6, (1 / 18) ** 0.5 / (5 / 36), 0.152293),
    ([1, 0, 0, 0], [0.5, 0.8, 0.1, 0.4], 2 / 3, 1.5, 0.095626),
    ([1, 1, 1, 0], [0.9, 0.2, 0.1, 0.4], 1 / 3, 1.5, 0.025754),
    ([1, 1, 0, 0, 0], [0.9, 0.8, 0.1, 0.4, 0.3], 1.0, None, 0.342380), ([1, 0], [0.2, 0.3], 0.0, None, 0.0),
])  # fmt: skip
def test_the_area_of_few_images_has_delongs_interval(
    truth: list[int], scores: list[float], value: float, se: float | None, low: float
) -> None:
    """By hand: the variance of one positive or of one negative alone is left out; at 1 the fewer of both count."""
    found = auroc_estimate(np.array(truth, dtype=bool), np.array(scores))
    assert (found.value, found.low) == pytest.approx((value, low), abs=1e-6)
    assert found.se == (None if se is None else pytest.approx(se))


def test_without_a_standard_error_an_interval_is_wilsons() -> None:
    wilson, told = proportion(5, 10), on_logit_scale(0.5, 0.0, 10)
    assert wilson is not None
    assert (told.low, told.high, told.se) == (wilson.low, wilson.high, None)
    assert gain_margin([(0.5, 0.6, 10)]) == pytest.approx(1.959964 * ((0.25 + 7 / 12 * 5 / 12) / 12) ** 0.5)
    assert gain_margin([(0.5, 0.6, 10)] * 4) == pytest.approx(gain_margin([(0.5, 0.6, 10)]) / 2)


@pytest.mark.parametrize("sites", [[(1.0, 3)], [(1.0, 3), (0.9, 4)], [(0.0, 3), (0.1, 4)], [(0.0, 3)]])
def test_an_interval_of_means_ends_at_nothing_and_at_all(sites: list[tuple[float, int]]) -> None:
    low, high = mean_interval(sites)
    assert 0 <= low < high <= 1
    assert (low, high)[sites[0][0] == 1.0] == pytest.approx(sites[0][0], abs=1e-12)
    for ends in (mean_interval([(share, count)]) for share in (0.0, 1.0) for count in range(1, 99)):
        assert 0 <= ends[0] < ends[1] <= 1, "however it is rounded"
