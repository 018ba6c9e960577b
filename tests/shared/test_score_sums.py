"""Thresholds by sums of sites' histograms: exact, rounded at the sites, and under noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from promptfed.shared.metrics.conformal import score_bins
from promptfed.shared.metrics.score_sums import ScoreSums
from promptfed.shared.privacy.noise import SeededNoise

BINS = 20


def histogram(scores: NDArray[Any], bins: int = BINS) -> NDArray[np.int64]:
    return np.bincount(score_bins(scores, bins), minlength=bins)


def drawn(count: int, seed: int) -> NDArray[Any]:
    return np.random.default_rng(seed).beta(1.2, 3, count)


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.99])
def test_exact_sums_give_the_quantile_of_all_scores(coverage: float) -> None:
    for seed in range(30):
        sites = [drawn(int(count), seed) for count in np.random.default_rng(seed).integers(0, 200, 5)]
        sums = ScoreSums(sum(map(histogram, sites))[None], len(sites))
        found, scores = sums.threshold(coverage), np.sort(np.concatenate(sites))
        rank = int(np.ceil((len(scores) + 1) * coverage))
        exact = scores[rank - 1] if rank <= len(scores) else 1.0
        assert exact <= found < exact + 1 / BINS + 1e-12 or found == 1.0
        finer = ScoreSums(histogram(scores, 1000)[None], 1)
        assert found >= finer.threshold(coverage) - 1e-12


@pytest.mark.parametrize("floor", [2, 10, 25])
def test_what_a_floor_hides_only_raises_the_threshold(floor: int) -> None:
    raised = 0
    for seed in range(40):
        sites = [histogram(drawn(600, 100 * seed + site)) for site in range(4)]
        told = sum(counts - counts % floor for counts in sites)
        for coverage in (0.6, 0.9):
            exact = ScoreSums(sum(sites)[None], 4).threshold(coverage)
            found = ScoreSums(told[None], 4, slack=4 * (floor - 1)).threshold(coverage)
            assert found >= exact
            raised += found > exact
    assert raised


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
def test_noise_only_ever_raises_the_threshold(epsilon: float) -> None:
    below_one = 0
    for seed in range(120):
        sites = [histogram(drawn(1500, 10 * seed + site)) for site in range(3)]
        stream = SeededNoise(seed).stream("scores", seed)
        told = sum(sites) + np.array([sum(stream.discrete_laplace(epsilon) for _ in sites) for _ in range(BINS)])
        for coverage in (0.6, 0.9):
            exact = ScoreSums(sum(sites)[None], 3).threshold(coverage)
            found = ScoreSums(told[None], 3, epsilon=epsilon).threshold(coverage)
            assert found >= exact
            below_one += found < 1
    assert below_one  # it stays of use


def test_without_a_margin_noise_would_lower_thresholds() -> None:
    """The margin is needed: the noisy counts taken as they are give a lower threshold in some draws."""
    lower = 0
    for seed in range(120):
        counts = histogram(drawn(1500, seed))
        stream = SeededNoise(seed).stream("scores", seed)
        told = counts + np.array([stream.discrete_laplace(0.1) for _ in range(BINS)])
        lower += ScoreSums(told[None], 1).threshold(0.9) < ScoreSums(counts[None], 1).threshold(0.9)
    assert lower > 5


def test_the_margin_is_exceeded_as_seldom_as_it_says() -> None:
    """At a failure rate of 1 in 20 the bound holds, and is not a hundred times too wide."""
    epsilon, coverage, k, sites = 0.5, 0.9, 12, 5
    sums, rng = ScoreSums(np.zeros((1, BINS), dtype=np.int64), sites, epsilon=epsilon), np.random.default_rng(1)
    p = np.exp(-epsilon)
    noise = rng.geometric(1 - p, (20_000, sites, BINS)) - rng.geometric(1 - p, (20_000, sites, BINS))
    noise = noise.sum(axis=1)
    total = (1 - coverage) * noise[:, : k + 1].sum(axis=1) - coverage * noise[:, k + 1 :].sum(axis=1)
    margin = sums._margin(coverage, k, BINS, 1)
    assert (total > margin).mean() == 0
    assert margin < 7 * total.std() + 20 / epsilon


@pytest.mark.parametrize("by_class", [False, True])
def test_sets_cover_89_to_91_percent_over_200_splits(by_class: bool) -> None:
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 3, 9000)
    scores = rng.beta(1 + labels, 4, 9000)
    names, covered = ["a", "b", "c"], []
    for seed in range(200):
        order = np.random.default_rng(seed).permutation(9000)
        held, new = order[:4500], order[4500:]
        sites = np.array_split(held, 7)
        rows = [np.stack([histogram(scores[site][labels[site] == k], 1000) for k in range(3)]) for site in sites]
        sums = ScoreSums(np.sum(rows, axis=0), 7, classes=tuple(names))
        limits = sums.thresholds(0.9) if by_class else dict.fromkeys(names, sums.threshold(0.9))
        assert limits is not None
        inside = scores[new] <= np.array(list(limits.values()))[labels[new]]
        groups = [labels[new] == k for k in range(3)] if by_class else [np.ones(4500, dtype=bool)]
        covered.append([float(inside[group].mean()) for group in groups])
    for mean in np.mean(covered, axis=0):
        assert 0.89 <= mean <= 0.91
