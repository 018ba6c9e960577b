"""Secret randomness for protection: expanded from 256 secret bits by ChaCha20, never from a spec's seed.

Operator and clients know the seed, so noise derived from it would protect nobody. `SeededNoise` exists only for tests
and simulations, which must be reproducible. It must be passed to a worker explicitly, and its results are marked.

Normal draws are sums of four Box-Muller draws in float64, which makes it impractical, but not impossible, to infer a
value from its low bits (Holohan and Braghin, "Secure Random Sampling in Differential Privacy", 2021). Discrete Laplace
draws are exact, in integers: algorithms 1 and 2 of Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential
Privacy", 2020.
"""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

Kind = Literal["secret", "seeded"]
WORDS = 512  # 64-bit words generated at once for single requests
NONCE = bytes(16)  # each key is used for only one stream


class NoiseStream:
    """The draws of one training attempt, in order, from a key of 32 bytes that is kept only in memory."""

    def __init__(self, key: bytes):
        self._stream = Cipher(algorithms.ChaCha20(key, NONCE), mode=None).encryptor()
        self._waiting: list[int] = []

    def words(self, count: int) -> NDArray[np.uint64]:
        """``(count,)`` uniform 64-bit words."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """``(count,)`` uniform on the multiples of 2⁻⁵³ in (0, 1]."""
        return ((self.words(count) >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53

    def normals(self, count: int) -> NDArray[np.float64]:
        """``(count,)`` draws of N(0, 1); each is the sum of four normal draws, divided by 2."""
        pairs = self.uniforms(4 * count).reshape(2, 2 * count)
        radius, angle = np.sqrt(-2.0 * np.log(pairs[0])), 2.0 * np.pi * pairs[1]
        four = np.stack([radius * np.cos(angle), radius * np.sin(angle)]).reshape(4, count)
        total: NDArray[np.float64] = (four[0] + four[1]) + (four[2] + four[3])
        return total / 2.0

    def poisson_sample(self, count: int, q: float) -> NDArray[np.int64]:
        """Ascending indices ``(|S|,)`` of a sample of ``count`` units, each drawn independently with chance ``q``."""
        return np.flatnonzero(self.uniforms(count) <= q)

    def below(self, bound: int) -> int:
        """An exactly uniform integer in 0 ... ``bound`` − 1."""
        if bound <= 0:
            raise ValueError(f"no number is below {bound} and not below 0")
        length = -(-bound.bit_length() // 64)
        surplus = 64 * length - bound.bit_length()
        while True:
            value = 0
            for _ in range(length):
                value = value << 64 | self._word()
            value >>= surplus
            if value < bound:
                return value

    def _word(self) -> int:
        if not self._waiting:
            self._waiting = self.words(WORDS).tolist()
        return self._waiting.pop()

    def discrete_laplace(self, a: Fraction | float) -> int:
        """k with P(k) ∝ e^(−a·|k|)."""
        exact = Fraction(repr(a)) if isinstance(a, float) else Fraction(a)
        return self._laplace(exact.numerator, exact.denominator)

    def _laplace(self, s: int, t: int) -> int:
        """P(k) ∝ e^(−|k|·s/t) (CKS, algorithm 2)."""
        while True:
            part = self.below(t)
            if not self._exp(part, t):
                continue
            whole = 0
            while self._exp(1, 1):
                whole += 1
            size = (part + t * whole) // s
            negative = self.below(2)
            if not (negative and size == 0):
                return -size if negative else size

    def _exp(self, num: int, den: int) -> bool:
        """True with probability e^(−num/den) (CKS, algorithm 1)."""
        while num > den:
            if not self._exp_below_one(1, 1):
                return False
            num -= den
        return self._exp_below_one(num, den)

    def _exp_below_one(self, num: int, den: int) -> bool:
        k = 1
        while self.below(den * k) < num:
            k += 1
        return k % 2 == 1


class Noise(ABC):
    """The source of noise of a client or of the coordinator."""

    kind: ClassVar[Kind]

    @abstractmethod
    def key(self, *purpose: str | int) -> bytes:
        """32 bytes for one attempt at ``purpose``."""

    def stream(self, *purpose: str | int) -> NoiseStream:
        """The stream of one attempt at ``purpose``."""
        return NoiseStream(self.key(*purpose))


class SecretNoise(Noise):
    """A new key of 256 secret bits for every attempt. A different key after a crash is safe: nothing was sent."""

    kind: ClassVar[Kind] = "secret"

    def key(self, *purpose: str | int) -> bytes:
        """A key that nobody can repeat."""
        return secrets.token_bytes(32)


class SeededNoise(Noise):
    """The same stream for the same seed and purpose. For tests and simulations only: it protects nobody."""

    kind: ClassVar[Kind] = "seeded"

    def __init__(self, seed: int):
        self._seed = seed

    def key(self, *purpose: str | int) -> bytes:
        """A key derived from the seed and the purpose."""
        text = "|".join(str(part) for part in ("promptfed/noise", self._seed, *purpose))
        return hashlib.sha256(text.encode()).digest()
