"""Noise of several clients together: each adds a part to its change, and the sum has enough noise.

A change is clipped to length S, written in whole numbers of 2⁻³² and gets a draw of the discrete Gaussian for each
number; the sum of at least h honest parts hides any one client (Kairouz, Liu, Steinke, "The Distributed Discrete
Gaussian Mechanism", 2021; Canonne, Kamath, Steinke, 2020). Rounding to the nearest moves a change by √d/2 at its worst.
A sum of discrete Gaussians is none exactly; from σ = 2¹⁶ on the difference is 0 in float64. Neighbours differ in one
client whose contribution is nothing, in all rounds; everybody counts as if in every sum. Zero-concentrated differential
privacy is not what `accounting`'s loss distributions take: figures of the two are never added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from promptfed.shared.privacy.accounting import LEAST_NOISE, MOST_NOISE, PrivacyError
from promptfed.shared.privacy.noise import NoiseStream

SCALE = 1 << 32  # of the whole numbers that are summed
LEAST_DEVIATION = 1 << 16  # from which on sums of discrete Gaussians are as good as one
MOST_NUMBERS = 1 << 26  # in a change, where its size is not known yet
BELOW = 1 - 1e-9  # of the clip: what rounding in float64 may add to a length is less than this leaves


@dataclass(frozen=True)
class PartialNoise:
    """One client's part. ``clip``: S. ``honest``: h, the parts at least that are in the sum and told to nobody.

    ``noise_multiplier``: z, of the whole: the sum has at least the standard deviation z·S.
    """

    clip: float
    noise_multiplier: float
    honest: int

    def __post_init__(self) -> None:
        if self.honest < 1:
            raise PrivacyError("no part of the noise would be secret: ask for more clients, or fewer colluding ones")
        if self.variance < LEAST_DEVIATION**2:
            raise PrivacyError(f"a clip of {self.clip:g} is too short to be summed under noise: ask for a longer one")

    @property
    def variance(self) -> int:
        """σ_k² = ⌈(z·S·2³²)²/h⌉ of one number, in units of 2⁻⁶⁴."""
        exact = Fraction(repr(self.noise_multiplier)) * Fraction(repr(self.clip)) * SCALE
        return math.ceil(exact**2 / self.honest)

    def rho(self, numbers: int) -> float:
        """ρ = Δ₂²/(2·h·σ_k²) of one sum of ``numbers`` numbers, in zero-concentrated differential privacy."""
        reach = self.clip * SCALE + math.sqrt(numbers) / 2
        return reach**2 / (2 * self.honest * self.variance)

    def noised(self, change: NDArray[np.float64], stream: NoiseStream) -> NDArray[np.int64]:
        """``(d,)`` int64: rint(clip(Δ)·2³²) + η of a change Δ ``(d,)``.

        A change whose length is not finite counts as zero. To refuse it would tell something of the data without noise.
        """
        length = float(np.linalg.norm(change))
        if not math.isfinite(length):
            change, length = np.zeros_like(change), 0.0
        longest = self.clip * BELOW
        if length > longest:
            change = change * (longest / length)
        draws = [stream.discrete_gaussian(self.variance) for _ in range(len(change))]
        return np.rint(change * float(SCALE)).astype(np.int64) + np.array(draws, dtype=np.int64)


@lru_cache(maxsize=256)
def epsilon_of_sums(rho: float, sums: int, delta: float) -> float:
    """ε of ``sums`` sums of ρ each at ``delta``, an upper bound; 0 for none."""
    if not sums:
        return 0.0
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp_event.ZCDpEvent(rho), sums)
    return float(accountant.get_epsilon(delta))


def calibrate_sums(epsilon: float, delta: float, clip: float, honest: int, sums: int) -> float:
    """The least z, to 3 decimals, with which ``sums`` sums cost at most ``epsilon``, of however many numbers.

    Raises:
        PrivacyError: it would be beyond 1,000. Where 0.3, the least there is, costs less than asked for, it is 0.3.
    """

    def fits(thousandths: int) -> bool:
        rho = PartialNoise(clip, thousandths / 1000, honest).rho(MOST_NUMBERS)
        return epsilon_of_sums(rho, sums, delta) <= epsilon

    low, high = round(LEAST_NOISE * 1000), round(MOST_NOISE * 1000)
    if not fits(high):
        raise PrivacyError(
            f"ε = {epsilon:g} at δ = {delta:g} takes more noise than {MOST_NOISE:g} times the clip in {sums} sums: "
            "ask for a larger ε, or for fewer rounds"
        )
    if fits(low):
        return low / 1000
    while high - low > 1:  # low does not fit, high does
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high / 1000
