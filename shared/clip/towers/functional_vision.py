"""Image towers as functions of weights, for the vision transformers of open_clip and plain ones of timm.

Weights that a tower lacks are not in the mapping (``ln_pre`` with timm, ``proj`` without a projection). A pooling by
attention and what follows it stay the frozen backbone's.
Notation: `B` images, `S` rows of each with [cls], `d` = d_v the tower's width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from promptfed.shared.clip.towers.blocks import is_standard_block
from promptfed.shared.clip.towers.functional import (
    BlockShape,
    Tower,
    Weights,
    expect,
    expect_activation,
    layer_norm,
    open_clip_block,
    shape_of_blocks,
    timm_block,
    weights_of,
)

Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class VisionTower(Tower):
    """An image tower.

    ``positions``: rows of an image, of which the first ``prefix`` are no patches. ``pooling``: the feature is row 0,
    the mean of the patches, or what the frozen ``attention`` makes of all rows. ``norm_first``: the last norm comes
    before the pooling, not after it. ``frozen_projection``: the projection where it is not computed from weights.
    """

    patch_size: tuple[int, int]
    positions: int
    prefix: int
    pooling: Literal["tok", "avg", "attention"]
    norm_first: bool
    attention: Part | None = None
    frozen_projection: Part | None = None

    @property
    def first_only(self) -> bool:
        return self.pooling == "tok"

    def rows(self, weights: Weights, images: Tensor) -> Tensor:
        """Rows `(B, S, d)` before the first block, of images `(B, 3, H, W)` of the tower's dtype and device."""
        conv, bias = weights["conv1_weight"], weights.get("conv1_bias")
        conv, bias = conv.to(images.dtype), None if bias is None else bias.to(images.dtype)
        rows = F.conv2d(images, conv, bias, stride=self.patch_size).flatten(2).transpose(1, 2)
        if "class_embedding" in weights:
            first = weights["class_embedding"].to(rows.dtype).expand(rows.shape[0], 1, -1)
            rows = torch.cat([first, rows], dim=1)
        rows = rows + weights["positional_embedding"].to(rows.dtype)
        if "ln_pre_weight" not in weights:
            return rows
        return layer_norm(rows, weights["ln_pre_weight"], weights.get("ln_pre_bias"), self.blocks_shape.eps)

    def pool(self, weights: Weights, rows: Tensor) -> Tensor:
        """Pooled features `(B, d)` of the last block's rows, before any projection."""
        if self.pooling == "tok":
            rows = rows[:, :1]  # a norm processes each row separately
        if self.norm_first:
            rows = self._normed(weights, rows)
        if self.attention is not None:
            return self.attention(rows)
        pooled = rows[:, 0] if self.pooling == "tok" else rows[:, self.prefix :].mean(dim=1)
        return pooled if self.norm_first else self._normed(weights, pooled)

    def project(self, weights: Weights, pooled: Tensor) -> Tensor:
        """Features `(B, d_e)` after the projection; unchanged if there is none."""
        if self.frozen_projection is not None:
            return self.frozen_projection(pooled)
        if "proj" not in weights:
            return pooled
        return pooled @ weights["proj"].to(pooled.dtype)

    def encode(self, weights: Weights, images: Tensor, *, projected: bool = True) -> Tensor:
        """Features of images `(B, 3, H, W)`, not normalised: `(B, d_e)`, or `(B, d)` before the projection."""
        pooled = self.pool(weights, self.blocks(weights, self.rows(weights, images)))
        return self.project(weights, pooled) if projected else pooled

    def _normed(self, weights: Weights, rows: Tensor) -> Tensor:
        if "ln_post_weight" not in weights:
            return rows
        return layer_norm(rows, weights["ln_post_weight"], weights.get("ln_post_bias"), self.blocks_shape.eps)


def vision_tower(visual: Any) -> VisionTower:
    """The image tower of an open_clip model. BackboneError gives the reason if its weights cannot be replaced."""
    from open_clip.transformer import VisionTransformer

    expect("image", type(visual) is VisionTransformer, f"it is a {type(visual).__name__}")
    expect("image", visual.transformer.batch_first, "it is not batch-first")
    attends = visual.attn_pool is not None
    expect("image", attends or visual.pool_type in ("tok", "avg"), f"it pools by {visual.pool_type!r}")
    blocks = list(visual.transformer.resblocks)
    expect("image", all(is_standard_block(block) for block in blocks), "its blocks are not open_clip's standard ones")
    named = {"ln_pre": "ln_pre"} if attends else {"ln_pre": "ln_pre", "ln_post": "ln_post"}
    norms = [norm for norm in map(visual.get_submodule, named) if isinstance(norm, nn.LayerNorm)]
    shape = shape_of_blocks("image", blocks, {norm.eps for norm in norms})
    weights: dict[str, Tensor] = {
        **weights_of(visual, {"conv1": "conv1"}),
        "class_embedding": visual.class_embedding.detach(),
        "positional_embedding": visual.positional_embedding.detach(),
        **weights_of(visual, named),
    }
    if visual.proj is not None and not attends:
        weights["proj"] = visual.proj.detach()
    for number, standard in enumerate(blocks):
        weights |= open_clip_block(number, standard)
    return VisionTower(
        shape,
        weights,
        tuple(visual.patch_size),
        len(visual.positional_embedding),
        1,
        "attention" if attends else visual.pool_type,
        attends or not visual.final_ln_after_pool,
        attention=(lambda rows: visual._pool(rows)[0]) if attends else None,
        frozen_projection=(lambda pooled: pooled @ visual.proj.to(pooled.dtype)) if attends else None,
    )


def timm_tower(model: Any) -> VisionTower:
    """The tower of a plain vision transformer of timm, with its blocks' weights under open_clip's names."""
    _expect_timm(model)
    weights = weights_of(model, {"conv1": "patch_embed.proj"})
    if model.cls_token is not None:
        weights["class_embedding"] = model.cls_token[0, 0].detach()
    weights["positional_embedding"] = model.pos_embed[0].detach()
    blocks = list(model.blocks)
    norms = [norm for norm in (model.norm_pre, model.norm, model.fc_norm) if isinstance(norm, nn.LayerNorm)]
    eps = {norm.eps for norm in [*norms, *(norm for own in blocks for norm in (own.norm1, own.norm2))]}
    expect("image", len(eps) == 1, "its blocks differ from each other")
    norm_first = isinstance(model.norm, nn.LayerNorm)
    mlp, heads = blocks[0].mlp, blocks[0].attn.num_heads
    shape = BlockShape(len(blocks), model.embed_dim, heads, mlp.fc1.out_features, eps.pop(), mlp.act)
    weights |= weights_of(model, {"ln_pre": "norm_pre", "ln_post": "norm" if norm_first else "fc_norm"})
    for number, own in enumerate(blocks):
        weights |= timm_block(number, own)
    return VisionTower(
        shape,
        weights,
        tuple(model.patch_embed.patch_size),
        model.patch_embed.num_patches + model.num_prefix_tokens,
        model.num_prefix_tokens,
        "tok" if model.global_pool == "token" else "avg",
        norm_first,
    )


def _expect_timm(model: Any) -> None:
    """Raise BackboneError unless all parts of a model of timm are those that `VisionTower` computes."""
    from timm.layers.patch_embed import PatchEmbed

    expect("image", type(model.patch_embed) is PatchEmbed, f"its stem is a {type(model.patch_embed).__name__}")
    expect("image", model.reg_token is None, "it has register tokens")
    expect("image", model.global_pool in ("token", "avg"), f"it pools by {model.global_pool!r}")
    placed = model.pos_embed is not None and not model.dynamic_img_size
    usual = placed and (not model.no_embed_class or model.cls_token is None)
    expect("image", usual, "its positions are unusual")
    standard = all(map(_is_standard, model.blocks))
    expect("image", standard, f"its blocks are not the standard ones of {type(model).__name__}")
    expect_activation("image", model.blocks[0].mlp.act)


def _is_standard(block: Any) -> bool:
    """Whether a block of timm has the parts of CLIP's."""
    from timm.layers.attention import Attention
    from timm.layers.mlp import Mlp
    from timm.models.vision_transformer import Block

    attention = block.attn
    parts = [getattr(attention, name, None) for name in ("q_norm", "k_norm", "norm", "gate")] + [block.mlp.norm]
    kind = type(block) is Block and type(attention) is Attention and type(block.mlp) is Mlp
    return kind and all(part is None or isinstance(part, nn.Identity) for part in parts)
