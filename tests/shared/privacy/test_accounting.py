"""The accountant against published figures, closed forms and itself in another order."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from scipy import stats

from promptfed.shared.privacy import accounting, noise
from promptfed.shared.privacy.noise import NoiseStream, SecretNoise, SeededNoise

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


PUBLISHED = [
    (0.01, 4.0, 10_000, 1.259),  # Abadi et al., 2016: 1.26
    (256 / 60_000, 1.3, 3_515, 1.192),  # TensorFlow Privacy's tutorial: 1.19, 3.01, 7.10
    (256 / 60_000, 1.1, 14_062, 3.008),
    pytest.param(256 / 60_000, 0.7, 10_546, 7.101, marks=pytest.mark.extended),
]


@pytest.mark.parametrize(("q", "z", "steps", "published"), PUBLISHED)
def test_published_figures_and_tighter_loss_distributions(q: float, z: float, steps: int, published: float) -> None:
    classic = classic_rdp(q, z, steps, 1e-5)
    assert classic == pytest.approx(published, abs=2e-3)
    assert accounting.epsilon_of([accounting.Event("gaussian", q, z, steps)], 1e-5) <= classic


@pytest.mark.parametrize(
    ("z", "steps", "delta", "expected"), [(1, 1, 1e-5, 4.37718), (4, 25, 1e-4, 4.96937), (8, 25, 1e-4, 2.19495)]
)
def test_without_sampling_the_closed_form(z: float, steps: int, delta: float, expected: float) -> None:
    epsilon, normal = accounting.epsilon_of([accounting.Event("gaussian", 1, z, steps)], delta), NormalDist()
    assert epsilon == pytest.approx(expected, abs=NEAR)
    a, b = math.sqrt(steps) / (2 * z), epsilon * z / math.sqrt(steps)
    assert normal.cdf(a - b) - math.exp(epsilon) * normal.cdf(-a - b) == pytest.approx(delta, rel=2e-3)


@pytest.mark.extended
def test_two_federations_on_one_ledger_cost_less_than_their_sum_and_the_same_in_any_order() -> None:
    first, second = accounting.Event("gaussian", 0.04, 1, 625), accounting.Event("gaussian", 0.2, 2, 125)
    alone = accounting.epsilon_of([first], 1e-4)
    assert alone == pytest.approx(5.667, abs=1e-3)
    assert accounting.epsilon_of([first, first], 1e-4) == pytest.approx(8.393, abs=1e-3)
    both = accounting.epsilon_of([first, second], 1e-4)
    assert both == pytest.approx(7.886, abs=1e-3)
    assert accounting.epsilon_of([second, first], 1e-4) == both
    steps = [accounting.Event("gaussian", 0.04, 1, 125)] * 5
    assert accounting.merged([*steps, second]) == accounting.merged([second, first])


def test_noisy_counts_cost_what_the_texts_say() -> None:
    assert accounting.epsilon_of([accounting.Event("laplace", 1, 0.1, 25)], 1e-6) == pytest.approx(2.08, abs=0.01)
    assert accounting.epsilon_of([accounting.Event("laplace", 1, 0.5, 26)], 1e-6) == pytest.approx(12.7, abs=0.05)
    assert accounting.epsilon_of([], 1e-6) == 0


@pytest.mark.slow
def test_calibration_finds_the_least_noise_within_the_target() -> None:
    q, steps = 1.0, 20
    z = accounting.calibrate(2.0, 1e-4, q, steps)
    assert z == round(z, 3)
    assert accounting.epsilon_of([accounting.Event("gaussian", q, z, steps)], 1e-4) <= 2.0
    assert accounting.epsilon_of([accounting.Event("gaussian", q, z - 0.005, steps)], 1e-4) > 2.0
    assert accounting.calibrate(100.0, 1e-4, 0.01, 1) == 0.3
    with pytest.raises(accounting.PrivacyError, match="1000 times the clip"):
        accounting.calibrate(1e-3, 1e-6, 1.0, 10_000)


def test_what_protects_nothing_is_bounded_without_filling_the_memory() -> None:
    hopeless = accounting.epsilon_of(
        [accounting.Event("gaussian", 1.0, 0.3, 10_000), accounting.Event("laplace", 1, 0.1, 20)], 1e-5
    )
    assert 50_000 < hopeless < 150_000
    assert hopeless - accounting.epsilon_of([accounting.Event("gaussian", 1.0, 0.3, 10_000)], 1e-5) == pytest.approx(
        2.0
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        *((("gaussian", 0.1, z, 1), "noise") for z in (0.0, 0.29, 1000.1, math.inf, math.nan)),
        *((("laplace", 1.0, a, 1), "noise") for a in (0.0, -1.0, math.inf, math.nan)),
        (("gaussian", 0.1, 1.0, 0), "0 times"),
        (("gaussian", 0.0, 1.0, 1), "sampling probability"),
        (("gaussian", 1.1, 1.0, 1), "sampling probability"),
        (("laplace", 0.5, 1.0, 1), "sampling probability"),
        (("cauchy", 1.0, 1.0, 1), "no mechanism"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(event: tuple[Any, ...], words: str) -> None:
    with pytest.raises(accounting.PrivacyError, match=words):
        accounting.Event(*event)


def test_what_is_just_within_the_bounds_is_taken() -> None:
    for z in (0.3, 1000.0):
        accounting.Event("gaussian", 1.0, z, 1)
    accounting.Event("laplace", 1.0, 0.01, 1)
    for delta, units in ((1e-10, 5), (0.99, 1)):
        accounting.check_delta(delta, units)
    for delta, units in ((0.99e-10, 5), (0.2, 5), (1e-3, 0)):
        with pytest.raises(accounting.PrivacyError):
            accounting.check_delta(delta, units)


# The searches, on an ε that is known in one's head: q·T/z, and a little more where it is computed finely.


@pytest.fixture
def plain_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(events: list[accounting.Event], delta: float, interval: float = accounting.RECORDED) -> float:
        return sum(event.q * event.count / event.z for event in events) + (0 if interval == accounting.COARSE else 1e-4)

    monkeypatch.setattr(accounting, "epsilon_of", cost)


@pytest.mark.parametrize(
    ("epsilon", "q", "steps", "z"),
    [
        (2.0, 1.0, 20, 10.001),  # 10 fits coarsely and not finely
        (100.0, 0.01, 1, 0.3),  # less than the least noise would do
        (2.0001, 0.5, 7, 1.75),
        (1.0001, 1.0, 1000, 1000.0),  # the most noise that there may be
    ],
)
def test_calibration_finds_the_least_noise(plain_cost: None, epsilon: float, q: float, steps: int, z: float) -> None:
    assert accounting.calibrate(epsilon, 1e-4, q, steps) == pytest.approx(z, abs=1e-9)
    with pytest.raises(accounting.PrivacyError, match="1000 times the clip"):
        accounting.calibrate(0.99, 1e-4, 1.0, 1000)


@pytest.mark.parametrize(
    ("per_round", "rounds", "epsilon", "allowed"),
    [(1, 9, 8.1, 8), (2, 9, 8.1, 4), (1, 8, 8.1, 8), (1, 9, 1.1, 1), (3, 9, 3.1, 1)],
)
def test_as_many_rounds_as_fit(plain_cost: None, per_round: int, rounds: int, epsilon: float, allowed: int) -> None:
    assert accounting.budget_rounds(1.0, 1.0, per_round, rounds, epsilon, 1e-4) == allowed
    with pytest.raises(accounting.PrivacyError, match=r"one round .* costs ε = 6 "):
        accounting.budget_rounds(0.5, 1.0, 3, rounds, 5.9, 1e-4)


@pytest.mark.parametrize("delta", [0.1, 1e-5])
def test_the_simple_bound_is_the_best_of_some_orders_and_adds_counts(delta: float) -> None:
    orders, best = [*range(2, 33), 64, 128, 256, 512], set[int]()
    for z in (0.3 * 1.2**step for step in range(45)):
        costs = {a: a / (2 * z * z) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders}
        sums, counts = accounting.Event("gaussian", 1.0, z, 1), accounting.Event("laplace", 1.0, 0.5, 3)
        assert accounting._simple_bound((sums,), delta) == pytest.approx(max(0.0, min(costs.values())), rel=1e-12)
        assert accounting._simple_bound((sums, counts), delta) == accounting._simple_bound((sums,), delta) + 1.5
        best.add(min(costs, key=costs.__getitem__))
    assert delta == 0.1 or {2, 3, 32, 64, 128, 256, 512} <= best
    assert accounting._simple_bound((counts,), delta) == 1.5


@pytest.mark.parametrize(
    ("simple", "steps", "exact"), [(1.0, 5, True), (400.0, 10**6, True), (400.1, 5, False), (1.0, 10**6 + 1, False)]
)
def test_a_loss_that_would_need_too_much_is_bounded_simply(
    simple: float, steps: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "_simple_bound", lambda events, delta: simple)
    monkeypatch.setattr(accounting, "_by_pld", lambda *_: -1.0)
    events = (accounting.Event("gaussian", 1.0, 2.0, steps),)
    assert accounting._composed.__wrapped__(events, 1e-5, 1e-3) == (-1.0 if exact else simple)
    # For replace-one neighbours from a quarter of it on: ρ-zCDP with ρ = T·(2/z)²/2.
    monkeypatch.setattr(accounting, "epsilon_of", lambda *_: simple / 4)
    rho = steps * (2 / 2.0) ** 2 / 2
    bound = rho + 2 * math.sqrt(rho * math.log(1e5))
    assert accounting._of_sums(events, 1e-5, 1e-3) == (-1.0 if exact else pytest.approx(bound))


def test_delta_and_the_event_of_a_training_loop() -> None:
    assert [accounting.default_delta(n) for n in (1, 10, 11, 800, 1000, 5000)] == [0.1, 0.01, 1e-3, 1e-4, 1e-4, 1e-5]
    for delta, units in ((1 / 800, 800), (0.5, 2), (1e-11, 800)):
        with pytest.raises(accounting.PrivacyError, match="not between"):
            accounting.check_delta(delta, units)
    accounting.check_delta(1e-4, 800)
    assert accounting.training_event(400, 32, 2, 1.0) == accounting.Event("gaussian", 0.08, 1.0, 26)
    assert accounting.training_event(20, 32, 3, 1.0) == accounting.Event("gaussian", 1.0, 1.0, 3)


def test_what_was_computed_is_kept_beside_the_ledger_and_a_broken_file_costs_time_alone(tmp_path: Path) -> None:
    cache, events = tmp_path / "cache.json", [accounting.Event("gaussian", 1, 4, 25)]
    known = accounting.Accountant(1e-4, cache).epsilon(events)
    cache.write_text(cache.read_text().replace("4.9", "4.8"))
    assert accounting.Accountant(1e-4, cache).epsilon(events) == pytest.approx(known - 0.1)  # read, not computed
    cache.write_text("{")
    assert accounting.Accountant(1e-4, cache).epsilon(events) == known
    assert accounting.Accountant(1e-5, cache).epsilon(events) > known


# The noise's distributions, and that no two attempts share a key.


N = 250_000


def test_normals_are_normal_and_independent_of_what_came_before() -> None:
    drawn = SeededNoise(1).stream("normals").normals(N)
    assert abs(drawn.mean()) < 4 / math.sqrt(N)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / N)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    for lag in (1, 2, 3, 7, 16, 64):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 5 / math.sqrt(N)


def test_streams_of_different_attempts_clients_and_rounds_are_uncorrelated() -> None:
    source = SeededNoise(1)
    streams = [source.stream(*purpose).normals(100_000) for purpose in (("a", 1), ("a", 2), ("b", 1), ("a", 1, "x"))]
    correlations = np.corrcoef(streams)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(100_000)
    again = SeededNoise(1).stream("a", 1).normals(100_000)
    assert (again == streams[0]).all()


def test_a_poisson_sample_takes_each_unit_by_itself() -> None:
    stream = SeededNoise(2).stream()
    counts, sizes = np.zeros(50), []
    for _ in range(20_000):
        chosen = stream.poisson_sample(50, 0.1)
        counts[chosen] += 1
        sizes.append(len(chosen))
    assert np.abs(counts / 20_000 - 0.1).max() < 5 * math.sqrt(0.09 / 20_000)
    assert np.var(sizes) == pytest.approx(50 * 0.09, rel=0.06)
    assert 0 in sizes
    assert (stream.poisson_sample(7, 1.0) == np.arange(7)).all()


def test_secret_streams_never_share_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []

    class Told(NoiseStream):
        def __init__(self, key: bytes):
            keys.append(key)
            super().__init__(key)

    monkeypatch.setattr(noise, "NoiseStream", Told)
    source = SecretNoise()
    first = [source.stream("the same", 1).normals(4) for _ in range(100)]
    assert len(set(keys)) == 100
    assert {len(key) for key in keys} == {32}
    assert len({row.tobytes() for row in first}) == 100


def fits(drawn: list[int], weight: object, reach: int) -> float:
    """p of χ² against P(k) ∝ weight(k), the tails beyond ± reach as one cell each."""
    support = range(-60 * reach, 60 * reach + 1)
    weights = {k: weight(k) for k in support}
    total = sum(weights.values())
    cells = {k: weights[k] for k in range(-reach, reach + 1)}
    tail = sum(weights[k] for k in support if k > reach)
    expected = [tail, *cells.values(), tail]
    seen = Counter(max(-reach - 1, min(reach + 1, k)) for k in drawn)
    observed = [seen[k] for k in range(-reach - 1, reach + 2)]
    return float(stats.chisquare(observed, np.array(expected) * len(drawn) / total).pvalue)


def test_discrete_draws_are_exact() -> None:
    stream = SeededNoise(3).stream()
    laplace = [stream.discrete_laplace(0.5) for _ in range(20_000)]
    assert fits(laplace, lambda k: math.exp(-abs(k) / 2), 10) > 1e-4
    assert Counter(stream.below(5) for _ in range(10_000)).keys() == {0, 1, 2, 3, 4}


def test_uniform_draws_are_above_zero_and_reach_one(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.array([0, (1 << 11) - 1, 1 << 11, (1 << 64) - 1], np.uint64)
    monkeypatch.setattr(NoiseStream, "words", lambda stream, count: words)
    assert NoiseStream(bytes(32)).uniforms(4).tolist() == [2.0**-53, 2.0**-53, 2.0**-52, 1.0]


def test_what_a_seed_draws_stays_the_same() -> None:
    """Seeded runs are published: the same key, words and draws, in this order, for ever."""
    drawn = SeededNoise(1).stream("golden", 2)
    assert SeededNoise(1).key("a", 1).hex().startswith("d9903797b573cedb")
    assert drawn.words(2).tolist() == [3827208137065927210, 4323875232975081932]
    assert drawn.uniforms(3).tolist() == pytest.approx([0.083239957, 0.821441074, 0.169904113], abs=1e-9)
    assert drawn.normals(3).tolist() == pytest.approx([0.980617694, -0.419564933, 0.773304806], abs=1e-9)
    assert drawn.poisson_sample(40, 0.2).tolist() == [11, 14, 15, 16, 23, 25, 26, 38]
    bounds = (1, 2, 10, 1 << 64, (1 << 64) + 5)
    assert [drawn.below(n) for n in bounds] == [0, 1, 1, 14768576206116252608, 5665784974404674883]
    assert [drawn.discrete_laplace(0.25) for _ in range(12)] == [2, -6, 1, -16, 1, 1, -4, -4, 1, -1, -1, 2]
    assert [i for i in range(40) if drawn.discrete_laplace(3.0)] == [11, 17]
    tenth, same = SeededNoise(1).stream("tenth"), SeededNoise(1).stream("tenth")
    assert [tenth.discrete_laplace(0.1) for _ in range(9)] == [same.discrete_laplace(Fraction(1, 10)) for _ in range(9)]
    assert [i for i in range(30) if drawn._exp(5, 2)] == [0, 5, 11, 29]
    for bound in (0, -1):
        with pytest.raises(ValueError, match="no number is below"):
            drawn.below(bound)
