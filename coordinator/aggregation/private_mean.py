"""The mean of clipped changes with noise: central differential privacy, which protects whole clients.

New tensors are base + (Σ_k Δ_k·min(1, S/‖Δ_k‖) + z·S·ξ)/K̄ with ξ ~ N(0, I): DP-FedAvg with a fixed denominator (McMahan
et al., "Learning Differentially Private Recurrent Language Models", 2018, its estimator f_f). Δ_k is an update minus
what its client was given, over all tensors in order of name, in float64. K̄ is how many were expected when the phase
opened, never how many came; without any there is the noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from promptfed.shared.methods.core.interface import ClientUpdate
from promptfed.shared.privacy.noise import NoiseStream
from promptfed.shared.tensors import Array, Arrays, Shape

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class NoiseTerms:
    """Terms of one phase's noise. ``key``: 32 secret bytes, used for this noise alone."""

    clip: float
    noise_multiplier: float
    expected: float
    key: bytes

    @property
    def divisor(self) -> float:
        """K̄; where nobody can be in, the noise as it is."""
        return self.expected or 1.0


@dataclass(frozen=True)
class PrivateMean:
    """The tensors after a phase; ``lengths`` of the clients' changes before clipping."""

    tensors: Arrays
    lengths: dict[str, float]


def private_mean(
    updates: Iterable[ClientUpdate], payload: Mapping[str, Array], shapes: Mapping[str, Shape], terms: NoiseTerms
) -> PrivateMean:
    """The clipped and noised mean of ``updates``, which started from ``payload``, as tensors of ``shapes``."""
    names = sorted(shapes)
    size = sum(math.prod(shapes[name]) for name in names)
    base = _base(payload, shapes, names)
    total, lengths = np.zeros(size), {}
    for update in updates:
        change = _flat(update.tensors, names) - base
        length = float(np.linalg.norm(change))
        lengths[update.client] = length
        total += change * min(1.0, terms.clip / length) if length > 0 else change
    stream = NoiseStream(terms.key)
    noised = (total + terms.noise_multiplier * terms.clip * stream.normals(size)) / terms.divisor
    return PrivateMean(_tensors(base + noised, shapes, names), lengths)


def _base(payload: Mapping[str, Array], shapes: Mapping[str, Shape], names: list[str]) -> Vector:
    """The tensors that clients started from; zeros for tensors that the payload does not have."""
    given: Arrays = {}
    for name in names:
        before = payload.get(name)
        fits = before is not None and tuple(before.shape) == tuple(shapes[name])
        given[name] = before if before is not None and fits else np.zeros(shapes[name])
    return _flat(given, names)


def _flat(tensors: Mapping[str, Any], names: list[str]) -> Vector:
    return np.concatenate([tensors[name].reshape(-1).astype(np.float64) for name in names])


def _tensors(vector: Vector, shapes: Mapping[str, Shape], names: list[str]) -> Arrays:
    parts = np.split(vector, np.cumsum([math.prod(shapes[name]) for name in names])[:-1])
    return {name: part.reshape(shapes[name]).astype(np.float32) for name, part in zip(names, parts, strict=True)}
