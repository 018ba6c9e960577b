"""A text tower as a function of weights, for whole texts. Notation: `C` texts, `S` rows of each, `d` = d_t."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from promptfed.shared.clip.towers.blocks import is_standard_block
from promptfed.shared.clip.towers.functional import (
    Tower,
    Weights,
    expect,
    layer_norm,
    linear,
    open_clip_block,
    shape_of_blocks,
    weights_of,
)
from promptfed.shared.clip.towers.text import TextTower


@dataclass(frozen=True)
class FunctionalText(Tower):
    """A text tower. ``short``: it pools an end token under a causal mask, so that no position after the longest text's
    end is computed. ``ends_of`` and ``mask_of``: see `ends` and `mask`.
    """

    dtype: torch.dtype
    short: bool
    ends_of: Callable[[Tensor], Tensor]
    mask_of: Callable[[Tensor], Tensor | None]

    @property
    def causal(self) -> bool:
        return self.short

    def ends(self, ids: Tensor) -> Tensor:
        """Positions `(C,)` whose output is the feature of each text, for ids `(C, L)`; counted from the end if < 0."""
        return self.ends_of(ids)

    def mask(self, ids: Tensor) -> Tensor | None:
        """What is added to the scores of attention for ids `(C, L)`, beside a causal mask of `short` towers."""
        return self.mask_of(ids)

    def rows(self, weights: Weights, ids: Tensor) -> Tensor:
        """Rows `(C, S, d)` before the first block, of token ids `(C, L)`, up to the longest text's end."""
        embedding = weights["token_embedding"]
        size = int(self.ends(ids).max()) + 1 if self.short else ids.shape[1]
        rows = embedding[ids[:, :size].to(embedding.device)].to(self.dtype)
        if "cls_emb" in weights:
            last = weights["cls_emb"].to(self.dtype).expand(len(rows), 1, -1)
            rows = torch.cat([rows, last], dim=1)
        return rows + weights["positional_embedding"][: rows.shape[1]].to(self.dtype)

    def pool(self, weights: Weights, rows: Tensor, ends: Tensor) -> Tensor:
        """Features `(C, d_e)`, not normalised, from the last block's rows and `ends (C,)`."""
        pooled = rows[torch.arange(len(rows), device=rows.device), ends.to(rows.device)]
        pooled = layer_norm(pooled, weights["ln_final_weight"], weights.get("ln_final_bias"), self.blocks_shape.eps)
        if "text_projection" not in weights:
            return pooled
        return linear(pooled, weights["text_projection"], weights.get("text_projection_bias"))

    def encode(self, weights: Weights, ids: Tensor) -> Tensor:
        """Features `(C, d_e)`, not normalised, of token ids `(C, L)`."""
        rows = self.blocks(weights, self.rows(weights, ids), mask=self.mask(ids))
        return self.pool(weights, rows, self.ends(ids))


def text_tower(tower: TextTower) -> FunctionalText:
    """The text tower of an open_clip model. BackboneError gives the reason if its weights cannot be replaced."""
    tower.require()
    holder, flags = tower.holder, tower.flags
    standard_blocks = all(is_standard_block(block) for block in tower.blocks)
    expect("text", standard_blocks, "its blocks are not open_clip's standard ones")
    shape = shape_of_blocks("text", tower.blocks, {holder.ln_final.eps})
    weights: dict[str, Tensor] = {
        "token_embedding": holder.token_embedding.weight.detach(),
        "positional_embedding": holder.positional_embedding.detach(),
        **weights_of(holder, {"ln_final": "ln_final"}),
    }
    projection = holder.text_projection
    if isinstance(projection, nn.Linear):
        weights["text_projection"] = projection.weight.detach()
        if projection.bias is not None:
            weights["text_projection_bias"] = projection.bias.detach()
    elif projection is not None:
        weights["text_projection"] = projection.detach().T
    for number, standard in enumerate(tower.blocks):
        weights |= open_clip_block(number, standard)
    if getattr(holder, "cls_emb", None) is not None:
        weights["cls_emb"] = holder.cls_emb.detach()
    heads = shape.heads

    def mask_of(ids: Tensor) -> Tensor | None:
        with torch.no_grad():
            mask: Tensor | None = None if flags.short else tower.constant_rows(ids)[1]
        return mask if mask is None or mask.ndim == 2 else mask.reshape(len(ids), heads, *mask.shape[1:])

    def ends_of(ids: Tensor) -> Tensor:
        ends = tower.pooled_position(ids)
        return torch.zeros_like(ends) if tower.pool_type == "first" and "cls_emb" not in weights else ends

    return FunctionalText(shape, weights, tower.dtype, flags.short, ends_of, mask_of)
