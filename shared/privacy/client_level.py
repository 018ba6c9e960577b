"""Noise for whole clients: the ε of a federation, and the length of the noise compared with the signal.

Neighbours differ in one client, whose contribution to all rounds is zero in one of them. A phase adds N(0, (z·S)²) to
each number of a sum of changes of length at most S, and divides by K̄, the public expected number of clients (McMahan
et al., "Learning Differentially Private Recurrent Language Models", 2018). With Poisson sampling each client takes part
independently with probability q. Fixed sampling is not amplified: every client counts as if it took part in all phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from promptfed.shared.privacy.accounting import Event, PrivacyError, epsilon_of


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
