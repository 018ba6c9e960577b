"""A text tower as a function of weights, for whole texts. Notation: `C` texts, `S` rows of each, `d` = d_t."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
    """A tower that pools an end token under a causal mask. Positions after the longest text's end are not computed."""

    dtype: torch.dtype
    ends_of: Callable[[Tensor], Tensor]

    causal = True

    def ends(self, ids: Tensor) -> Tensor:
        """Positions `(C,)` whose output is the feature of each text, for ids `(C, L)`."""
        return self.ends_of(ids)

    def rows(self, weights: Weights, ids: Tensor) -> Tensor:
        """Rows `(C, S, d)` before the first block, of token ids `(C, L)`, up to the longest text's end."""
        embedding = weights["token_embedding"]
        size = int(self.ends(ids).max()) + 1
        rows = embedding[ids[:, :size].to(embedding.device)].to(self.dtype)
        return rows + weights["positional_embedding"][:size].to(self.dtype)

    def pool(self, weights: Weights, rows: Tensor, ends: Tensor) -> Tensor:
        """Features `(C, d_e)`, not normalised, from the last block's rows and `ends (C,)`."""
        pooled = rows[torch.arange(len(rows), device=rows.device), ends.to(rows.device)]
        pooled = layer_norm(pooled, weights["ln_final_weight"], weights.get("ln_final_bias"), self.blocks_shape.eps)
        if "text_projection" not in weights:
            return pooled
        return linear(pooled, weights["text_projection"], weights.get("text_projection_bias"))

    def encode(self, weights: Weights, ids: Tensor) -> Tensor:
        """Features `(C, d_e)`, not normalised, of token ids `(C, L)`."""
        return self.pool(weights, self.blocks(weights, self.rows(weights, ids)), self.ends(ids))


def text_tower(tower: TextTower) -> FunctionalText:
    """The text tower of an open_clip model. BackboneError gives the reason if its weights cannot be replaced."""
    tower.require()
    expect("text", tower.flags.prefix, "its blocks, its mask or its pooling are not CLIP's")
    holder = tower.holder
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
    return FunctionalText(shape, weights, tower.dtype, tower.pooled_position)
