"""Parts of open_clip's standard residual attention block, for computations that skip parts of it for some rows."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

QUERIES, KEYS_VALUES, ALL = slice(0, 1), slice(1, 3), slice(0, 3)  # parts of a block's input projection


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
    d = normed.shape[-1]
    weight, bias = block.attn.in_proj_weight, block.attn.in_proj_bias
    rows = slice(parts.start * d, parts.stop * d)
    return F.linear(normed, weight[rows], None if bias is None else bias[rows])


def add_branches(block: Any, rows: Tensor, attended: Tensor) -> Tensor:
    """The part of the block after attention, `(..., d)`: output projection, then the MLP."""
    rows = rows + block.ls_1(block.attn.out_proj(attended))
    result: Tensor = rows + block.ls_2(block.mlp(block.ln_2(rows)))
    return result


def whole(block: Any, rows: Tensor, attn_mask: Tensor) -> Tensor:
    """The block itself on rows `(B, S, d)`, in fewer operations: torch's attention moves the batch to the middle."""
    query, key, value = (
        _heads(part, block.attn.num_heads) for part in project(block, block.ln_1(rows)).chunk(3, dim=-1)
    )
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
    return add_branches(block, rows, attended.transpose(1, 2).flatten(2))


def first_row(block: Any, rows: Tensor) -> Tensor:
    """The block's output for row 0 only, `(B, S, d)` -> `(B, 1, d)`, without a mask."""
    heads = block.attn.num_heads
    normed = block.ln_1(rows)
    query = _heads(project(block, normed[:, :1], QUERIES), heads)
    key, value = project(block, normed, KEYS_VALUES).chunk(2, dim=-1)
    attended = F.scaled_dot_product_attention(query, _heads(key, heads), _heads(value, heads))
    return add_branches(block, rows[:, :1], attended.transpose(1, 2).flatten(2))


def _heads(rows: Tensor, heads: int) -> Tensor:
    """`(B, R, d)` -> `(B, heads, R, d / heads)`."""
    batch, count, width = rows.shape
    return rows.reshape(batch, count, heads, width // heads).transpose(1, 2)
