"""A phase's updates as the rows of a matrix, which robust rules process in blocks of columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from promptfed.shared.methods.core.interface.base import ClientUpdate
from promptfed.shared.methods.core.sizes import LARGE
from promptfed.shared.tensors import Shape, Tensors, size_of

BLOCK = 1 << 21  # numbers of a block: 16 MB in float64
NEAR = 1e-4  # a squared distance by the squared lengths: under it, too few of float64's digits are left

Combined = tuple[Tensor, Tensor]
"""An aggregate ``(D,)`` and the influence ``(K,)`` of each row on it."""


class Room(Protocol):
    """Allocates a tensor of a shape, in memory (``torch.empty``) or in a file."""

    def __call__(self, size: Shape, /, *, dtype: torch.dtype = torch.float32) -> Tensor: ...


class Rows:
    """K updates as the rows of a matrix ``(K, D)``, relative to ``base`` and shortened to ``clip_norm``.

    Small ones are held once, in float32. Large ones (`LARGE` bytes each) stay where they are mapped from, and every
    block is gathered from there; vectors ``(D,)`` lie in ``room``. The blocks are the same, and so are all bits.
    """

    def __init__(
        self,
        updates: list[ClientUpdate],
        base: Mapping[str, Tensor],
        clip_norm: float | str | None,
        room: Room = torch.empty,
    ):
        self._shapes = {name: tensor.shape for name, tensor in sorted(updates[0].tensors.items())}
        self._room = room
        # What is not part of the state, or of another size, has begun at zero.
        begun = {name: base[name] for name, shape in self._shapes.items() if name in base and base[name].shape == shape}
        self.count, self.size = len(updates), sum(shape.numel() for shape in self._shapes.values())
        self._read: Callable[[int, int], Tensor]  # (K, n) columns as they were sent, float32
        self._read_base: Callable[[int, int], Tensor]  # (n,) of them, float64
        if size_of(updates[0].tensors) < LARGE:
            sent = torch.stack([_flat(update.tensors, self._shapes) for update in updates])
            zeros = {name: torch.zeros(shape) for name, shape in self._shapes.items()}
            flat = _flat(zeros | begun, self._shapes).double()
            self._read = lambda start, stop: sent[:, start:stop]
            self._read_base = lambda start, stop: flat[start:stop]
        else:
            laid = [_Laid(update.tensors, self._shapes) for update in updates]
            below = _Laid(begun, self._shapes)
            self._read = lambda start, stop: torch.stack([row.part(start, stop) for row in laid])
            self._read_base = lambda start, stop: below.part(start, stop).double()
        self.factors = torch.ones(self.count, dtype=torch.float64)
        if clip_norm is not None:
            self.clip(self.median_length() if clip_norm == "median" else float(clip_norm))

    def blocks(self, clipped: bool = True) -> Iterator[tuple[slice, Tensor]]:
        """The matrix in blocks of columns ``(K, n)``, float64; ``clipped``: as the rules see it, else as sent."""
        for columns in self._columns(max(1, BLOCK // self.count)):
            values = self._read(columns.start, columns.stop).double() - self._read_base(columns.start, columns.stop)
            yield columns, values * self.factors[:, None] if clipped else values

    def _columns(self, width: int) -> Iterator[slice]:
        for start in range(0, self.size, width):
            yield slice(start, min(start + width, self.size))

    def vector(self) -> Tensor:
        """Allocate a vector ``(D,)`` in float64."""
        return self._room((self.size,), dtype=torch.float64)

    def median_length(self) -> float:
        """The median of the rows' L2 lengths, as they were sent."""
        return _middle(self.distances_to(None))

    def clip(self, most: float) -> None:
        """Shorten rows that are longer than ``most``."""
        norms = self.distances_to(None)
        self.factors = torch.where(norms > most, most / norms, torch.ones_like(norms))

    def models(self) -> Iterator[tuple[slice, Tensor]]:
        """The updates as sent, including the base, in blocks of columns ``(K, n)``, float64."""
        for columns, values in self.blocks(clipped=False):
            yield columns, values + self._read_base(columns.start, columns.stop)

    def row(self, index: int) -> Tensor:
        """Row ``index`` ``(D,)``, relative to the base and clipped."""
        row = self.vector()
        for columns, values in self.blocks():
            row[columns] = values[index]
        return row

    def sum(self, weights: Tensor) -> Tensor:
        """``(D,)`` Σ weight·row of ``weights (K,)``."""
        return self.combined(lambda values: weights @ values)

    def combined(self, make: Callable[[Tensor], Tensor]) -> Tensor:
        """``(D,)``: the results ``(n,)`` of ``make`` on each block ``(K, n)``."""
        combined = self.vector()
        for columns, values in self.blocks():
            combined[columns] = make(values)
        return combined

    def distances_to(self, point: Tensor | None, clipped: bool = False) -> Tensor:
        """``(K,)`` L2 distances of the rows to ``point (D,)``; None: to zero."""
        squares = torch.zeros(self.count, dtype=torch.float64)
        for columns, values in self.blocks(clipped):
            squares += (values if point is None else values - point[columns]).square().sum(1)
        return squares.sqrt()

    def products_at(self, point: Tensor) -> Tensor:
        """``(K, K)`` products of the rows, as seen from ``point (D,)``."""
        products = torch.zeros(self.count, self.count, dtype=torch.float64)
        for columns, values in self.blocks():
            seen = values - point[columns]
            products += seen @ seen.T
        return products

    def tensors(self, point: Tensor) -> Tensors:
        """``point (D,)`` as tensors of the updates' shapes, float32, with the base added."""
        tensors, start = {}, 0
        for name, shape in self._shapes.items():
            tensors[name] = self._room(tuple(shape))
            for part in torch.split(tensors[name].view(-1), BLOCK):
                stop = start + len(part)
                part.copy_(self._read_base(start, stop) + point[start:stop])
                start = stop
        return tensors


class _Laid:
    """Tensors in files, as one vector. Only requested entries are read; missing tensors are zeros."""

    def __init__(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]):
        self._tensors: list[Tensor | None] = []
        self._ends: list[int] = []
        end = 0
        for name, shape in shapes.items():
            end += shape.numel()
            self._tensors.append(tensors[name].reshape(-1) if name in tensors else None)
            self._ends.append(end)

    def part(self, start: int, stop: int) -> Tensor:
        """``(stop - start,)`` entries, float32."""
        parts, at = [], start
        for index in range(bisect_right(self._ends, start), len(self._ends)):
            tensor, end = self._tensors[index], self._ends[index]
            upto, offset = min(stop, end), (self._ends[index - 1] if index else 0)
            parts.append(torch.zeros(upto - at) if tensor is None else tensor[at - offset : upto - offset].float())
            at = upto
            if at == stop:
                break
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(0)


def _flat(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([tensors[name].float().reshape(-1) for name in names])


def _middle(values: Tensor) -> float:
    """The median; of an even number, the mean of the middle two."""
    ordered = values.sort().values
    return float((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)


class Vectors(Protocol):
    """K vectors, in blocks of columns ``(K, n)``, float64."""

    count: int

    def blocks(self) -> Iterator[tuple[slice, Tensor]]: ...


def squared_distances(rows: Vectors) -> Tensor:
    """``(K, K)`` ‖x_i − x_j‖² as ‖x_i‖² + ‖x_j‖² − 2·⟨x_i, x_j⟩: one product of matrices, a tenth of the time.

    Where the terms cancel, digits are lost: pairs much nearer to each other than to zero are computed from their
    difference instead. The relative error stays under 1e-9, and equal rows are at exactly zero.
    """
    products = torch.zeros(rows.count, rows.count, dtype=torch.float64)
    for _, values in rows.blocks():
        products += values @ values.T
    norms = products.diagonal()
    sums = norms[:, None] + norms
    squares = (sums - 2 * products).triu(1)
    first, second = (squares < NEAR * sums).triu(1).nonzero(as_tuple=True)
    squares[first, second] = 0.0
    for _, values in rows.blocks():
        for some in torch.split(torch.arange(len(first)), max(1, BLOCK // values.shape[1])):
            i, j = first[some], second[some]
            squares[i, j] += (values[i] - values[j]).square().sum(1)
    return squares + squares.T
