"""How updates become one: each client's share of the mean, and the mean itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from promptfed.shared.methods.core.base import ClientUpdate
from promptfed.shared.methods.core.sizes import LARGE
from promptfed.shared.spec_aggregation import AggregationSpec
from promptfed.shared.tensors import Shape, Tensors, chunks, size_of

Key = TypeVar("Key", str, int)


def shares(samples: Mapping[str, int], rules: AggregationSpec) -> dict[str, float]:
    """Each client's weight, summing to 1: by samples or equal, none over ``max_weight_share``.

    What the cap takes from some goes to the others in proportion to their weights. A cap under 1/K, which K clients
    cannot meet, means equal weights.
    """
    names = sorted(samples)
    total = sum(samples.values())
    if rules.weighting == "uniform" or total == 0:
        return {name: 1 / len(names) for name in names}  # of nobody none
    weights = {name: samples[name] / total for name in names}
    return capped(weights, rules.weight_cap(len(names)))


def capped(weights: dict[Key, float], cap: float) -> dict[Key, float]:
    """``weights``, which sum to 1, with none over ``cap``, which must be at least 1/K."""
    full: set[Key] = set()
    while True:
        free = {name: weight for name, weight in weights.items() if name not in full}
        left, mass = 1 - cap * len(full), sum(free.values())
        # Clients without samples cannot take up what the cap leaves over in proportion: they share it equally.
        scaled = {n: left * w / mass if mass > 0 else left / len(free) for n, w in free.items()}
        over = {name for name, weight in scaled.items() if weight > cap * (1 + 1e-12)}
        if not over:
            return {name: scaled.get(name, cap) for name in sorted(weights)}
        full |= over


def weighted_mean(updates: Iterable[ClientUpdate], room: Callable[[Shape], Tensor] = torch.empty) -> Tensors:
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


def _mean_by_entry(updates: Sequence[ClientUpdate], room: Callable[[Shape], Tensor]) -> Tensors:
    means: Tensors = {}
    for name in sorted(updates[0].tensors):
        means[name] = room(tuple(updates[0].tensors[name].shape))
        parts = [chunks(update.tensors[name]) for update in updates]
        for mean, *theirs in zip(chunks(means[name]), *parts, strict=True):
            total = theirs[0].to(torch.float64) * updates[0].weight
            for update, part in zip(updates[1:], theirs[1:], strict=True):
                total.add_(part.to(torch.float64) * update.weight)
            mean.copy_(total)
    return means


def _mean_by_update(updates: Iterable[ClientUpdate]) -> Tensors:
    sums: dict[str, Tensor] = {}
    for update in updates:
        for name, tensor in update.tensors.items():
            first = name not in sums
            if first:
                sums[name] = torch.empty(tensor.shape, dtype=torch.float64)
            for total, part in zip(chunks(sums[name]), chunks(tensor), strict=True):
                weighted = part.to(torch.float64) * update.weight
                total.copy_(weighted) if first else total.add_(weighted)
    if not sums:
        raise ValueError("there is no update to take the mean of")
    return {name: total.to(torch.float32) for name, total in sorted(sums.items())}
