"""Client level: the design's table of hopeless and useful settings, budgets in rounds."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from promptfed.shared.privacy import accounting

NUMBERS = 8192


# K̄, q, R, δ; ε; z, r, ρ as printed in the design (two figures)
TABLE = [
    (10, 1.0, 25, 1e-2, 8.0, 2.04, 18, 3.7), (10, 1.0, 25, 1e-2, 3.0, 4.13, 37, 7.5),
    (100, 1.0, 50, 1e-3, 8.0, 3.39, 3.1, 0.43), (100, 1.0, 50, 1e-3, 3.0, 7.33, 6.6, 0.94),
    (100, 0.1, 100, 1e-4, 8.0, 0.86, 0.78, 0.08), (100, 0.1, 100, 1e-4, 3.0, 1.49, 1.4, 0.14),
    (1000, 1.0, 50, 1e-4, 8.0, 3.84, 0.35, 0.05), (1000, 1.0, 50, 1e-4, 3.0, 8.65, 0.78, 0.11),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"K{row[0]}-q{row[1]}-eps{row[4]}")
def test_the_table_of_what_is_refused_warned_and_works(row: tuple[float, ...]) -> None:
    expected, q, rounds, delta, epsilon, z, ratio, after = row
    found = accounting.calibrate(epsilon, delta, q, int(rounds))
    assert found == pytest.approx(z, abs=0.006)
    assert accounting.epsilon_of([accounting.client_event(found, q, int(rounds))], delta) <= epsilon
    drowned = accounting.Drowned(found, NUMBERS, expected, int(rounds))
    assert drowned.ratio == pytest.approx(ratio, rel=0.04)
    assert drowned.after_rounds == pytest.approx(after, rel=0.08)


@pytest.mark.door
def test_one_row_of_it_and_its_words() -> None:
    drowned = accounting.Drowned(2.04, NUMBERS, 10, 25)
    assert (round(drowned.ratio), round(drowned.after_rounds, 1)) == (18, 3.7)
    assert drowned.told().startswith(
        "noise z = 2.04 on 8,192 numbers over 10 expected clients is r = 18 times as long as the longest mean change, "
        "and ρ = 3.7 times as long as 25 of them"
    )
    assert accounting.Drowned(1.0, NUMBERS, 0.0, 5).ratio == math.inf


def test_as_many_rounds_as_the_budget_allows() -> None:
    allowed = accounting.budget_rounds(4.0, 1.0, 1, 100, 4.0, 1e-3)
    assert 1 < allowed < 100
    assert accounting.epsilon_of([accounting.client_event(4.0, 1.0, allowed)], 1e-3) <= 4.0
    assert accounting.epsilon_of([accounting.client_event(4.0, 1.0, allowed + 1)], 1e-3) > 4.0
    assert accounting.budget_rounds(4.0, 1.0, 1, allowed, 4.0, 1e-3) == allowed
    assert accounting.budget_rounds(4.0, 1.0, 2, 100, 4.0, 1e-3) == allowed // 2
    with pytest.raises(accounting.PrivacyError, match=r"one round with noise_multiplier 0\.5 costs ε = "):
        accounting.budget_rounds(0.5, 1.0, 1, 10, 1.0, 1e-3)


# ε of replace-one neighbours against a numerical integration that uses no library, and against closed forms.


STEP = 5e-4


def integrated(q: float, z: float, uses: int, epsilon: float) -> float:
    """δ of ``uses`` sums with mass (1-q)·N(0, z²) + q·N(±1, z²), by the definition: ∫ max(0, p - e^ε·p'), literally.

    The privacy loss ln(p/p') of each value x of one sum is put on a grid of 5e-4, and the distribution of the sum of
    ``uses`` losses is a plain convolution. δ(ε) = Σ over losses l > ε of P(l)·(1 - e^(ε-l)).
    """
    x = np.linspace(-1 - 9 * z, 1 + 9 * z, 2_000_001)
    width = x[1] - x[0]

    def density(mean: float) -> NDArray[np.float64]:
        bell = np.exp(-((x - mean) ** 2) / (2 * z * z)) / (z * math.sqrt(2 * math.pi))
        return np.asarray((1 - q) * np.exp(-(x**2) / (2 * z * z)) / (z * math.sqrt(2 * math.pi)) + q * bell)

    p, other = density(1.0), density(-1.0)
    loss = np.log(p / other)
    lowest = math.floor(float(loss.min()) / STEP)
    cells = np.rint(loss / STEP).astype(np.int64) - lowest
    one = np.bincount(cells, weights=p * width)
    mass, start = one, lowest
    for _ in range(uses - 1):
        size = 1 << math.ceil(math.log2(len(mass) + len(one)))
        mass = np.fft.irfft(np.fft.rfft(mass, size) * np.fft.rfft(one, size), size)[: len(mass) + len(one) - 1]
        start += lowest
    losses = (start + np.arange(len(mass))) * STEP
    beyond = losses > epsilon
    return float(np.sum(mass[beyond] * -np.expm1(epsilon - losses[beyond])))


@pytest.mark.parametrize(("q", "z", "uses", "delta"), [(0.2, 1.0, 1, 1e-4), (0.1, 1.0, 20, 1e-4), (0.3, 2.0, 8, 1e-5)])
def test_sampled_sums_cost_what_integrating_the_definition_gives(q: float, z: float, uses: int, delta: float) -> None:
    epsilon = accounting.replace_one_epsilon([accounting.Event("gaussian", q, z, uses)], delta)
    assert integrated(q, z, uses, epsilon) == pytest.approx(delta, rel=0.02)
    assert integrated(q, z, uses, epsilon + 0.01) < delta, "an upper bound"
    zero_out = accounting.epsilon_of([accounting.Event("gaussian", q, z, uses)], delta)
    assert zero_out < epsilon
    assert integrated(q, z, uses, zero_out) > 2 * delta, "the ε of zero-out neighbours does not hold for them"


@pytest.mark.door
@pytest.mark.parametrize(("z", "uses", "delta"), [(1.0, 1, 1e-5), (8.0, 25, 1e-4)])
def test_without_sampling_it_is_the_gaussian_mechanism_with_half_the_noise(z: float, uses: int, delta: float) -> None:
    epsilon, normal = accounting.replace_one_epsilon([accounting.Event("gaussian", 1, z, uses)], delta), NormalDist()
    assert epsilon == pytest.approx(
        accounting.epsilon_of([accounting.Event("gaussian", 1, z / 2, uses)], delta), abs=2e-4
    )
    a, b = math.sqrt(uses) / z, epsilon * z / (2 * math.sqrt(uses))
    assert normal.cdf(a - b) - math.exp(epsilon) * normal.cdf(-a - b) == pytest.approx(delta, rel=2e-3)


@pytest.mark.door
def test_a_count_costs_the_same_and_adds_to_sums() -> None:
    counts = [accounting.Event("laplace", 1, 0.1, 25)]
    assert accounting.replace_one_epsilon(counts, 1e-6) == accounting.epsilon_of(counts, 1e-6)
    sums = [accounting.Event("gaussian", 1, 8.0, 1)]
    assert accounting.replace_one_epsilon([*sums, *counts], 1e-6) == pytest.approx(
        accounting.replace_one_epsilon(sums, 1e-6) + 2.5
    )
    assert accounting.replace_one_epsilon([], 1e-6) == 0


def test_what_protects_nothing_is_bounded_without_filling_the_memory() -> None:
    assert accounting.replace_one_epsilon([accounting.Event("gaussian", 1.0, 0.3, 10_000)], 1e-5) > 2 * 50_000
    assert accounting.replace_one_epsilon([accounting.Event("gaussian", 0.1, 0.3, 250)], 1e-5) > 187
