"""The blocks of timm's vision transformers, for rows that prompts follow.

Plain attention ignores the number of rows. EVA's rotary embedding and the relative position bias exist only for the
image's rows: a prompt has no position, so its rotation is the identity and its bias is 0.
Notation: `B` images, `S` rows of each, `n` prompts, `d` the tower's width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def refusal_of(trunk: Any) -> str | None:
    """The reason why a model of timm takes no visual prompts; None if it does."""
    from timm.layers.hybrid_embed import HybridEmbed
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_hybrid import ConvStem
    from timm.models.vision_transformer_relpos import RelPosBlock, VisionTransformerRelPos

    if not isinstance(trunk, (VisionTransformer, Eva, VisionTransformerRelPos)):
        return f"it is a {type(trunk).__name__}, not a plain vision transformer"
    stem = trunk.patch_embed
    if isinstance(stem, HybridEmbed) and not isinstance(stem.backbone, ConvStem):
        return f"it is a hybrid of a transformer and {type(stem.backbone).__name__}"
    if getattr(trunk, "dynamic_img_size", False) or getattr(trunk, "rope_mixed", False):
        return "its positions are unusual"
    if isinstance(trunk, VisionTransformerRelPos) and not all(type(block) is RelPosBlock for block in trunk.blocks):
        return "its blocks are not timm's usual ones with relative positions"
    return None


def rows_of(trunk: Any, images: Tensor) -> Tensor:
    """Rows `(B, S, d)` before the first block, of images `(B, 3, H, W)`."""
    rows: Tensor = trunk.patch_embed(images)
    if hasattr(trunk, "_pos_embed"):
        placed = trunk._pos_embed(rows)
        rows = trunk.norm_pre(placed[0] if isinstance(placed, tuple) else placed)
    elif trunk.cls_token is not None:
        rows = torch.cat([trunk.cls_token.expand(rows.shape[0], -1, -1), rows], dim=1)
    return rows


def is_standard(block: Any) -> bool:
    """Whether a block has the parts of CLIP's: one projection of queries, keys and values, and a plain MLP."""
    from timm.layers.attention import Attention, AttentionRope
    from timm.layers.mlp import Mlp
    from timm.models.eva import EvaBlock
    from timm.models.vision_transformer import Block

    attention = block.attn
    if type(block) is EvaBlock:
        kind = type(attention) is AttentionRope and block.gamma_1 is None and attention.num_kv_groups == 1
    else:
        kind = type(block) is Block and type(attention) is Attention
    parts = [getattr(attention, name, None) for name in ("q_norm", "k_norm", "norm", "gate")] + [block.mlp.norm]
    joined = isinstance(getattr(attention, "qkv", None), nn.Linear) and type(block.mlp) is Mlp
    return kind and joined and all(part is None or isinstance(part, nn.Identity) for part in parts)


def rotation(trunk: Any) -> Callable[[Tensor], Tensor] | None:
    """The rotary embedding of queries and keys `(B, heads, S, d / heads)` of an image; None where there is none."""
    from timm.layers.pos_embed_sincos import apply_rot_embed_cat

    embedding = rotary_of(trunk)
    if embedding is None:
        return None
    kept, half = trunk.num_prefix_tokens, getattr(trunk.blocks[0].attn, "rotate_half", False)

    def rotate(rows: Tensor) -> Tensor:
        turned = apply_rot_embed_cat(rows[:, :, kept:], embedding, half=half)
        return torch.cat([rows[:, :, :kept], turned], dim=2).type_as(rows)

    return rotate


def rotary_of(trunk: Any) -> Tensor | None:
    """Sines and cosines for the patches; None where positions are not rotary."""
    rope = getattr(trunk, "rope", None)
    if rope is None:
        return None
    embedding: Tensor = (
        rope.get_embed() if hasattr(rope, "feat_shape") else rope.get_embed(shape=trunk.patch_embed.grid_size)
    )
    return embedding


def blocks_for(trunk: Any, n: int) -> Sequence[Callable[[Tensor], Tensor]]:
    """The tower's blocks for rows `(B, S + n, d)`, of which the last n are prompts."""
    if hasattr(trunk, "shared_rel_pos"):
        return [partial(_relative_block, block, trunk.shared_rel_pos) for block in trunk.blocks]
    embedding = rotary_of(trunk)
    if embedding is None:
        return list(trunk.blocks)
    half = embedding.shape[-1] // 2
    still = torch.cat([embedding.new_zeros(n, half), embedding.new_ones(n, half)], dim=-1)  # sine 0 and cosine 1
    return [partial(block, rope=torch.cat([embedding, still])) for block in trunk.blocks]


def _relative_block(block: Any, shared: Any, rows: Tensor) -> Tensor:
    """A block of `VisionTransformerRelPos` whose bias is 0 for rows beyond the image's."""
    position = block.attn.rel_pos if block.attn.rel_pos is not None else shared
    bias = position.get_bias()
    extra = rows.shape[1] - bias.shape[-1]
    attended = _attention(block.attn, block.norm1(rows), F.pad(bias, (0, extra, 0, extra)))
    rows = rows + block.ls1(attended)
    result: Tensor = rows + block.ls2(block.mlp(block.norm2(rows)))
    return result


def _attention(attention: Any, rows: Tensor, bias: Tensor) -> Tensor:
    batch, count, width = rows.shape
    projected = attention.qkv(rows).reshape(batch, count, 3, attention.num_heads, attention.head_dim)
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(
        attention.q_norm(query), attention.k_norm(key), value, attn_mask=bias.to(value.dtype)
    )
    result: Tensor = attention.proj(mixed.transpose(1, 2).reshape(batch, count, width))
    return result
