"""Updates that count with another change: from a rounded state, or of other numbers of steps (FedNova)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from promptfed.coordinator.aggregation.changes import change_norm
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.store.blobs import Blobs
from promptfed.shared.methods.core.interface.base import ClientUpdate
from promptfed.shared.methods.core.sizes import change_limit
from promptfed.shared.tensors import Array

NONE = np.zeros(())
TINY = 1e-300  # no division by the length of a change that is none


@dataclass(frozen=True)
class Scaled:
    """By client: the payloads of changes from ``rounded`` states, and ``factors`` of unequal steps."""

    rounded: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rounded or self.factors)


def moved_on(
    blobs: Blobs,
    federation: Federation,
    updates: Iterable[ClientUpdate],
    payload: Mapping[str, Array],
    scaled: Scaled,
) -> Iterator[ClientUpdate]:
    """The updates as if they had started from ``payload``, the current one, and their changes were scaled.

    One that started from w₀ becomes w + f·(update - w₀), so that a weighted mean of all is w + Σ p·f·Δ. A tensor that
    is not in the payload is itself a change. An update of the current payload with the factor 1 stays as it is.

    A client says itself how few steps it took. So a change that is enlarged stays within the limit of admission.
    """
    began_at = lru_cache(maxsize=8)(lambda sha256: blobs.tensors(sha256)[0])
    for update in updates:
        known, factor = scaled.rounded.get(update.client), scaled.factors.get(update.client, 1.0)
        if known is None and factor == 1:
            yield update
            continue
        began = payload if known is None else began_at(known)
        if factor > 1:
            numbers = sum(tensor.size for tensor in update.tensors.values())
            length = max(change_norm(update.tensors, began), TINY)
            factor = max(1.0, min(factor, change_limit(federation.spec, federation.method, numbers) / length))
        moved = {
            name: _moved(tensor, began.get(name, NONE), payload.get(name, NONE), factor)
            for name, tensor in update.tensors.items()
        }
        yield ClientUpdate(update.client, update.weight, moved)


def _moved(tensor: Array, began: Array, now: Array, factor: float) -> Array:
    change = np.subtract(tensor, began, dtype=np.float64)
    change *= factor
    change += now
    moved: Array = change.astype(tensor.dtype)
    return moved
