"""Updates from rounded states, which count with another change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import numpy as np

from promptfed.coordinator.store.blobs import Blobs
from promptfed.shared.methods.core.interface.base import ClientUpdate
from promptfed.shared.tensors import Array

NONE = np.zeros(())


def moved_on(
    blobs: Blobs, updates: Iterable[ClientUpdate], payload: Mapping[str, Array], rounded: Mapping[str, str]
) -> Iterator[ClientUpdate]:
    """The updates as if they had started from ``payload``; ``rounded``: the payloads where they began, by client.

    One that started from w₀ becomes w + (update - w₀). A tensor that is not in the payload is itself a change.
    """
    began_at = lru_cache(maxsize=8)(lambda sha256: blobs.tensors(sha256)[0])
    for update in updates:
        known = rounded.get(update.client)
        if known is None:
            yield update
            continue
        began = began_at(known)
        moved = {
            name: _moved(tensor, began.get(name, NONE), payload.get(name, NONE))
            for name, tensor in update.tensors.items()
        }
        yield ClientUpdate(update.client, update.weight, moved)


def _moved(tensor: Array, began: Array, now: Array) -> Array:
    change = np.subtract(tensor, began, dtype=np.float64)
    change += now
    moved: Array = change.astype(tensor.dtype)
    return moved
