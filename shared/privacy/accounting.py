"""The joint cost of mechanisms: ε at a given δ for a multiset of events, by Google's privacy loss distributions.

Budgets and limits refer to *zero-out* neighbours: data sets that differ in one unit, whose contribution is zero in one
of them (`NeighboringRelation.REPLACE_SPECIAL`). The number of units is public. The ε of *replace-one* neighbours, where
one unit is replaced by another one (`NeighboringRelation.REPLACE_ONE`), is shown as well: a sum of vectors of length at
most C then moves by up to 2C instead of C. With sampling probability q the composed pair is
(1-q)·N(0, z²) + q·N(1, z²) and (1-q)·N(0, z²) + q·N(-1, z²), in units of C; for q = 1 that is the Gaussian mechanism
with half of the noise. A count of correct answers moves by at most one under either relation.

Every ε is an upper bound, computed on a grid that rounds the privacy loss up.

`dp_accounting` is imported inside the functions, since importing it takes seconds and would slow `promptfed --help`.

Sources: Abadi et al., "Deep Learning with Differential Privacy", 2016; Koskela et al., "Computing Tight Differential
Privacy Guarantees Using FFT", 2020; Doroshenko et al., "Connect the Dots", 2022 (the library's method).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from promptfed.shared.errors import BadInput
from promptfed.shared.files import write_whole

RECORDED = 1e-4  # grid of the privacy loss for every recorded or enforced ε
COARSE = 1e-3  # for calibration, and a coordinator's figures; it takes a tenth of the time
LEAST_NOISE, MOST_NOISE = 0.3, 1000.0  # range of the noise multiplier
LEAST_DELTA = 1e-10
MOST_EPSILON = 1000.0  # the largest budget of a data set
LARGEST_EPSILON = 1e9  # beyond what any plan or bound comes to
HOPELESS = 400.0  # a larger ε protects nothing; a simpler bound, which needs little memory, is used there
MOST_STEPS = 10**6  # of more, too; distributions of their losses take minutes
RELATION = "zero-out"  # neighbours of every budget and limit
ACCOUNTANT = "pld"

Mechanism = Literal["gaussian", "laplace"]


class PrivacyError(BadInput, ValueError):
    """The request cannot be accounted for; the text names the number and its bounds."""


@dataclass(frozen=True, order=True)
class Event:
    """``count`` uses of one mechanism on the same units.

    ``gaussian``: a sum of vectors of length at most C, each unit sampled with probability ``q``, plus noise of standard
    deviation ``z``·C. ``laplace``: a count of sensitivity 1 plus k with P(k) ∝ e^(−z·|k|); ``q`` is 1.
    """

    mechanism: Mechanism
    q: float
    z: float
    count: int

    def __post_init__(self) -> None:
        if self.mechanism not in ("gaussian", "laplace"):
            raise PrivacyError(f"no mechanism {self.mechanism!r}: gaussian or laplace")
        if not 0 < self.q <= 1 or (self.mechanism == "laplace" and self.q != 1):
            raise PrivacyError(f"a sampling probability of {self.q} is none of {self.mechanism}")
        if not (math.isfinite(self.z) and self.z > 0) or self.count < 1:
            raise PrivacyError(f"noise of {self.z}, {self.count} times, cannot be accounted for")
        if self.mechanism == "gaussian":
            check_noise(self.z)

    def as_json(self) -> dict[str, Any]:
        """The event in the form used by ledgers, updates and reports."""
        return {"mechanism": self.mechanism, "q": self.q, "z": self.z, "count": self.count}


def check_noise(z: float) -> None:
    """Raise PrivacyError if a noise multiplier is out of bounds."""
    if not LEAST_NOISE <= z <= MOST_NOISE:
        raise PrivacyError(f"the noise multiplier {z:g} is not between {LEAST_NOISE:g} and {MOST_NOISE:g}")


def check_delta(delta: float, units: int) -> None:
    """Raise PrivacyError unless 1e-10 ≤ δ < 1/n. With δ = 1/n it would be allowed to publish one unit."""
    if units < 1:
        raise PrivacyError("there is nothing to protect: no units")
    if not LEAST_DELTA <= delta < 1 / units:
        raise PrivacyError(f"δ = {delta:g} is not between {LEAST_DELTA:g} and 1/{units}, the number of units")


def default_delta(units: int) -> float:
    """The largest power of ten that is at most 1/(10·n), for n ``units``; at least 1e-10."""
    exponent = len(str(10 * units - 1))
    return max(LEAST_DELTA, float(f"1e-{exponent}"))


def sampling_probability(units: int, batch_size: int) -> float:
    """q = min(1, B/n)."""
    return min(1.0, batch_size / units)


def steps_of(units: int, batch_size: int, epochs: int) -> int:
    """T = epochs·⌈n/B⌉ steps of one training loop."""
    return epochs * math.ceil(units / batch_size)


def training_event(units: int, batch_size: int, epochs: int, z: float, loops: int = 1) -> Event:
    """The event of ``loops`` protected training loops over n ``units``."""
    steps = steps_of(units, batch_size, epochs)
    return Event("gaussian", sampling_probability(units, batch_size), z, loops * steps)


def merged(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events as a sorted multiset, with one entry for each mechanism and its parameters."""
    counts: dict[tuple[Mechanism, float, float], int] = {}
    for event in events:
        key = event.mechanism, event.q, event.z
        counts[key] = counts.get(key, 0) + event.count
    return tuple(sorted(Event(*key, count) for key, count in counts.items()))


def epsilon_of(events: Iterable[Event], delta: float, interval: float = RECORDED) -> float:
    """The joint ε of ``events`` at ``delta``; 0 for no events. It does not depend on their order."""
    together = merged(events)
    return _composed(together, delta, interval) if together else 0.0


@lru_cache(maxsize=256)
def _composed(events: tuple[Event, ...], delta: float, interval: float) -> float:
    from dp_accounting import NeighboringRelation

    simple = _simple_bound(events, delta)
    return (
        simple
        if simple > HOPELESS or _steps(events) > MOST_STEPS
        else _by_pld(events, delta, NeighboringRelation.REPLACE_SPECIAL, interval)
    )


def _steps(events: Iterable[Event]) -> int:
    return sum(event.count for event in events)


def _by_pld(events: Iterable[Event], delta: float, relation: Any, interval: float) -> float:
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(relation, value_discretization_interval=interval)
    for event in events:
        accountant.compose(_mechanism(event), event.count)
    return float(accountant.get_epsilon(delta))


def _simple_bound(events: tuple[Event, ...], delta: float) -> float:
    """A looser bound that needs little time and memory: Rényi for Gaussians, plus the sum of ε for counts."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    orders = [*range(2, 33), 64, 128, 256, 512]  # integers, for which the library has a closed form
    accountant = RdpAccountant(orders, NeighboringRelation.REPLACE_SPECIAL)
    gaussians = [event for event in events if event.mechanism == "gaussian"]
    for event in gaussians:
        accountant.compose(_mechanism(event), event.count)
    counts = math.fsum(event.z * event.count for event in events if event.mechanism == "laplace")
    return counts + (float(accountant.get_epsilon(delta)) if gaussians else 0.0)


def replace_one_epsilon(events: Iterable[Event], delta: float, interval: float = RECORDED) -> float:
    """An upper bound of the joint ε of ``events`` at ``delta`` for replace-one neighbours; 0 for no events."""
    return _replaced(merged(events), delta, interval)


@lru_cache(maxsize=256)
def _replaced(events: tuple[Event, ...], delta: float, interval: float) -> float:
    sums = tuple(event for event in events if event.mechanism == "gaussian")
    if not sums:
        return epsilon_of(events, delta, interval)
    # Training and test images have separate budgets, so sums and counts rarely occur together.
    counts = math.fsum(event.z * event.count for event in events if event.mechanism == "laplace")
    return counts + _of_sums(sums, delta, interval)


def _of_sums(sums: tuple[Event, ...], delta: float, interval: float) -> float:
    from dp_accounting import NeighboringRelation

    if _steps(sums) > MOST_STEPS or epsilon_of(sums, delta, interval) > HOPELESS / 4:
        # Such a loss would need too much memory. Without amplification a sum is ρ-zCDP with ρ = (2/z)²/2.
        rho = math.fsum(2 * event.count / event.z**2 for event in sums)
        return rho + 2 * math.sqrt(rho * math.log(1 / delta))
    return _by_pld(sums, delta, NeighboringRelation.REPLACE_ONE, interval)


def _mechanism(event: Event) -> Any:
    from dp_accounting import dp_event

    if event.mechanism == "laplace":
        return dp_event.DiscreteLaplaceDpEvent(event.z, 1)
    noise = dp_event.GaussianDpEvent(event.z)
    return noise if event.q >= 1 else dp_event.PoissonSampledDpEvent(event.q, noise)


def calibrate(epsilon: float, delta: float, q: float, steps: int) -> float:
    """The smallest noise multiplier (3 decimals) with which ``steps`` steps cost at most ``epsilon`` at ``delta``.

    It is at least 0.3, even if less noise would be enough.

    Raises:
        PrivacyError: it would exceed 1,000.
    """

    def fits(thousandths: int, interval: float) -> bool:
        return epsilon_of([Event("gaussian", q, thousandths / 1000, steps)], delta, interval) <= epsilon

    low, high = round(LEAST_NOISE * 1000), round(MOST_NOISE * 1000)
    if not fits(high, COARSE):
        raise PrivacyError(
            f"ε = {epsilon:g} at δ = {delta:g} takes more noise than {MOST_NOISE:g} times the clip in {steps} steps: "
            "ask for a larger ε, or for fewer rounds or epochs"
        )
    near = low  # ε falls as the noise grows: double the noise until it fits, then bisect
    while near < high and not fits(near, COARSE):
        low, near = near, min(2 * near, high)
    high = near
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle, COARSE) else (middle, high)
    while not fits(high, RECORDED):
        high += 1
    return high / 1000


class Accountant:
    """Computes `epsilon_of` at one δ and stores the results in a file beside the ledger."""

    def __init__(self, delta: float, cache: Path | None = None):
        self.delta = delta
        self._cache = cache
        self._known: dict[str, float] = _read(cache) if cache is not None else {}

    def epsilon(self, events: Iterable[Event], replace_one: bool = False) -> float:
        """The joint ε of ``events`` for zero-out neighbours, or for ``replace_one`` neighbours."""
        together = merged(events)
        key = ("replace-one " if replace_one else "") + self._key(together)
        if key not in self._known:
            self._known[key] = (replace_one_epsilon if replace_one else epsilon_of)(together, self.delta)
            if self._cache is not None:
                write_whole(self._cache, json.dumps(self._known).encode(), mode=0o600, synced=False)
        return self._known[key]

    def _key(self, events: tuple[Event, ...]) -> str:
        about = [[event.as_json() for event in events], self.delta, RECORDED, version("dp-accounting")]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _read(cache: Path) -> dict[str, float]:
    """The results of earlier processes; empty if the file is missing or unreadable."""
    try:
        cached = json.loads(cache.read_bytes())
        return {str(key): float(value) for key, value in cached.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}


def client_event(z: float, q: float, phases: int) -> Event:
    """The event of ``phases`` noised sums over clients that each take part with probability ``q``."""
    return Event("gaussian", q, z, phases)


def budget_rounds(z: float, q: float, per_round: int, rounds: int, epsilon: float, delta: float) -> int:
    """The largest number of rounds, up to ``rounds``, that costs at most ``epsilon`` at ``delta``.

    Each round has ``per_round`` noised sums.

    Raises:
        PrivacyError: a single round costs more.
    """

    def fits(count: int) -> bool:
        return epsilon_of([client_event(z, q, count * per_round)], delta) <= epsilon

    if fits(rounds):
        return rounds
    if not fits(1):
        cost = epsilon_of([client_event(z, q, per_round)], delta)
        text = (
            f"one round with noise_multiplier {z:g} costs ε = {cost:.4g} at δ = {delta:g}, and {epsilon:g} is allowed"
        )
        raise PrivacyError(f"{text}: ask for more noise, or a larger epsilon")
    low, high = 1, rounds  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Drowned:
    """Comparison of a mean with its noise.

    ``ratio`` r = z·√d/K̄ is the expected length of the noise divided by the largest length of the mean. ``after_rounds``
    ρ = r/√R is the same for the sum of R phases whose means all have the same direction.
    """

    z: float
    numbers: int
    expected: float
    phases: int

    @property
    def ratio(self) -> float:
        """r."""
        return self.z * math.sqrt(self.numbers) / self.expected if self.expected > 0 else math.inf

    @property
    def after_rounds(self) -> float:
        """ρ."""
        return self.ratio / math.sqrt(self.phases)

    def told(self) -> str:
        """The comparison in words, with its numbers and advice."""
        return (
            f"noise z = {self.z:g} on {self.numbers:,} numbers over {self.expected:g} expected clients is "
            f"r = {self.ratio:.2g} times as long as the longest mean change, and ρ = {self.after_rounds:.2g} times as "
            f"long as {self.phases} of them that all point the same way: have more clients, fewer numbers (a smaller "
            "m) or a larger epsilon"
        )
