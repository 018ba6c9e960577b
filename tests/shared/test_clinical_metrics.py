"""Clinical figures against scikit-learn and statsmodels, their intervals against simulated sites."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import integrate, stats
from sklearn import metrics as reference
from statsmodels.stats.meta_analysis import combine_effects
from statsmodels.stats.proportion import proportion_confint

from promptfed.shared import metrics

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
    found = metrics.class_figures("cat", truth, scores, said)
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
    assert metrics.average_precision(truth, scores, weights[None])[0] == pytest.approx(
        reference.average_precision_score(truth, scores, sample_weight=weights), abs=1e-9
    )


def test_delong_equals_the_definition() -> None:
    """The variance of its structural components, pair by pair."""
    truth, scores = site(np.random.default_rng(3), 0.75, 0.4, 60)
    scores = np.round(scores, 1)
    wins = np.array([[float(p > n) + float(p == n) / 2 for n in scores[~truth]] for p in scores[truth]])
    rows, columns = wins.mean(axis=1), wins.mean(axis=0)
    se = math.sqrt(rows.var(ddof=1) / len(rows) + columns.var(ddof=1) / len(columns))
    found, area = metrics.auroc_estimate(truth, scores), wins.mean()
    assert found.value == pytest.approx(area, abs=1e-12)
    logit = math.log(area / (1 - area))
    half = stats.norm.ppf(0.975) * se / (area * (1 - area))
    assert found.low == pytest.approx(1 / (1 + math.exp(-(logit - half))), abs=1e-9)
    assert found.high == pytest.approx(1 / (1 + math.exp(-(logit + half))), abs=1e-9)


@pytest.mark.parametrize(("hits", "count"), [(0, 5), (5, 5), (3, 10), (299, 300)])
def test_proportions_have_wilsons_interval(hits: int, count: int) -> None:
    found = metrics.proportion(hits, count)
    assert found is not None
    low, high = proportion_confint(hits, count, method="wilson")
    assert (found.low, found.high) == pytest.approx((max(low, 0), min(high, 1)), abs=1e-9)


def test_what_cannot_be_measured_is_left_out() -> None:
    alone = metrics.class_figures("cat", [True, True], [0.9, 0.2], [True, False])
    assert alone.auroc is None
    assert alone.average_precision is None
    assert alone.specificity is None
    assert alone.sensitivity is not None
    assert metrics.proportion(0, 0) is None
    perfect = metrics.class_figures("cat", [True, False], [0.9, 0.2], [True, False])
    assert perfect.auroc is not None
    assert (perfect.auroc.value, perfect.auroc.high) == (1.0, 1.0)
    assert perfect.auroc.low < 1
    with pytest.raises(ValueError, match="0 labels"):
        metrics.class_figures("cat", [], [], [])


def test_images_of_one_patient_are_drawn_together() -> None:
    """Each image twice tells no more: grouped by image, the interval is that of the images once."""
    truth, scores = site(np.random.default_rng(5), 0.8, 0.3, 150)
    twice, patients = np.tile(truth, 2), [str(k % 150) for k in range(300)]
    once, grouped = (
        metrics.precision_estimate(truth, scores),
        metrics.precision_estimate(twice, np.tile(scores, 2), patients),
    )
    alone = metrics.precision_estimate(twice, np.tile(scores, 2))
    assert once.se is not None
    assert grouped.se == pytest.approx(once.se, rel=0.15)
    assert alone.se is not None
    assert alone.se < 0.85 * once.se


@pytest.mark.parametrize("spread", [0.05, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_pooled_means_equal_statsmodels(seed: int, spread: float) -> None:
    """Where τ² would be negative it is 0, and the mean is that of fixed effects; statsmodels goes on with it.

    Our interval is at least as wide as that of fixed effects, and statsmodels' may vanish.
    """
    draws = np.random.default_rng(seed)
    k = int(draws.integers(3, 12))
    variances = draws.uniform(0.01, 0.2, k)
    values = draws.normal(1.0, spread, k)
    found, wanted = metrics.pool(values, variances), combine_effects(values, variances, method_re="dl", use_t=True)
    varies = wanted.tau2 > 0
    assert found.mean == pytest.approx(wanted.mean_effect_re if varies else wanted.mean_effect_fe, abs=1e-6)
    assert found.tau2 == pytest.approx(wanted.tau2 if varies else 0.0, abs=1e-6)
    weights = [1 / (variance + found.tau2) for variance in variances]
    se = max(wanted.sd_eff_w_re_hksj if varies else wanted.sd_eff_w_fe_hksj, sum(weights) ** -0.5)
    half = stats.t.ppf(0.975, k - 1) * se
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), abs=1e-6)
    assert found.high - found.low >= 2 * 1.96 * wanted.sd_eff_w_fe
    assert found.i2 == pytest.approx(wanted.i2 if varies else 0.0, abs=1e-6)
    reach = stats.t.ppf(0.975, k - 2) * math.sqrt(found.tau2 + se**2)
    assert found.prediction == pytest.approx((found.mean - reach, found.mean + reach), abs=1e-9)


@pytest.mark.parametrize("sites", [2, 3, 12])
def test_sites_that_agree_are_no_more_certain_than_their_images(sites: int) -> None:
    """2 × 30 images with one error each were 96.7 [96.7, 96.7]."""
    one = metrics.proportion(29, 30)
    assert one is not None
    pooled = metrics.pool_estimates([one] * sites)
    assert pooled is not None
    width = math.log(pooled.high / (1 - pooled.high)) - math.log(pooled.low / (1 - pooled.low))
    assert width >= 2 * 1.96 * (one.se or 0) / math.sqrt(sites) - 1e-9
    assert pooled.prediction is None or (pooled.prediction[0] <= pooled.low <= pooled.high <= pooled.prediction[1])


def test_shares_are_pooled_as_logits() -> None:
    of_sites = [metrics.proportion(hits, 50) for hits in (50, 41, 35, 0)]
    found = metrics.pool_estimates([estimate for estimate in of_sites if estimate is not None])
    assert found is not None
    logits = [math.log((hits + 0.5) / (50.5 - hits)) if hits in (0, 50) else math.log(hits / (50 - hits))
              for hits in (50, 41, 35, 0)]  # fmt: skip
    direct = metrics.pool(logits, [1 / (hits + 0.5) + 1 / (50.5 - hits) for hits in (50, 41, 35, 0)])
    assert found.mean == pytest.approx(1 / (1 + math.exp(-direct.mean)), abs=1e-9)
    assert 0 < found.low < found.mean < found.high < 1
    assert metrics.pool_estimates([metrics.Estimate(value=1.0, low=0.9, high=1.0)]) is None
    with pytest.raises(ValueError, match="two sites or more"):
        metrics.pool([0.3], [0.1])


HOSTILE = [
    (5e-324, 0.2), (1 - 1e-16, 0.2), (0.5, 1e-200), (0.5, 5e-324), (0.5, 1e200), (0.5, 1e-6), (0, 2**0.5), (1, 1e6),
]  # fmt: skip


@pytest.mark.parametrize(("value", "se"), HOSTILE)
def test_no_site_can_make_pooling_fail(value: float, se: float) -> None:
    others = [metrics.Estimate(value=share, low=0.7, high=0.9, se=0.2) for share in (0.8, 0.85)]
    for estimates in ([*others, metrics.Estimate(value=value, low=0, high=1, se=se)], [others[0], others[1]]):
        pooled = metrics.pool_estimates(estimates)
        assert pooled is not None
        assert 0 <= pooled.low <= pooled.mean <= pooled.high <= 1


def test_an_interval_on_the_logit_scale_ends_between_0_and_1() -> None:
    told = metrics.on_logit_scale(1 - 1e-9, 0.5, 10)
    assert 0 <= told.low < told.value <= told.high <= 1


def true_precision(area: float, share: float) -> float:
    """The average precision of a site without end."""
    distance = math.sqrt(2) * stats.norm.ppf(area)
    cuts = np.linspace(-9, 9 + distance, 20_001)[::-1]
    recall, false = stats.norm.sf(cuts - distance), stats.norm.sf(cuts)
    return float(integrate.trapezoid(share * recall / (share * recall + (1 - share) * false), recall))


@pytest.mark.extended
@pytest.mark.parametrize(("area", "share", "count"), [(0.7, 0.5, 300), (0.9, 0.2, 400)])
def test_intervals_cover_what_they_promise(area: float, share: float, count: int) -> None:
    """1,000 sites: 95 % intervals of the AUROC, the average precision and the sensitivity hold the truth in 93 to 97 %.

    The bound is wider by two standard errors of 1,000 draws (1.4 points).
    """
    draws, precision = np.random.default_rng(7), true_precision(area, share)
    held = {"auroc": 0, "average precision": 0, "sensitivity": 0}
    cut = stats.norm.ppf(0.6)
    sensitive = float(stats.norm.sf(cut - math.sqrt(2) * stats.norm.ppf(area)))
    for _ in range(1000):
        truth, scores = site(draws, area, share, count)
        said = scores > 0.6
        found = metrics.proportion(int((said & truth).sum()), int(truth.sum()))
        assert found is not None
        held["sensitivity"] += found.low <= sensitive <= found.high
        held["auroc"] += (e := metrics.auroc_estimate(truth, scores)).low <= area <= e.high
        held["average precision"] += (e := metrics.precision_estimate(truth, scores)).low <= precision <= e.high
    print(area, share, count, held)
    assert all(930 - 14 <= times <= 970 + 14 for times in held.values()), held


@pytest.mark.extended
@pytest.mark.parametrize("between", [0.0, 0.3])
def test_pooled_intervals_cover_the_mean_and_the_next_site(between: float) -> None:
    """1,000 groups of twelve sites whose AUROCs vary as logits by ``between``."""
    draws, middle = np.random.default_rng(8), math.log(0.8 / 0.2)
    held = ahead = 0
    for _ in range(1000):
        areas = 1 / (1 + np.exp(-draws.normal(middle, between, 13)))
        found = metrics.pool_estimates([metrics.auroc_estimate(*site(draws, area, 0.3, 300)) for area in areas[:12]])
        assert found is not None
        assert found.prediction is not None
        held += found.low <= 0.8 <= found.high
        ahead += found.prediction[0] <= areas[12] <= found.prediction[1]
    print(between, held, ahead)
    assert 930 - 14 <= held <= 970 + 14
    assert ahead >= 930 - 14


@pytest.mark.parametrize("se", [0.01, 1.0, 1.41, 1.4142135623730951, 1.5, 2.0, 50.0])
def test_figures_rounded_to_an_end_are_pooled(se: float) -> None:
    ends = [metrics.Estimate(value=value, low=0.0, high=1.0, se=se) for value in (1.0, 0.0, 1.0)]
    pooled = metrics.pool_estimates(ends)
    assert pooled is not None
    assert 0 <= pooled.low <= pooled.mean <= pooled.high <= 1


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_every_figure_refuses_scores_that_are_not_finite(wrong: float) -> None:
    """They were sorted somewhere: an AUROC of 0.5 and an average precision of 1.0 came out."""
    truth, scores = np.array([True, False, True, False]), np.array([0.9, 0.2, wrong, 0.4])
    figures = (
        lambda: metrics.auroc_estimate(truth, scores),
        lambda: metrics.average_precision(truth, scores, np.ones((1, 4))),
        lambda: metrics.precision_estimate(truth, scores),
        lambda: metrics.class_figures("a", truth, scores, truth),
        lambda: metrics.mean_average_precision(truth[:, None].astype(int), scores[:, None]),
        lambda: metrics.calibration_error(scores, truth),
        lambda: metrics.pool(scores, np.ones(4)),
    )
    for figure in figures:
        with pytest.raises(ValueError, match="1 of 4 scores are not finite"):
            figure()
    with pytest.raises(ValueError, match="finite"):
        metrics.Estimate(value=wrong, low=0, high=1)


def test_a_class_without_images_and_answers_has_no_f1() -> None:
    assert metrics.macro_f1([0, 0, 2], [0, 2, 2]) == pytest.approx(2 / 3)  # class 1 does not count
    assert metrics.macro_f1([-1, -1], [0, 0]) == 0


# The metrics against literal versions, image by image, and against figures worked out by hand.


SIZES = [1, 2, 17, 400]


def drawn(count: int) -> tuple[list[int], list[int], list[float]]:
    """Labels, answers and confidences, some of them on the edges of bins."""
    rng = random.Random(count)
    labels = [rng.randrange(6) for _ in range(count)]
    predicted = [label if rng.random() < 0.6 else rng.randrange(7) for label in labels]
    sure = [rng.choice([rng.random(), rng.randrange(16) / 15, 1.0, 0.0]) for _ in range(count)]
    return labels, predicted, sure


def literal_bins(sure: list[float], right: list[bool], bins: int) -> list[list[int]]:
    """Which images lie in each bin: the first whose upper edge is not below the confidence."""
    found: list[list[int]] = [[] for _ in range(bins)]
    for index, value in enumerate(sure):
        found[next(k for k in range(bins) if value * bins <= k + 1)].append(index)
    return found


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_the_calibration_error_is_the_papers(count: int, bins: int) -> None:
    labels, predicted, sure = drawn(count)
    right = [a == b for a, b in zip(labels, predicted, strict=True)]
    wanted = 0.0
    for inside in filter(None, literal_bins(sure, right, bins)):
        accuracy = math.fsum(right[k] for k in inside) / len(inside)
        confidence = math.fsum(sure[k] for k in inside) / len(inside)
        wanted += len(inside) / count * abs(accuracy - confidence)
    assert abs(metrics.calibration_error(sure, right, bins) - wanted) < 1e-12


@pytest.mark.parametrize("count", SIZES)
def test_macro_f1_and_class_accuracies_count_one_class_after_the_other(count: int) -> None:
    labels, predicted, _ = drawn(count)
    scores, shares = [], {}
    for k in range(7):
        tp = sum(a == b == k for a, b in zip(labels, predicted, strict=True))
        fp = sum(b == k and a != k for a, b in zip(labels, predicted, strict=True))
        fn = sum(a == k and b != k for a, b in zip(labels, predicted, strict=True))
        if tp + fp + fn:
            scores.append(2 * tp / (2 * tp + fp + fn))
        if tp + fn:
            shares[k] = tp / (tp + fn)
    assert abs(metrics.macro_f1(labels, predicted) - sum(scores) / len(scores)) < 1e-12
    found = metrics.class_accuracies(labels, predicted)
    assert set(found) == set(shares)
    assert all(abs(found[k] - share) < 1e-12 for k, share in shares.items())


def test_lists_that_do_not_fit_are_refused() -> None:
    for sure, right in (([], []), ([0.5], [1, 0])):
        with pytest.raises(ValueError, match="confidences for"):
            metrics.calibration_error(sure, right)
    with pytest.raises(ValueError, match="2 labels for 1 answers"):
        metrics.macro_f1([0, 1], [0])


def test_the_mean_area_is_that_of_the_classes_that_have_both_kinds_of_images() -> None:
    told = np.array([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.3, 0.4, 0.3]])
    labels = [0, 1, 0, 0]
    each = [metrics.auroc_estimate(np.array(labels) == k, told[:, k]).value for k in (0, 1)]
    assert metrics.mean_auroc(labels, told) == pytest.approx(sum(each) / 2), "nobody has class 2"
    assert metrics.mean_auroc([1, 1, 1, 1], told) is None
    assert metrics.mean_auroc(labels, np.full((4, 3), 1 / 3)) == 0.5, "ties"


def test_a_temperature_undoes_a_scale_of_the_logits() -> None:
    draws = np.random.default_rng(4)
    logits = draws.normal(size=(4000, 3))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = [draws.choice(3, p=row) for row in shares]
    assert metrics.fitted_temperature(labels, 4 * logits) == pytest.approx(4, rel=0.1)
    assert metrics.fitted_temperature(labels, logits / 4) == pytest.approx(0.25, rel=0.1)
    assert metrics.fitted_temperature(logits.argmax(axis=1), logits) == pytest.approx(0.05, rel=0.01), "the least one"


def test_nearly_one_class_is_said_of_answers_that_no_label_explains() -> None:
    assert (metrics.largest_share([2, 0, 2, 2]), metrics.largest_share([0, -1, -1, -1])) == (0.75, 0.25)
    assert metrics.nearly_one_class(0.9)
    assert not metrics.nearly_one_class(0.89)
    assert not metrics.nearly_one_class(None)
    assert metrics.nearly_one_class(0.95, 0.85)
    assert not metrics.nearly_one_class(0.95, 0.86)
