"""The weighted mean of updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from promptfed.coordinator.aggregation.rows import Values
from promptfed.shared.methods.core.checks import LARGE
from promptfed.shared.methods.core.interface import ClientUpdate
from promptfed.shared.tensors import Room, chunks, size_of
from promptfed.shared.tensors.arrays import double, in_namespace, namespace, single


def weighted_mean(updates: Iterable[ClientUpdate], room: Room = np.empty) -> Values:
    """Σ weight·tensor over updates that come one by one, summed in float64, as float32.

    Large ones, which are mapped from files, are gone through side by side instead, some entries at a time, and the
    means written into ``room(shape)``: the same sums in the same order, so the same bits.

    Raises:
        ValueError: there is no update.
    """
    coming = iter(updates)
    first = next(coming, None)
    if first is not None and size_of(first.tensors) >= LARGE:
        return _mean_by_entry([first, *coming], room)
    return _mean_by_update([] if first is None else chain([first], coming))


def _mean_by_entry(updates: Sequence[ClientUpdate], room: Room) -> Values:
    means: Values = {}
    for name in sorted(updates[0].tensors):
        first = updates[0].tensors[name]
        means[name] = in_namespace(namespace(first), room(tuple(first.shape), dtype=np.float32))
        parts = [chunks(update.tensors[name]) for update in updates]
        for mean, *theirs in zip(chunks(means[name]), *parts, strict=True):
            total = double(theirs[0]) * updates[0].weight
            for update, part in zip(updates[1:], theirs[1:], strict=True):
                total += double(part) * update.weight
            mean[:] = total
    return means


def _mean_by_update(updates: Iterable[ClientUpdate]) -> Values:
    sums: dict[str, Any] = {}
    for update in updates:
        for name, tensor in update.tensors.items():
            first = name not in sums
            if first:
                xp = namespace(tensor)
                sums[name] = xp.empty(tuple(tensor.shape), dtype=xp.float64)
            for total, part in zip(chunks(sums[name]), chunks(tensor), strict=True):
                weighted = double(part) * update.weight
                if first:
                    total[:] = weighted
                else:
                    total += weighted
    if not sums:
        raise ValueError("there is no update to take the mean of")
    return {name: single(total) for name, total in sorted(sums.items())}
