"""Random draws: each comes from a generator seeded by what it is for, so that none depends on what ran before."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from promptfed.shared.tensors.torch_tensors import TorchDraws

Floats = NDArray[np.float32]
WORD = 2.0**-24  # a float32 between 0 and 1 has 24 random bits
HALF = 8  # Box and Muller's method makes eight pairs at once

INITIAL = "initial-state"
"""The purpose of round 0's draws: what clients start from in common is drawn from them, wherever it is drawn."""


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose: the first bits of SHA-256(seed | purpose | ...).

    ``derive_seed(spec.seed, round, client, "train")`` is the same in every process and on every machine.
    """
    text = "|".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> TorchDraws:
    """A CPU generator of torch for one purpose; draws are made on the CPU and moved, so that devices agree."""
    from promptfed.shared.tensors.torch_tensors import TorchDraws

    made = TorchDraws()
    made.manual_seed(derive_seed(seed, *purpose))
    return made


class Draws(Protocol):
    """Random numbers for an initial state: numpy arrays, or torch tensors."""

    @property
    def xp(self) -> Any:
        """numpy or torch."""

    def uniform(self, *shape: int) -> Any:
        """``shape`` float32, uniform in [0, 1)."""

    def normal(self, *shape: int) -> Any:
        """``shape`` float32 from N(0, 1)."""

    def permutation(self, size: int) -> list[int]:
        """The numbers below ``size`` in a random order."""


DrawsOf = Callable[..., Draws]
"""Makes the draws for one purpose: ``(seed, *purpose)``."""


class NumpyDraws:
    """The draws of ``torch.Generator``, made with numpy: MT19937, its 32-bit words taken in the same order.

    Uniform numbers have the same bits as torch's. Normal ones differ by rounding, since torch computes logarithms and
    cosines in another way on each kind of processor.
    """

    xp = np

    def __init__(self, seed: int):
        self._words = np.random.RandomState(seed & 0xFFFFFFFF)
        self._spare: float | None = None  # the second number of the last pair

    def uniform(self, *shape: int) -> Floats:
        """``shape`` float32, uniform in [0, 1)."""
        return self._uniform(math.prod(shape)).reshape(shape)

    def normal(self, *shape: int) -> Floats:
        """``shape`` float32 from N(0, 1)."""
        size = math.prod(shape)
        if size < 2 * HALF:
            return np.array([self._next_normal() for _ in range(size)], np.float32).reshape(shape)
        drawn = self._uniform(size)
        whole = size - size % (2 * HALF)
        drawn[:whole] = _normal(drawn[:whole])
        if whole < size:  # torch draws the last sixteen again
            drawn[-2 * HALF :] = _normal(self._uniform(2 * HALF))
        return drawn.reshape(shape)

    def permutation(self, size: int) -> list[int]:
        """The numbers below ``size`` in a random order."""
        order = list(range(size))
        for place, word in enumerate(self._integers(size - 1).tolist() if size else ()):
            other = place + word % (size - place)
            order[place], order[other] = order[other], order[place]
        return order

    def _integers(self, size: int) -> NDArray[np.uint32]:
        return self._words.randint(0, 1 << 32, size, dtype=np.uint32)

    def _uniform(self, size: int) -> Floats:
        return (self._integers(size) & 0xFFFFFF).astype(np.float32) * np.float32(WORD)

    def _next_double(self) -> float:
        high, low = (int(word) for word in self._integers(2))
        return ((high << 32 | low) & ((1 << 53) - 1)) * 2.0**-53

    def _next_normal(self) -> float:
        if self._spare is not None:
            drawn, self._spare = self._spare, None
            return drawn
        angle, length = 2 * math.pi * self._next_double(), math.sqrt(-2 * math.log1p(-self._next_double()))
        self._spare = length * math.sin(angle)
        return length * math.cos(angle)


def _normal(uniform: Floats) -> Floats:
    """Normal numbers of uniform ones by Box and Muller's method; in each sixteen, eight lengths before eight angles."""
    blocks = uniform.reshape(-1, 2, HALF)
    lengths = np.sqrt(np.float32(-2) * np.log(1 - blocks[:, 0]))
    angles = np.float32(2 * math.pi) * blocks[:, 1]
    return np.stack([lengths * np.cos(angles), lengths * np.sin(angles)], axis=1).reshape(-1)


def draws(seed: int, *purpose: str | int) -> NumpyDraws:
    """The draws for one purpose, as numpy arrays."""
    return NumpyDraws(derive_seed(seed, *purpose))


def sampling_order(draw: int | str, round: int, names: list[str]) -> list[str]:
    """Names ordered by SHA-256(draw | round | name): the order in which a round asks eligible clients.

    ``draw`` is the spec's seed, or a secret: who knows the seed can choose a name that is asked first in many rounds.
    """
    return sorted(names, key=lambda name: hashlib.sha256(f"{draw}|{round}|{name}".encode()).digest())


def initial_draws(seed: int) -> TorchDraws:
    """The draws of round 0 as torch tensors, for clients."""
    return generator(seed, INITIAL)
