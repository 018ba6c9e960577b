"""A phase's updates as rows of a matrix, which robust rules process in blocks of columns; norms of changes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np

from promptfed.shared.methods.core.interface import ClientUpdate
from promptfed.shared.tensors import LARGE, Arrays, Room, Shape, chunks, size_of, sum_of_squares
from promptfed.shared.tensors.arrays import double, in_namespace, namespace, single

BLOCK = 1 << 21  # numbers of a block: 16 MB in float64
NEAR = 1e-4  # a squared distance by the squared lengths: under it, too few of float64's digits are left

Values = dict[str, Any]
"""Tensors by name, numpy's or torch's."""

Combined = tuple[Any, Any]
"""An aggregate ``(D,)`` and the influence ``(K,)`` of each row on it."""

FAR = 10.0  # times the median of a phase's changes: no honest client is so far from the others
LEAST = 3  # updates: of two, nobody can say which is far from the other


class Rows:
    """K updates as the rows of a matrix ``(K, D)``, relative to ``base`` and shortened to ``clip_norm``.

    Small ones are held once, in float32. Large ones (`LARGE` bytes each) stay where they are mapped from, and every
    block is gathered from there; vectors ``(D,)`` lie in ``room``. The blocks are the same, and so are all bits.
    """

    def __init__(
        self, updates: list[ClientUpdate], base: Mapping[str, Any], clip_norm: float | str | None, room: Room = np.empty
    ):
        shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in sorted(updates[0].tensors.items())}
        self._shapes, self._room = shapes, room
        self.xp = namespace(next(iter(updates[0].tensors.values())))
        # What is not part of the state, or of another size, has begun at zero.
        begun = {name: base[name] for name, shape in shapes.items() if name in base and base[name].shape == shape}
        self.count, self.size = len(updates), sum(map(math.prod, shapes.values()))
        self._read: Callable[[int, int], Any]  # (K, n) columns as they were sent, float32
        self._read_base: Callable[[int, int], Any]  # (n,) of them, float64
        if size_of(updates[0].tensors) < LARGE:
            sent = self.xp.stack([self._flat(update.tensors) for update in updates])
            zeros = {name: self.xp.zeros(shape, dtype=self.xp.float32) for name, shape in shapes.items()}
            flat = double(self._flat(zeros | begun))
            self._read = lambda start, stop: sent[:, start:stop]
            self._read_base = lambda start, stop: flat[start:stop]
        else:
            laid = [_Laid(update.tensors, shapes, self.xp) for update in updates]
            below = _Laid(begun, shapes, self.xp)
            self._read = lambda start, stop: self.xp.stack([row.part(start, stop) for row in laid])
            self._read_base = lambda start, stop: double(below.part(start, stop))
        self.factors = self.xp.ones(self.count, dtype=self.xp.float64)
        if clip_norm is not None:
            self._clip(self._median_length() if clip_norm == "median" else float(clip_norm))

    def _flat(self, tensors: Mapping[str, Any]) -> Any:
        return self.xp.concat([single(tensors[name]).reshape(-1) for name in self._shapes])

    def blocks(self, clipped: bool = True) -> Iterator[tuple[slice, Any]]:
        """The matrix in blocks of columns ``(K, n)``, float64; ``clipped``: as the rules see it, else as sent."""
        for columns in self._columns(max(1, BLOCK // self.count)):
            values = double(self._read(columns.start, columns.stop)) - self._read_base(columns.start, columns.stop)
            yield columns, values * self.factors[:, None] if clipped else values

    def _columns(self, width: int) -> Iterator[slice]:
        for start in range(0, self.size, width):
            yield slice(start, min(start + width, self.size))

    def vector(self) -> Any:
        """Allocate a vector ``(D,)`` in float64."""
        return in_namespace(self.xp, self._room((self.size,), dtype=np.float64))

    def zeros(self, *shape: int) -> Any:
        """Zeros in float64."""
        return self.xp.zeros(shape, dtype=self.xp.float64)

    def _median_length(self) -> float:
        """The median of the rows' L2 lengths, as they were sent; of an even number, the mean of the middle two."""
        ordered = sorted(self.distances_to(None).tolist())
        return float((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)

    def _clip(self, most: float) -> None:
        """Shorten rows that are longer than ``most``."""
        norms = self.distances_to(None)
        longer = norms > most
        self.factors = self.xp.where(longer, most / self.xp.where(longer, norms, 1.0), 1.0)

    def row(self, index: int) -> Any:
        """Row ``index`` ``(D,)``, relative to the base and clipped."""
        row = self.vector()
        for columns, values in self.blocks():
            row[columns] = values[index]
        return row

    def sum(self, weights: Any) -> Any:
        """``(D,)`` Σ weight·row of ``weights (K,)``."""
        return self.combined(lambda values: weights @ values)

    def combined(self, make: Callable[[Any], Any]) -> Any:
        """``(D,)``: the results ``(n,)`` of ``make`` on each block ``(K, n)``."""
        combined = self.vector()
        for columns, values in self.blocks():
            combined[columns] = make(values)
        return combined

    def distances_to(self, point: Any | None) -> Any:
        """``(K,)`` L2 distances of the rows as they were sent to ``point (D,)``; None: to zero."""
        squares = self.zeros(self.count)
        for columns, values in self.blocks(clipped=False):
            away = values if point is None else values - point[columns]
            squares += (away * away).sum(1)
        return self.xp.sqrt(squares)

    def tensors(self, point: Any) -> Values:
        """``point (D,)`` as tensors of the updates' shapes, float32, with the base added."""
        tensors, start = {}, 0
        for name, shape in self._shapes.items():
            tensors[name] = in_namespace(self.xp, self._room(shape, dtype=np.float32))
            flat = tensors[name].reshape(-1)
            for first in range(0, len(flat), BLOCK):
                last = min(first + BLOCK, len(flat))
                flat[first:last] = self._read_base(start + first, start + last) + point[start + first : start + last]
            start += len(flat)
        return tensors


class _Laid:
    """Tensors in files, as one vector. Only requested entries are read; missing tensors are zeros."""

    def __init__(self, tensors: Mapping[str, Any], shapes: Mapping[str, Shape], xp: Any):
        self._xp = xp
        self._tensors: list[Any | None] = []
        self._ends: list[int] = []
        end = 0
        for name, shape in shapes.items():
            end += math.prod(shape)
            self._tensors.append(tensors[name].reshape(-1) if name in tensors else None)
            self._ends.append(end)

    def part(self, start: int, stop: int) -> Any:
        """``(stop - start,)`` entries, at least one, float32."""
        parts, at, xp = [], start, self._xp
        for index in range(bisect_right(self._ends, start), len(self._ends)):
            tensor, end = self._tensors[index], self._ends[index]
            upto, offset = min(stop, end), (self._ends[index - 1] if index else 0)
            if tensor is None:
                parts.append(xp.zeros(upto - at, dtype=xp.float32))
            else:
                parts.append(single(tensor[at - offset : upto - offset]))
            at = upto
            if at == stop:
                break
        return parts[0] if len(parts) == 1 else xp.concat(parts)


def squared_distances(rows: Rows) -> Any:
    """``(K, K)`` ‖x_i − x_j‖² as ‖x_i‖² + ‖x_j‖² − 2·⟨x_i, x_j⟩: one product of matrices, a tenth of the time.

    Where the terms cancel, digits are lost: pairs much nearer to each other than to zero are computed from their
    difference instead. The relative error stays under 1e-9, and equal rows are at exactly zero.
    """
    products = rows.zeros(rows.count, rows.count)
    for _, values in rows.blocks():
        products += values @ values.T
    norms, xp = products.diagonal(), namespace(products)
    sums = norms[:, None] + norms
    squares = xp.triu(sums - 2 * products, 1)
    first, second = np.nonzero(np.triu(np.asarray(squares < NEAR * sums), 1))
    squares[first, second] = 0.0
    for _, values in rows.blocks():
        width = max(1, BLOCK // values.shape[1])
        for start in range(0, len(first), width):
            i, j = first[start : start + width], second[start : start + width]
            apart = values[i] - values[j]
            squares[i, j] += (apart * apart).sum(1)
    return squares + squares.T


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
    """Pass the updates on one by one, and store the norm of each change in ``norms`` by client, unless it is known."""
    for update in updates:
        if update.client not in norms:
            norms[update.client] = change_norm(update.tensors, payload_of(update.client))
        yield update


def far_off(norms: Mapping[str, float]) -> dict[str, float]:
    """Ratios to the median of the changes that are over ``FAR`` times the median; empty for too few clients."""
    if len(norms) < LEAST:
        return {}
    middle = median(norms.values())
    return {name: size / middle for name, size in norms.items() if middle > 0 and size > FAR * middle}
