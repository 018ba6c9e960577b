"""The accountant against published figures, closed forms and itself in another order."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import pytest

from promptfed.shared.privacy.accounting import (
    Accountant,
    Event,
    PrivacyError,
    calibrate,
    check_delta,
    default_delta,
    epsilon_of,
    merged,
    training_event,
)

NEAR = 2e-4


def classic_rdp(q: float, z: float, steps: int, delta: float) -> float:
    """min over α of RDP + ln(1/δ)/(α − 1), as the first papers converted."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    orders = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256]
    best = math.inf
    for order in orders:
        accountant = RdpAccountant([order], NeighboringRelation.ADD_OR_REMOVE_ONE)
        accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), steps)
        best = min(best, float(accountant._rdp[0]) + math.log(1 / delta) / (order - 1))
    return best


@pytest.mark.parametrize(
    ("q", "z", "steps", "published"),
    [
        (0.01, 4.0, 10_000, 1.259),  # Abadi et al., 2016: 1.26
        (256 / 60_000, 1.3, 3_515, 1.192),  # TensorFlow Privacy's tutorial: 1.19, 3.01, 7.10
        (256 / 60_000, 1.1, 14_062, 3.008),
        (256 / 60_000, 0.7, 10_546, 7.101),
    ],
)
def test_published_figures_and_that_privacy_loss_distributions_are_tighter(
    q: float, z: float, steps: int, published: float
) -> None:
    classic = classic_rdp(q, z, steps, 1e-5)
    assert classic == pytest.approx(published, abs=2e-3)
    assert epsilon_of([Event("gaussian", q, z, steps)], 1e-5) <= classic


@pytest.mark.parametrize(
    ("z", "steps", "delta", "expected"),
    [(1, 1, 1e-5, 4.37718), (4, 25, 1e-4, 4.96937), (8, 25, 1e-4, 2.19495)],
)
def test_without_sampling_the_closed_form(z: float, steps: int, delta: float, expected: float) -> None:
    epsilon, normal = epsilon_of([Event("gaussian", 1, z, steps)], delta), NormalDist()
    assert epsilon == pytest.approx(expected, abs=NEAR)
    a, b = math.sqrt(steps) / (2 * z), epsilon * z / math.sqrt(steps)
    assert normal.cdf(a - b) - math.exp(epsilon) * normal.cdf(-a - b) == pytest.approx(delta, rel=2e-3)


@pytest.mark.extended
def test_two_federations_on_one_ledger_cost_less_than_their_sum_and_the_same_in_any_order() -> None:
    first, second = Event("gaussian", 0.04, 1, 625), Event("gaussian", 0.2, 2, 125)
    alone = epsilon_of([first], 1e-4)
    assert alone == pytest.approx(5.667, abs=1e-3)
    assert epsilon_of([first, first], 1e-4) == pytest.approx(8.393, abs=1e-3)
    both = epsilon_of([first, second], 1e-4)
    assert both == pytest.approx(7.886, abs=1e-3)
    assert epsilon_of([second, first], 1e-4) == both
    steps = [Event("gaussian", 0.04, 1, 125)] * 5
    assert merged([*steps, second]) == merged([second, first])


def test_noisy_counts_cost_what_the_texts_say() -> None:
    assert epsilon_of([Event("laplace", 1, 0.1, 25)], 1e-6) == pytest.approx(2.08, abs=0.01)
    assert epsilon_of([Event("laplace", 1, 0.5, 26)], 1e-6) == pytest.approx(12.7, abs=0.05)
    assert epsilon_of([], 1e-6) == 0


@pytest.mark.slow
def test_calibration_finds_the_least_noise_within_the_target() -> None:
    q, steps = 1.0, 20
    z = calibrate(2.0, 1e-4, q, steps)
    assert z == round(z, 3)
    assert epsilon_of([Event("gaussian", q, z, steps)], 1e-4) <= 2.0
    assert epsilon_of([Event("gaussian", q, z - 0.005, steps)], 1e-4) > 2.0
    assert calibrate(100.0, 1e-4, 0.01, 1) == 0.3
    with pytest.raises(PrivacyError, match="1000 times the clip"):
        calibrate(1e-3, 1e-6, 1.0, 10_000)


def test_what_protects_nothing_is_bounded_without_filling_the_memory() -> None:
    hopeless = epsilon_of([Event("gaussian", 1.0, 0.3, 10_000), Event("laplace", 1, 0.1, 20)], 1e-5)
    assert 50_000 < hopeless < 150_000
    assert hopeless - epsilon_of([Event("gaussian", 1.0, 0.3, 10_000)], 1e-5) == pytest.approx(2.0)


@pytest.mark.parametrize("z", [0.0, 0.29, 1001.0, math.inf, math.nan])
def test_noise_out_of_bounds_is_refused(z: float) -> None:
    with pytest.raises(PrivacyError):
        Event("gaussian", 0.1, z, 1)


def test_delta_and_the_event_of_a_training_loop() -> None:
    assert [default_delta(n) for n in (1, 10, 11, 800, 1000, 5000)] == [0.1, 0.01, 1e-3, 1e-4, 1e-4, 1e-5]
    for delta, units in ((1 / 800, 800), (0.5, 2), (1e-11, 800)):
        with pytest.raises(PrivacyError, match="not between"):
            check_delta(delta, units)
    check_delta(1e-4, 800)
    assert training_event(400, 32, 2, 1.0) == Event("gaussian", 0.08, 1.0, 26)
    assert training_event(20, 32, 3, 1.0) == Event("gaussian", 1.0, 1.0, 3)


def test_what_was_computed_is_kept_beside_the_ledger_and_a_broken_file_costs_time_alone(tmp_path: Path) -> None:
    cache, events = tmp_path / "cache.json", [Event("gaussian", 1, 4, 25)]
    known = Accountant(1e-4, cache).epsilon(events)
    cache.write_text(cache.read_text().replace("4.9", "4.8"))
    assert Accountant(1e-4, cache).epsilon(events) == pytest.approx(known - 0.1)  # read, not computed
    cache.write_text("{")
    assert Accountant(1e-4, cache).epsilon(events) == known
    assert Accountant(1e-5, cache).epsilon(events) > known
