"""Averages of products B·A, which averages of A and of B are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.tensors import Tensors


def product_sums(sums: Tensors, towers: Iterable[str], update: pf.ClientUpdate) -> None:
    """Adds an update's weighted products ``(k, q, d, d)`` to ``sums``, by tower, matrix by matrix."""
    for tower in towers:
        a, b = update.tensors[f"{tower}_a"], update.tensors[f"{tower}_b"]
        if tower not in sums:
            sums[tower] = torch.zeros(*a.shape[:2], a.shape[-1], a.shape[-1])
        for whole, own_a, own_b in zip(sums[tower].flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1), strict=True):
            whole.addmm_(own_b.float(), own_a.float(), alpha=update.weight)


def relative_error(towers: Iterable[str], factors: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> float:
    """‖B·A − sum‖/‖sum‖ over all matrices of both towers; 0 where nothing has changed."""
    off = length = 0.0
    for tower in towers:
        a, b = factors[f"{tower}_a"].flatten(0, 1), factors[f"{tower}_b"].flatten(0, 1)
        for whole, own_a, own_b in zip(sums[tower].flatten(0, 1), a, b, strict=True):
            off += float((own_b @ own_a - whole).double().square().sum())
            length += float(whole.double().square().sum())
    return (off / length) ** 0.5 if length > 0 else 0.0


def best_of_rank(tower: str, updates: Sequence[pf.ClientUpdate], rank: int) -> Tensors:
    """Factors A and B of ``rank`` whose products are the nearest to the weighted mean of the updates' products.

    The mean is (stacked w·B)(stacked A): after a QR of either its singular vectors are those of a small core. Of each
    left one the largest entry is positive.
    """
    kind_a, kind_b = f"{tower}_a", f"{tower}_b"
    shape = updates[0].tensors[kind_a].shape
    made: Tensors = {kind_a: torch.empty(shape), kind_b: torch.empty(updates[0].tensors[kind_b].shape)}
    total = sum(update.weight for update in updates)
    for place in range(shape[0]):
        for matrix in range(shape[1]):
            left = torch.cat([u.tensors[kind_b][place, matrix].double() * (u.weight / total) for u in updates], dim=1)
            right = torch.cat([u.tensors[kind_a][place, matrix].double() for u in updates], dim=0)
            made[kind_b][place, matrix], made[kind_a][place, matrix] = _factored(left, right, rank)
    return made


def _factored(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B ``(d, rank)`` and A ``(rank, d)`` nearest to left·right."""
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, sizes, v = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    u, v = q_left @ u[:, :rank], v[:rank] @ q_right.T
    signs = u.gather(0, u.abs().argmax(dim=0, keepdim=True)).sign().squeeze(0)
    root = sizes[:rank].sqrt()
    return u * signs * root, v * signs[:, None] * root[:, None]
