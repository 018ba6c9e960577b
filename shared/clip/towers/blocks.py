"""open_clip's standard residual attention block, computed in parts: for some rows, or with changes of low rank."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from promptfed.shared.tensors.transfer import sent_to

QUERIES, KEYS_VALUES, ALL = slice(0, 1), slice(1, 3), slice(0, 3)  # parts of a block's input projection
OUTPUT = 3  # the place of the output's matrix, behind query, key and value


@dataclass(frozen=True)
class LowRank:
    """Changes of rank r to one block's attention: W + scale·B·A for query, key, value and, with q = 4, the output.

    ``a (q, r, d)``, ``b (q, d, r)``. With ``dropout`` each matrix has its own mask, drawn from ``draws``.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0
    draws: Generator | None = None

    def branch(self, index: int, rows: Tensor) -> Tensor:
        """`scale·drop(x)·Aᵀ·Bᵀ` of matrix ``index`` for rows `(..., d)`."""
        if self.dropout:
            kept = sent_to(torch.rand(rows.shape, generator=self.draws), rows.device) >= self.dropout
            rows = rows * kept / (1 - self.dropout)
        return F.linear(F.linear(rows, self.a[index].to(rows.dtype)), self.b[index].to(rows.dtype)) * self.scale

    def change(self) -> Tensor:
        """`(q, d, d)` scale·B·A, which can be added to the weights if there is no dropout."""
        return self.scale * (self.b @ self.a)


def is_standard_block(block: Any) -> bool:
    """Whether a block is open_clip's default block, which the functions below require."""
    from open_clip.transformer import ResidualAttentionBlock

    return type(block) is ResidualAttentionBlock and _is_standard_attention(block.attn)


def _is_standard_attention(attention: nn.MultiheadAttention) -> bool:
    return (
        attention.in_proj_weight is not None
        and attention.bias_k is None
        and not attention.add_zero_attn
        and attention.batch_first
        and attention.dropout == 0.0
    )


def project(block: Any, normed: Tensor, parts: slice = ALL) -> Tensor:
    """Queries (0), keys (1) and values (2) of normed rows, as in parts: `(..., d)` -> `(..., len(parts) * d)`."""
    weight, bias = block.attn.in_proj_weight, block.attn.in_proj_bias
    if parts != ALL:  # the gradient of a slice would be a copy
        d = normed.shape[-1]
        rows = slice(parts.start * d, parts.stop * d)
        weight, bias = weight[rows], None if bias is None else bias[rows]
    return F.linear(normed, weight, bias)


def add_branches(block: Any, rows: Tensor, attended: Tensor, low_rank: LowRank | None = None) -> Tensor:
    """The part of the block after attention, `(..., d)`: output projection, then the MLP."""
    out = block.attn.out_proj(attended)
    if low_rank is not None and len(low_rank.a) > OUTPUT:
        out = out + low_rank.branch(OUTPUT, attended)
    rows = rows + block.ls_1(out)
    result: Tensor = rows + block.ls_2(block.mlp(_normed(block.ln_2, rows)))
    return result


def run_block(
    block: Any,
    rows: Tensor,
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
    first_only: bool = False,
    low_rank: LowRank | None = None,
) -> Tensor:
    """The block itself on rows `(B, S, d)`, in fewer operations: torch's attention moves the batch to the middle.

    ``first_only``: the output for row 0 only, `(B, 1, d)`.
    """
    normed = _normed(block.ln_1, rows)
    asking, kept = (normed[:, :1], rows[:, :1]) if first_only else (normed, rows)
    if first_only:
        parts = [project(block, asking, QUERIES), *project(block, normed, KEYS_VALUES).chunk(2, dim=-1)]
    else:
        parts = list(project(block, normed).chunk(3, dim=-1))
    if low_rank is not None:
        given = enumerate(zip(parts, (asking, normed, normed), strict=True))
        parts = [part + low_rank.branch(index, own) for index, (part, own) in given]
    query, key, value = (_heads(part, block.attn.num_heads) for part in parts)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=causal)
    return add_branches(block, kept, attended.transpose(1, 2).flatten(2), low_rank)


def _normed(norm: Any, rows: Tensor) -> Tensor:
    """Half precision in float32: under autocast on a CPU a norm would sum its gradients in it."""
    half = rows.dtype in (torch.float16, torch.bfloat16)
    result: Tensor = norm(rows.float()).to(rows.dtype) if half else norm(rows)
    return result


def _heads(rows: Tensor, heads: int) -> Tensor:
    """`(B, R, d)` -> `(B, heads, R, d / heads)`."""
    batch, count, width = rows.shape
    return rows.reshape(batch, count, heads, width // heads).transpose(1, 2)
