"""A phase's updates as the rows of a matrix, which robust rules go through in blocks of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from promptfed.shared.methods.core.base import ClientUpdate
from promptfed.shared.tensors import Tensors

BLOCK = 1 << 21  # numbers of a block: 16 MB in float64
NEAR = 1e-4  # a squared distance by the squared lengths: under it, too few of float64's digits are left

Combined = tuple[Tensor, Tensor]
"""An aggregate ``(D,)`` and the influence ``(K,)`` of each row on it."""


class Rows:
    """K updates as the rows of a matrix ``(K, D)``, relative to ``base`` and shortened to ``clip_norm``."""

    def __init__(self, updates: list[ClientUpdate], base: Mapping[str, Tensor], clip_norm: float | str | None):
        self._shapes = {name: tensor.shape for name, tensor in sorted(updates[0].tensors.items())}
        self._sent = torch.stack([_flat(update.tensors, self._shapes) for update in updates])  # (K, D)
        zeros = {name: torch.zeros(shape) for name, shape in self._shapes.items()}
        # What is not part of the state, or of another size, has begun at zero.
        begun = {name: base[name] for name, shape in self._shapes.items() if name in base and base[name].shape == shape}
        self._base = _flat(zeros | begun, self._shapes).double()  # (D,)
        self.count, self.size = self._sent.shape
        self.factors = torch.ones(self.count, dtype=torch.float64)
        if clip_norm is not None:
            self.clip(self.median_length() if clip_norm == "median" else float(clip_norm))

    def blocks(self, clipped: bool = True) -> Iterator[tuple[slice, Tensor]]:
        """The matrix in blocks of columns ``(K, n)``, float64; ``clipped``: as the rules see it, else as sent."""
        width = max(1, BLOCK // self.count)
        for start in range(0, self.size, width):
            columns = slice(start, min(start + width, self.size))
            values = self._sent[:, columns].double() - self._base[columns]
            yield columns, values * self.factors[:, None] if clipped else values

    def median_length(self) -> float:
        """The median of the rows' L2 lengths, as they were sent."""
        return _middle(self.distances_to(torch.zeros_like(self._base)))

    def clip(self, most: float) -> None:
        """Shorten rows that are longer than ``most``."""
        norms = self.distances_to(torch.zeros_like(self._base))
        self.factors = torch.where(norms > most, most / norms, torch.ones_like(norms))

    def models(self) -> Iterator[tuple[slice, Tensor]]:
        """What was sent, base and all, in blocks of columns ``(K, n)``, float64."""
        for columns, values in self.blocks(clipped=False):
            yield columns, values + self._base[columns]

    def row(self, index: int) -> Tensor:
        """Row ``index`` ``(D,)``, relative to the base and clipped."""
        return (self._sent[index].double() - self._base) * self.factors[index]

    def sum(self, weights: Tensor) -> Tensor:
        """``(D,)`` Σ weight·row of ``weights (K,)``."""
        return torch.cat([weights @ values for _, values in self.blocks()])

    def distances_to(self, point: Tensor, clipped: bool = False) -> Tensor:
        """``(K,)`` L2 distances of the rows to ``point (D,)``."""
        squares = torch.zeros(self.count, dtype=torch.float64)
        for columns, values in self.blocks(clipped):
            squares += (values - point[columns]).square().sum(1)
        return squares.sqrt()

    def products_at(self, point: Tensor) -> Tensor:
        """``(K, K)`` products of the rows, as seen from ``point (D,)``."""
        products = torch.zeros(self.count, self.count, dtype=torch.float64)
        for columns, values in self.blocks():
            seen = values - point[columns]
            products += seen @ seen.T
        return products

    def tensors(self, point: Tensor) -> Tensors:
        """``point (D,)`` as tensors of the updates' shapes, float32, where the base is added again."""
        whole, tensors, start = (self._base + point).float(), {}, 0
        for name, shape in self._shapes.items():
            tensors[name] = whole[start : start + shape.numel()].reshape(shape).clone()
            start += shape.numel()
        return tensors


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
