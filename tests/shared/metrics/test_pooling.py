"""The figure of several sites equals statsmodels', and keeps its promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from promptfed.shared.metrics import pooling
from promptfed.shared.metrics.estimates import Estimate, auroc_estimate, proportion
from promptfed.shared.metrics.pooling import pool, pool_estimates
from tests.shared.metrics.test_estimates import site

HOSTILE = [
    (5e-324, 0.2), (1 - 1e-16, 0.2), (0.5, 1e-200), (0.5, 5e-324), (0.5, 1e200), (0.5, 1e-6), (0, 2**0.5), (1, 1e6),
]  # fmt: skip


def of_statsmodels(values: Any, variances: Any) -> Any:
    from statsmodels.stats.meta_analysis import combine_effects  # takes half a second, also of workers without it

    return combine_effects(values, variances, method_re="dl", use_t=True)


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
    found, wanted = pool(values, variances), of_statsmodels(values, variances)
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


def test_sites_that_differ_by_more_than_their_variances_widen_the_interval() -> None:
    values, variances = np.array([5.0, 3.0, 3.0, 1.0]), np.array([1.0, 0.1, 0.1, 0.1])
    found, wanted = pool(values, variances), of_statsmodels(values, variances)
    assert wanted.sd_eff_w_re_hksj > 1.15 * wanted.sd_eff_w_re
    half = stats.t.ppf(0.975, 3) * wanted.sd_eff_w_re_hksj
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), abs=1e-9)


@pytest.mark.parametrize("sites", [2, 3, 12])
def test_sites_that_agree_are_no_more_certain_than_their_images(sites: int) -> None:
    """2 × 30 images with one error each were 96.7 [96.7, 96.7]."""
    one = proportion(29, 30)
    assert one is not None
    pooled = pool_estimates([one] * sites)
    assert pooled is not None
    width = math.log(pooled.high / (1 - pooled.high)) - math.log(pooled.low / (1 - pooled.low))
    assert width >= 2 * 1.96 * (one.se or 0) / math.sqrt(sites) - 1e-9
    assert pooled.prediction is None or (pooled.prediction[0] <= pooled.low <= pooled.high <= pooled.prediction[1])


def test_shares_are_pooled_as_logits() -> None:
    of_sites = [proportion(hits, 50) for hits in (50, 41, 35, 0)]
    found = pool_estimates([estimate for estimate in of_sites if estimate is not None])
    assert found is not None
    logits = [math.log((hits + 0.5) / (50.5 - hits)) if hits in (0, 50) else math.log(hits / (50 - hits))
              for hits in (50, 41, 35, 0)]  # fmt: skip
    direct = pool(logits, [1 / (hits + 0.5) + 1 / (50.5 - hits) for hits in (50, 41, 35, 0)])
    assert found.mean == pytest.approx(1 / (1 + math.exp(-direct.mean)), abs=1e-9)
    assert 0 < found.low < found.mean < found.high < 1
    assert pool_estimates([Estimate(value=1.0, low=0.9, high=1.0)]) is None
    with pytest.raises(ValueError, match="two sites or more"):
        pool([0.3], [0.1])


@pytest.mark.parametrize(("value", "se"), HOSTILE)
def test_no_site_can_make_pooling_fail(value: float, se: float) -> None:
    others = [Estimate(value=share, low=0.7, high=0.9, se=0.2) for share in (0.8, 0.85)]
    for estimates in ([*others, Estimate(value=value, low=0, high=1, se=se)], [others[0], others[1]]):
        pooled = pool_estimates(estimates)
        assert pooled is not None
        assert 0 <= pooled.low <= pooled.mean <= pooled.high <= 1


@pytest.mark.extended
def test_pooled_intervals_cover_the_mean_and_the_next_site() -> None:
    """1,000 groups of twelve sites whose AUROCs vary as logits by 0.3."""
    draws, middle = np.random.default_rng(8), math.log(0.8 / 0.2)
    held = ahead = 0
    for _ in range(1000):
        areas = 1 / (1 + np.exp(-draws.normal(middle, 0.3, 13)))
        found = pool_estimates([auroc_estimate(*site(draws, area, 0.3, 300)) for area in areas[:12]])
        assert found is not None
        assert found.prediction is not None
        held += found.low <= 0.8 <= found.high
        ahead += found.prediction[0] <= areas[12] <= found.prediction[1]
    assert 930 - 14 <= held <= 970 + 14
    assert ahead >= 930 - 14


@pytest.mark.parametrize("se", [0.01, 1.0, 1.41, 1.4142135623730951, 1.5, 2.0, 50.0])
def test_figures_rounded_to_an_end_are_pooled(se: float) -> None:
    ends = [Estimate(value=value, low=0.0, high=1.0, se=se) for value in (1.0, 0.0, 1.0)]
    pooled = pool_estimates(ends)
    assert pooled is not None
    assert 0 <= pooled.low <= pooled.mean <= pooled.high <= 1


@pytest.mark.parametrize("variances", [[0.0, 1.0], [-1.0, 1.0], [1.0], [1.0, 1.0, 1.0]])
def test_pooling_takes_a_variance_above_0_of_each_site(variances: list[float]) -> None:
    with pytest.raises(ValueError, match="two sites or more, each with a standard error above 0"):
        pool([1.0, 2.0], variances)


def test_three_sites_say_where_a_fourth_may_lie() -> None:
    """By hand: q is 18, τ² (18 − 2)/2, each weight 1/9, and Hartung and Knapp's factor just 1."""
    found = pool([0.0, 3.0, 6.0], [1.0, 1.0, 1.0])
    assert (found.mean, found.tau2, found.i2) == pytest.approx((3, 8, 8 / 9))
    assert found.prediction is not None
    assert (found.high - 3, found.prediction[1] - 3) == pytest.approx((4.302653 * 3**0.5, 12.706205 * 11**0.5))
    assert pool([0.0, 3.0], [1.0, 1.0]).prediction is None


@pytest.mark.parametrize(("se", "odds"), [(2.0, 20_001), (2.2, 20_001), (1.41, 20_001), ((2 + 1 / 30.5) ** 0.5, 61)])
def test_an_end_is_half_a_case_away(se: float, odds: float) -> None:
    assert [pooling._edge(value, se) for value in (0.0, 1.0)] == pytest.approx([-math.log(odds), math.log(odds)])


def test_no_figure_is_nearer_to_an_end_than_one_of_two_to_the_fortieth_cases() -> None:
    def pooled(far: float) -> Any:
        return pool_estimates([Estimate(value=value, low=0.0, high=1.0, se=1.0) for value in (far, 0.5, 0.5)])

    assert pooled(1e-14) == pooled(1e-200) != pooled(1e-11)
    assert pooled(1e-14).mean == pytest.approx(1 / (1 + math.exp(28 / 3)))
