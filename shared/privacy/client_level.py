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


@dataclass(frozen=True)
class AdaptedClip:
    """Andrew et al., "Differentially Private Learning with Adaptive Clipping", 2021: S follows a quantile of the norms.

    ``rate``: η of S ← S·exp(−η·(b̃ − quantile)). ``count_noise``: σ_b on the number of changes no longer than S.
    """

    quantile: float
    rate: float
    count_noise: float

    def noise_of_changes(self, z: float) -> float:
        """z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2): the noise multiplier of the changes if changes and counts together cost as z.

        Each count enters as ±1/2, so that its sensitivity is 1/2. Raises PrivacyError if the counts alone cost more.
        """
        left = z**-2 - (2 * self.count_noise) ** -2
        if left <= 0:
            text = f"adaptive_clip.count_noise {self.count_noise:g} is not above half of the noise multiplier {z:g}"
            raise PrivacyError(f"{text}: the count alone would cost more than the whole")
        return float(left**-0.5)

    def next_clip(self, clip: float, within: int, counted: int, expected: float, drawn: float) -> float:
        """S of the next phase. ``within`` of ``counted`` changes were no longer than ``clip``; ``drawn`` ~ N(0, 1).

        b̃ = 1/2 + (Σ (1[‖Δ‖ ≤ S] − 1/2) + σ_b·drawn)/K̄. It does not depend on absent clients, not even on their number.
        """
        share = 0.5 + (within - counted / 2 + self.count_noise * drawn) / expected
        return clip * math.exp(-self.rate * (share - self.quantile))
