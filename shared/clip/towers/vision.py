"""Prompted image encoding in vision transformers of open_clip and plain ones of timm (VPT, Jia et al., 2022).

PLAN and pFedPG use it. Notation: `B` images, `n` prompt tokens, `d` = d_v the tower's width, `S` = 1 + patches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.towers.plain import is_a
from promptfed.shared.clip.towers.text import is_standard_block, run_block

Block = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PromptedTower:
    """A frozen image tower that takes prompts.

    ``rows``: images `(B, 3, H, W)` -> rows `(B, S, d)` before the first block. ``norm`` has been applied to them, and
    is applied to the first prompts. ``pool``: rows after
    the last block -> the feature `(B, d)` before the projection, which ``project`` maps to `(B, d_e)`.
    """

    width: int
    layers: int
    patch_size: int | None
    rows: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    blocks: Sequence[Block]
    pool: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]

    def encode(self, images: Tensor, prompts: Tensor, pooled: bool) -> Tensor:
        """Features `(B, d_e)` of images `(B, 3, H, W)` with prompts `(depth, n, d)`; `pooled`: before the projection.

        The first prompts are added to [cls] and the patches after the positional embedding. BackboneError if the
        prompts do not fit.
        """
        if prompts.ndim != 3 or prompts.shape[2] != self.width or not 1 <= prompts.shape[0] <= self.layers:
            raise BackboneError(
                f"Visual prompts of shape {tuple(prompts.shape)} do not fit: the backbone takes "
                f"(depth, n, {self.width}) with a depth of 1 to {self.layers}."
            )
        with torch.no_grad():
            rows = self.rows(images)
        feature = self.pool(self._run(rows, prompts.to(rows.dtype)))
        return feature if pooled else self.project(feature)

    def _run(self, rows: Tensor, prompts: Tensor) -> Tensor:
        """Rows `(B, S, d)` after all blocks, with prompts beside them. The next prompts replace the previous ones.

        Prompts are placed after the image's tokens: attention ignores the order, and pooling must cover only the
        image's tokens.
        """
        batch, tokens = rows.shape[:2]
        for number, block in enumerate(self.blocks):
            if number < prompts.shape[0]:
                fresh = self.norm(prompts[0]) if number == 0 else prompts[number]
                rows = torch.cat([rows[:, :tokens], fresh.expand(batch, -1, -1)], dim=1)
            rows = block(rows)
        return rows[:, :tokens]


def refusal_of(visual: Any) -> str | None:
    """The reason why an image tower takes no visual prompts; None if it does."""
    if not is_a(visual, "transformer", "VisionTransformer"):
        return f"it is a {type(visual).__name__}, not a vision transformer"
    if not visual.transformer.batch_first:
        return "it is not batch-first"
    return None


def vision_width(visual: Any) -> int:
    """d_v: width of the tower's features before the projection."""
    if hasattr(visual, "trunk"):
        return int(visual.trunk.num_features)
    return int(visual.transformer.width if refusal_of(visual) is None else visual.attnpool.c_proj.in_features)


def pooled_width(visual: Any) -> int:
    """Width of the pooled feature before the projection: d_v, unless open_clip's pooling by attention changes it."""
    if getattr(visual, "attn_pool", None) is not None:
        return int(visual.output_dim)
    return vision_width(visual)


def prompted_tower(visual: Any) -> PromptedTower:
    """The image tower of an open_clip model with prompts; BackboneError gives the reason if it takes none."""
    refusal = refusal_of(visual)
    if refusal is not None:
        raise BackboneError(f"This backbone's image tower takes no visual prompts: {refusal}.")
    blocks = list(visual.transformer.resblocks)
    if visual.attn_pool is None and visual.pool_type == "tok" and is_standard_block(blocks[-1]):
        blocks[-1] = partial(run_block, blocks[-1], first_only=True)
    return PromptedTower(
        width=int(visual.transformer.width),
        layers=len(blocks),
        patch_size=_side(visual.patch_size),
        rows=visual._embeds,
        norm=visual.ln_pre,
        blocks=blocks,
        pool=lambda rows: visual._pool(rows)[0],
        project=lambda feature: feature if visual.proj is None else feature @ visual.proj,
    )


def timm_tower(trunk: Any) -> PromptedTower:
    """A plain vision transformer of timm with prompts; its features are not projected."""
    height, width = trunk.patch_embed.grid_size
    size = trunk.patch_embed.img_size
    return PromptedTower(
        width=int(trunk.embed_dim),
        layers=len(trunk.blocks),
        patch_size=_side((size[0] // height, size[1] // width)),
        rows=lambda images: trunk.norm_pre(trunk._pos_embed(trunk.patch_embed(images))),
        norm=trunk.norm_pre,
        blocks=list(trunk.blocks),
        pool=lambda rows: trunk.forward_head(trunk.norm(rows), pre_logits=True),
        project=lambda feature: feature,
    )


def _side(patch: Sequence[int]) -> int | None:
    """Side of a patch in pixels; None if patches are not square."""
    height, width = patch
    return int(height) if height == width else None


def patch_refusal(visual: Any) -> str | None:
    """The reason why an image tower gives no patch features; None if it does."""
    if is_a(visual, "modified_resnet", "ModifiedResNet"):
        return None
    if not is_a(visual, "transformer", "VisionTransformer"):
        return f"it is a {type(visual).__name__}, neither a vision transformer nor a CLIP ResNet of open_clip"
    if visual.attn_pool is not None:
        return "it pools its patches by attention, before they reach the joint space"
    if visual.pool_type not in ("tok", "avg"):
        return f"it pools by {visual.pool_type!r}"
    return None


def patch_tokens(visual: Any) -> int | None:
    """M; None if the tower gives no patch features."""
    if patch_refusal(visual) is not None:
        return None
    pool = getattr(visual, "attnpool", None)  # of a ResNet
    positions = visual.positional_embedding if pool is None else pool.positional_embedding
    return int(positions.shape[0]) - 1


def encode_patches(visual: Any, images: Tensor) -> Tensor:
    """Patch features `(B, M, d_e)` of images `(B, 3, H, W)`, not normalised. BackboneError if the tower has none."""
    refusal = patch_refusal(visual)
    if refusal is not None:
        raise BackboneError(f"This backbone's image tower gives no patch features: {refusal}.")
    if not is_a(visual, "transformer", "VisionTransformer"):
        return _resnet_patches(visual, images)
    rows = visual.transformer(visual._embeds(images))[:, 1:]
    # Also if the tower norms after pooling: patches are not pooled, and the norm processes each row separately.
    rows = visual.ln_post(rows)
    features: Tensor = rows if visual.proj is None else rows @ visual.proj
    return features


def _resnet_patches(visual: Any, images: Tensor) -> Tensor:
    rows = visual.stem(images)
    for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
        rows = layer(rows)
    return attend_from_everywhere(visual.attnpool, rows)[:, 1:]


def attend_from_everywhere(pool: Any, feature_map: Tensor) -> Tensor:
    """`(B, 1 + H·W, d_e)`: open_clip's `AttentionPool2d` with queries from all positions instead of position 0 only.

    feature_map: `(B, d, H, W)`; position 0 is their mean.
    """
    rows = feature_map.flatten(2).transpose(1, 2)
    rows = torch.cat([rows.mean(dim=1, keepdim=True), rows], dim=1) + pool.positional_embedding.to(rows.dtype)
    batch, positions, width = rows.shape

    def heads(projected: Tensor) -> Tensor:
        return projected.view(batch, positions, pool.num_heads, width // pool.num_heads).transpose(1, 2)

    attended = F.scaled_dot_product_attention(
        heads(pool.q_proj(rows)), heads(pool.k_proj(rows)), heads(pool.v_proj(rows))
    )
    result: Tensor = pool.c_proj(attended.transpose(1, 2).flatten(2))
    return result
