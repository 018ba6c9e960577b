"""A transformer block and its tower as functions of weights, for methods that train or change tower weights.

Clients of one process share a backbone over threads. Therefore weights are never put into a module, not even
temporarily: each computation receives its weights as arguments. Names are open_clip's, with "_" for "."; names of a
block begin with its number: ``3.in_proj_weight``. Notation: `B` images or texts, `S` rows of each, `d` the tower's
width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.sizes import BLOCK_KINDS
from promptfed.shared.tensors.transfer import sent_to

Weights = Mapping[str, Tensor]

QKV = 3


@dataclass(frozen=True)
class BlockShape:
    """The settings of a tower's blocks that are not weights; all blocks of a tower share them."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    eps: float
    activation: nn.Module


@dataclass(frozen=True)
class LowRank:
    """Changes of rank r to one block's attention: W + scale·B·A for the first q of query, key, value and output.

    ``a (q, r, d)``, ``b (q, d, r)``. With ``dropout`` each matrix has its own mask, drawn from ``draws``.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0
    draws: Generator | None = None

    def branch(self, index: int, rows: Tensor) -> Tensor:
        """`scale·drop(x)·Aᵀ·Bᵀ` of matrix ``index`` for rows `(..., d)`; zero for matrices after the first q."""
        if self.dropout:
            kept = sent_to(torch.rand(rows.shape, generator=self.draws), rows.device) >= self.dropout
            rows = rows * kept / (1 - self.dropout)
        return F.linear(F.linear(rows, self.a[index].to(rows.dtype)), self.b[index].to(rows.dtype)) * self.scale

    def change(self) -> Tensor:
        """`(q, d, d)` scale·B·A, which can be added to the weights if there is no dropout."""
        return self.scale * (self.b @ self.a)


def block(weights: Weights, number: int) -> dict[str, Tensor]:
    """The weights of one block, by kind."""
    prefix = f"{number}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def run_block(
    own: Weights,
    shape: BlockShape,
    rows: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    first_only: bool = False,
    low_rank: LowRank | None = None,
) -> Tensor:
    """Run a block with weights ``own`` (by kind) on rows `(B, S, d)`; ``first_only``: only row 0, `(B, 1, d)`."""
    normed = layer_norm(rows, own["ln_1_weight"], own["ln_1_bias"], shape.eps)
    asking, kept = (normed[:, :1], rows[:, :1]) if first_only else (normed, rows)
    query, key, value = _projected(own, shape, asking, normed, first_only, low_rank)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    attended = mixed.transpose(1, 2).flatten(2)
    out = linear(attended, own["out_proj_weight"], own.get("out_proj_bias"))
    if low_rank is not None and len(low_rank.a) > QKV:
        out = out + low_rank.branch(QKV, attended)
    kept = kept + _scaled(out, own.get("ls_1"))
    hidden = layer_norm(kept, own["ln_2_weight"], own["ln_2_bias"], shape.eps)
    hidden = shape.activation(linear(hidden, own["c_fc_weight"], own["c_fc_bias"]))
    return kept + _scaled(linear(hidden, own["c_proj_weight"], own["c_proj_bias"]), own.get("ls_2"))


def _projected(
    own: Weights, shape: BlockShape, asking: Tensor, normed: Tensor, apart: bool, low_rank: LowRank | None
) -> list[Tensor]:
    """Query, key and value, `(B, heads, R, d / heads)` each; ``apart``: the query has different rows."""
    d, weight, bias = shape.width, own["in_proj_weight"], own.get("in_proj_bias")
    if apart:
        parts = [linear(asking, weight[:d], None if bias is None else bias[:d])]
        parts += linear(normed, weight[d:], None if bias is None else bias[d:]).chunk(2, dim=-1)
    else:
        parts = list(linear(normed, weight, bias).chunk(QKV, dim=-1))
    if low_rank is not None:
        for index in range(min(QKV, len(low_rank.a))):
            parts[index] = parts[index] + low_rank.branch(index, asking if index == 0 else normed)
    batch, size = normed.shape[0], d // shape.heads
    return [part.reshape(batch, -1, shape.heads, size).transpose(1, 2) for part in parts]


@dataclass(frozen=True)
class Tower:
    """The computation of a tower, and its frozen ``weights`` in the backbone (not copies: never change them in place).

    Rows are `(B, S, d)`.
    """

    blocks_shape: BlockShape
    weights: Weights

    @property
    def causal(self) -> bool:
        """Whether a row sees only itself and the rows before it."""
        return False

    @property
    def layers(self) -> int:
        """Blocks."""
        return self.blocks_shape.layers

    @property
    def first_only(self) -> bool:
        """Whether only row 0 is read after the last block."""
        return False

    def blocks(
        self,
        weights: Weights,
        rows: Tensor,
        start: int = 0,
        stop: int | None = None,
        *,
        mask: Tensor | None = None,
        low_rank: Mapping[int, LowRank] | None = None,
    ) -> Tensor:
        """Run rows `(B, S, d)` through the blocks from ``start`` up to ``stop`` (default: the last block).

        ``mask``: what is added to the attention's scores, `(S, S)` or `(B, heads, S, S)`. ``low_rank``
        is given by block number. The last block returns only the rows that are read.
        """
        stop = self.layers if stop is None else stop
        for number in range(start, stop):
            rows = run_block(
                block(weights, number),
                self.blocks_shape,
                rows,
                causal=self.causal,
                mask=mask,
                first_only=self.first_only and number == self.layers - 1,
                low_rank=(low_rank or {}).get(number),
            )
        return rows


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer `(..., out)`; weights in another precision are cast to that of the rows."""
    return F.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))


def layer_norm(rows: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm of rows `(..., d)`; half precision is computed in float32, as in open_clip."""
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    own = None if bias is None else bias.to(wide.dtype)
    return F.layer_norm(wide, (rows.shape[-1],), weight.to(wide.dtype), own, eps).to(rows.dtype)


def _scaled(rows: Tensor, gamma: Tensor | None) -> Tensor:
    return rows if gamma is None else rows * gamma.to(rows.dtype)


def shape_of_blocks(tower: str, blocks: list[Any], eps: set[float]) -> BlockShape:
    """The settings shared by open_clip's standard blocks; ``eps`` is that of the tower's other norms.

    Raises:
        BackboneError: the blocks differ.
    """
    first = blocks[0]
    shapes = {
        (
            block.attn.num_heads,
            block.mlp.c_fc.out_features,
            type(block.mlp.gelu),
            getattr(block.mlp.gelu, "approximate", None),
        )
        for block in blocks
    }
    eps = eps | {norm.eps for block in blocks for norm in (block.ln_1, block.ln_2)}
    expect(tower, len(shapes) == 1 and len(eps) == 1, "its blocks differ from each other")
    expect_activation(tower, first.mlp.gelu)
    width = int(first.ln_1.normalized_shape[0])
    return BlockShape(len(blocks), width, first.attn.num_heads, first.mlp.c_fc.out_features, eps.pop(), first.mlp.gelu)


def expect_activation(tower: str, activation: nn.Module) -> None:
    """Raise BackboneError for activations other than GELU and QuickGELU."""
    from open_clip.transformer import QuickGELU
    from timm.layers.activations import GELUTanh

    known = type(activation) in (nn.GELU, QuickGELU, GELUTanh)
    expect(tower, known, f"its blocks have the activation {type(activation).__name__}")


OPEN_CLIP_PARTS = {
    "ln_1": "ln_1",
    "out_proj": "attn.out_proj",
    "ln_2": "ln_2",
    "c_fc": "mlp.c_fc",
    "c_proj": "mlp.c_proj",
}
TIMM_PARTS = {
    "ln_1": "norm1",
    "in_proj": "attn.qkv",
    "out_proj": "attn.proj",
    "ln_2": "norm2",
    "c_fc": "mlp.fc1",
    "c_proj": "mlp.fc2",
}


def open_clip_block(number: int, standard: Any) -> dict[str, Tensor]:
    """The weights of one of open_clip's standard blocks, by name."""
    attention = {"in_proj_weight": standard.attn.in_proj_weight, "in_proj_bias": standard.attn.in_proj_bias}
    return _named(number, attention | weights_of(standard, OPEN_CLIP_PARTS), standard.ls_1, standard.ls_2)


def timm_block(number: int, standard: Any) -> dict[str, Tensor]:
    """The weights of one of timm's standard blocks, under open_clip's names."""
    scales = getattr(standard, "ls1", nn.Identity()), getattr(standard, "ls2", nn.Identity())
    return _named(number, weights_of(standard, TIMM_PARTS), *scales)


def _named(number: int, own: Mapping[str, Tensor | None], first: nn.Module, second: nn.Module) -> dict[str, Tensor]:
    """The weights in the order of `BLOCK_KINDS`, with the layer scales ``first`` and ``second`` if there are any."""
    ordered = {kind: own.get(kind) for kind in BLOCK_KINDS}
    ordered |= {"ls_1": getattr(first, "gamma", None), "ls_2": getattr(second, "gamma", None)}
    return {f"{number}.{kind}": weight.detach() for kind, weight in ordered.items() if weight is not None}


def weights_of(module: nn.Module, parts: Mapping[str, str]) -> dict[str, Tensor]:
    """Weight and bias of each part of a module, as ``NAME_weight`` and ``NAME_bias``; missing ones are left out.

    ``parts``: the part's path in the module, by name.
    """
    weights: dict[str, Tensor] = {}
    for name, path in parts.items():
        part = module.get_submodule(path)
        for kind in ("weight", "bias"):
            weight = getattr(part, kind, None)
            if isinstance(weight, Tensor):
                weights[f"{name}_{kind}"] = weight.detach()
    return weights


def expect(tower: str, right: bool, why: str) -> None:
    """Raise BackboneError with the reason why a tower's weights cannot be changed, unless ``right``."""
    if not right:
        raise BackboneError(f"This backbone's {tower} tower cannot be computed with other weights than its own: {why}.")
