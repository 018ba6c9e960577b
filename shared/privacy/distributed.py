"""Distributed noise: each client adds a part of the noise to its change, so that the sum has enough noise.

A change is clipped to length S and converted to integer multiples of 2⁻³². A draw of the discrete Gaussian is added to
each number. The sum of at least h honest parts protects any single client (Kairouz, Liu, Steinke, "The Distributed
Discrete Gaussian Mechanism", 2021; Canonne, Kamath, Steinke, 2020). Rounding moves a change by at most √d/2. A sum of
discrete Gaussians is not exactly a discrete Gaussian; from σ = 2¹⁶ on the difference is 0 in float64. Neighbours differ
in one client, whose contribution to all rounds is zero in one of them; every client counts as if it took part in every
sum. This module uses zero-concentrated differential privacy, `accounting` uses loss distributions: their results are
never added.
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

SCALE = 1 << 32  # integers for each unit of a change
LEAST_DEVIATION = 1 << 16  # smallest σ for which a sum of discrete Gaussians counts as one discrete Gaussian
MOST_NUMBERS = 1 << 26  # numbers of a change whose size is not known yet
BELOW = 1 - 1e-9  # factor of the clip; the margin exceeds the rounding errors of float64


@dataclass(frozen=True)
class PartialNoise:
    """One client's part of the noise. ``clip``: S. ``honest``: h, the minimum number of secret parts in the sum.

    ``noise_multiplier``: z of the sum, whose standard deviation is at least z·S.
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
        """ρ = Δ₂²/(2·h·σ_k²) of one sum of ``numbers`` numbers (zero-concentrated differential privacy)."""
        reach = self.clip * SCALE + math.sqrt(numbers) / 2
        return reach**2 / (2 * self.honest * self.variance)

    def noised(self, change: NDArray[np.float64], stream: NoiseStream) -> NDArray[np.int64]:
        """``(d,)`` int64: rint(clip(Δ)·2³²) + η of a change Δ ``(d,)``.

        A change whose length is not finite counts as zero. Refusing it would reveal information without noise.
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
    """An upper bound of ε at ``delta`` for ``sums`` sums of ρ each; 0 for no sums."""
    if not sums:
        return 0.0
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp_event.ZCDpEvent(rho), sums)
    return float(accountant.get_epsilon(delta))


def calibrate_sums(epsilon: float, delta: float, clip: float, honest: int, sums: int) -> float:
    """The smallest z (3 decimals) with which ``sums`` sums of any size cost at most ``epsilon``; at least 0.3.

    Raises:
        PrivacyError: it would exceed 1,000.
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
    while high - low > 1:  # low is too small, high is large enough
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high / 1000
