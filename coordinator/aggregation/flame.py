"""FLAME's clustering, and its noise, which cannot be computed without the federation's key.

Source: Nguyen et al., "FLAME: Taming Backdoors in Federated Learning", USENIX Security 2022, Algorithm 1. Its HDBSCAN
asks for clusters of more than half of all updates, so that no split of the tree of clusters can be one: what it accepts
is the first component of so many members when pairs are joined in order of distance.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from promptfed.coordinator.aggregation.rows import Combined, Rows, squared_distances
from promptfed.shared.spec.spec_aggregation import AggregationSpec
from promptfed.shared.tensors.arrays import double

BLOCK = 1 << 18  # numbers of noise at once
BYTES = 8  # of a uniform number
MANTISSA = 53


def accepted(distances: Any) -> list[int]:
    """Of ``distances (K, K)`` the first component of ⌊K/2⌋+1 or more rows; pairs of one distance join together."""
    count = len(distances)
    members = [[row] for row in range(count)]  # of each row's component, one list for all of its rows
    first, second = np.triu_indices(count, 1)
    lengths = np.asarray(distances)[first, second]
    order = np.argsort(lengths, kind="stable")
    pairs = zip(first[order].tolist(), second[order].tolist(), lengths[order].tolist(), strict=True)
    for _, alike in groupby(pairs, key=itemgetter(2)):
        joined = [_join(members, one, other) for one, other, _ in alike]
        largest = max(joined, key=len)
        if len(largest) > count // 2:
            return sorted(largest)
    return list(range(count))  # one update alone


def _join(members: list[list[int]], one: int, other: int) -> list[int]:
    """Join the components of two rows; returns the joint one."""
    small, large = sorted((members[one], members[other]), key=len)
    if small is not large:
        large.extend(small)
        for row in small:
            members[row] = large
    return large


def noise(seed: bytes, size: int, xp: Any = np) -> Any:
    """``(size,)`` draws from N(0, 1) in float64, of a stream that follows from the secret ``seed`` (SHAKE-256).

    A statistical generator would not do: numpy's and torch's are started with 32 bits, which can be tried out.
    """
    parts = [drawn for _, drawn in noise_blocks(seed, size, xp)]
    return xp.concat(parts) if parts else xp.zeros(0, dtype=xp.float64)


def noise_blocks(seed: bytes, size: int, xp: Any = np) -> Iterator[tuple[slice, Any]]:
    """The same in blocks, each with its slice of columns."""
    for number, start in enumerate(range(0, size, BLOCK)):
        pairs = (min(BLOCK, size - start) + 1) // 2
        stream = hashlib.shake_256(seed + number.to_bytes(8, "little")).digest(2 * pairs * BYTES)
        words = xp.frombuffer(bytearray(stream), dtype=xp.int64)
        uniform = double((words >> (64 - MANTISSA)) & ((1 << MANTISSA) - 1)) / (1 << MANTISSA)
        lengths = xp.sqrt(-2 * xp.log1p(-uniform[:pairs]))  # Box and Muller's, of 1 − u, which is never 0
        angles = 2 * math.pi * uniform[pairs:]
        stop = min(start + BLOCK, size)
        drawn = xp.concat([lengths * xp.cos(angles), lengths * xp.sin(angles)])
        yield slice(start, stop), drawn[: stop - start]


def seed_of(key: str, round: int, phase: str) -> bytes:
    """The seed of a phase's noise: SHA-256(key | round | phase), of the federation's own ``key``."""
    return hashlib.sha256(f"{key}|{round}|{phase}".encode()).digest()


class Directions:
    """The models or the updates, normalised, as rows for distances."""

    def __init__(self, rows: Rows, of: str):
        self._rows, self._models, self.count = rows, of == "models", rows.count
        squares = rows.zeros(rows.count)
        for _, values in self._values():
            squares += (values * values).sum(1)
        lengths = rows.xp.sqrt(squares)
        self.empty = lengths == 0  # without a direction: at distance 1 of all others
        self._scale = rows.xp.where(self.empty, 0.0, 1 / rows.xp.where(self.empty, 1.0, lengths))

    def _values(self) -> Iterator[tuple[slice, Any]]:
        return self._rows.models() if self._models else self._rows.blocks(clipped=False)

    def blocks(self) -> Iterator[tuple[slice, Any]]:
        for columns, values in self._values():
            yield columns, values * self._scale[:, None]

    def zeros(self, *shape: int) -> Any:
        return self._rows.zeros(*shape)


def flame(rows: Rows, weights: Any, spec: AggregationSpec) -> Combined:
    """The mean of the updates in one cluster of more than half of them, none longer than the median of all lengths.

    FLAME (Nguyen et al., 2022, Algorithm 1) but for its noise, which `Rule` adds. Clusters go by the cosines of the
    models, or of the updates (``flame_of``).
    """
    directions = Directions(rows, spec.flame_of or "models")
    distances = squared_distances(directions)  # of vectors of length 1: twice 1 − cos, in which digits would be lost
    distances[directions.empty, :] = 2.0
    distances[:, directions.empty] = 2.0
    chosen = accepted(distances)
    rows.clip(rows.median_length())
    influence = rows.zeros(rows.count)
    influence[chosen] = 1 / len(chosen)
    return rows.sum(influence), influence
