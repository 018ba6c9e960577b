"""Norms of clients' changes: the difference between an update and its payload."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from promptfed.shared.methods.core.interface.base import ClientUpdate
from promptfed.shared.tensors import Arrays, chunks, sum_of_squares
from promptfed.shared.tensors.arrays import double

FAR = 10.0  # times the median of a phase's changes: no honest client is so far from the others
LEAST = 3  # updates: of two, nobody can say which is far from the other


def change_norm(update: Mapping[str, Any], payload: Mapping[str, Any]) -> float:
    """L2 norm of update - payload over all entries, in float64. Tensors not in the payload count from zero."""
    total = 0.0
    for name, tensor in update.items():
        before = payload.get(name)
        if before is None or before.shape != tensor.shape:
            total += sum_of_squares(tensor)
            continue
        for part, was in zip(chunks(tensor), chunks(before), strict=True):
            total += sum_of_squares(double(part) - double(was))
    return math.sqrt(total)


def measured(
    updates: Iterable[ClientUpdate], payload_of: Callable[[str], Arrays], norms: dict[str, float]
) -> Iterator[ClientUpdate]:
    """Pass the updates on one by one, and store the norm of each change in ``norms`` by client."""
    for update in updates:
        norms[update.client] = change_norm(update.tensors, payload_of(update.client))
        yield update


def far_off(norms: Mapping[str, float]) -> dict[str, float]:
    """Ratios to the median of the changes that are over ``FAR`` times the median; empty for too few clients."""
    if len(norms) < LEAST:
        return {}
    middle = median(norms.values())
    return {name: size / middle for name, size in norms.items() if middle > 0 and size > FAR * middle}
