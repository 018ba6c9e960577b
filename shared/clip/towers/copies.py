"""Image towers whose weights have the names of our states, and private copies of them in which others may stand.

Clients of one process share a backbone over threads: its own modules are never touched. A copy shares their tensors
until a method puts its own into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.towers import BLOCK_KINDS, vision
from promptfed.shared.clip.towers.text import LowRank, is_standard_block, run_block

OPEN_CLIP = {
    "ln_1": "transformer.resblocks.{}.ln_1.",
    "in_proj": "transformer.resblocks.{}.attn.in_proj_",
    "out_proj": "transformer.resblocks.{}.attn.out_proj.",
    "ln_2": "transformer.resblocks.{}.ln_2.",
    "c_fc": "transformer.resblocks.{}.mlp.c_fc.",
    "c_proj": "transformer.resblocks.{}.mlp.c_proj.",
    "conv1": "conv1.",
    "class_embedding": "class_embedding",
    "positional_embedding": "positional_embedding",
    "ln_pre": "ln_pre.",
}
POOLED = {"ln_post": "ln_post.", "proj": "proj"}  # of towers that do not pool by attention, which stays frozen
TIMM = {
    "ln_1": "blocks.{}.norm1.",
    "in_proj": "blocks.{}.attn.qkv.",
    "out_proj": "blocks.{}.attn.proj.",
    "ln_2": "blocks.{}.norm2.",
    "c_fc": "blocks.{}.mlp.fc1.",
    "c_proj": "blocks.{}.mlp.fc2.",
    "conv1": "patch_embed.proj.",
    "class_embedding": "cls_token",
    "positional_embedding": "pos_embed",
    "ln_pre": "norm_pre.",
}


@dataclass(frozen=True)
class PlainTower(vision.PromptedTower):
    """An image tower that computes with the weights in ``module``.

    ``parts``: where the module has each kind of weight, or what comes before "weight" and "bias"; {} is the number of a
    block. ``positions``: rows of an image.
    """

    module: Any
    parts: Mapping[str, str]
    positions: int
    heads: int
    mlp_width: int
    tower_of: Callable[[Any], PlainTower]

    def copy(self) -> PlainTower:
        """The same with a module of its own, which shares this one's tensors until others are `put` there."""
        shared = [*self.module.parameters(), *self.module.buffers()]
        return self.tower_of(deepcopy(self.module, {id(tensor): tensor for tensor in shared}))

    def named(self, kind: str, first: int = 0) -> dict[str, Tensor]:
        """The weights of a kind by the module's own names, a block's from block ``first`` on; empty if it has none."""
        part, _, leaf = kind.rpartition("_")
        name = self.parts.get(kind) or (self.parts[part] + leaf if part in self.parts else "")
        names = [name.format(number) for number in range(first, self.layers)] if kind in BLOCK_KINDS else [name]
        found = {name: self._holders[path]._parameters.get(leaf) for name, path, leaf in map(_split, names)}
        return {name: weight for name, weight in found.items() if weight is not None}

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these weights, by the module's own names, in the shapes and dtypes of its own."""
        for name, path, own in map(_split, weights):
            held = self._holders[path]._parameters
            frozen = held[own]
            assert frozen is not None
            held[own] = weights[name].reshape(frozen.shape).to(frozen.dtype)  # type: ignore[assignment]

    def run(self, rows: Tensor, low_rank: Mapping[int, LowRank] | None = None) -> Tensor:
        """Run rows `(B, S, d)` through the blocks. The last one may return only the rows that are pooled.

        ``low_rank`` is given by block number.
        """
        changes = low_rank or {}
        for number, block in enumerate(self.blocks):
            rows = block(rows, low_rank=changes[number]) if number in changes else block(rows)  # type: ignore[call-arg]
        return rows

    def features(self, images: Tensor, *, projected: bool = True) -> Tensor:
        """Features of images `(B, 3, H, W)`, not normalised: `(B, d_e)`, or `(B, d)` before the projection."""
        pooled = self.pool(self.run(self.rows(images)))
        return self.project(pooled) if projected else pooled

    @cached_property
    def _holders(self) -> dict[str, nn.Module]:
        return dict(self.module.named_modules())


def _split(name: str) -> tuple[str, str, str]:
    """A weight's name, and its parts: the module that holds it, and what it is called there."""
    path, _, leaf = name.rpartition(".")
    return name, path, leaf


def vision_tower(visual: Any) -> PlainTower:
    """The image tower of an open_clip model. BackboneError gives the reason if its weights cannot be replaced."""
    refusal = vision.refusal_of(visual)
    expect("image", refusal is None, refusal)
    blocks, attends = list(visual.transformer.resblocks), visual.attn_pool is not None
    expect("image", attends or visual.pool_type in ("tok", "avg"), f"it pools by {visual.pool_type!r}")
    expect("image", all(map(is_standard_block, blocks)), "its blocks are not open_clip's standard ones")
    runs = [partial(run_block, block) for block in blocks]
    if not attends and visual.pool_type == "tok":
        runs[-1] = partial(runs[-1], first_only=True)
    return PlainTower(
        **vars(vision.prompted_tower(visual)) | {"blocks": runs},
        module=visual,
        parts=OPEN_CLIP if attends else OPEN_CLIP | POOLED,
        positions=len(visual.positional_embedding),
        heads=blocks[0].attn.num_heads,
        mlp_width=blocks[0].mlp.c_fc.out_features,
        tower_of=vision_tower,
    )


def timm_tower(model: Any) -> PlainTower:
    """The tower of a plain vision transformer of timm. BackboneError gives the reason if it is none."""
    from timm.layers.attention import Attention
    from timm.layers.mlp import Mlp
    from timm.layers.patch_embed import PatchEmbed
    from timm.models.vision_transformer import Block

    kinds = {(type(block), type(block.attn), type(block.mlp)) for block in model.blocks}
    expect(
        "image", kinds == {(Block, Attention, Mlp)}, f"its blocks are not the standard ones of {type(model).__name__}"
    )
    expect("image", type(model.patch_embed) is PatchEmbed, f"its stem is a {type(model.patch_embed).__name__}")
    expect("image", model.reg_token is None, "it has register tokens")
    expect("image", model.global_pool in ("token", "avg"), f"it pools by {model.global_pool!r}")
    positions = model.patch_embed.num_patches + model.num_prefix_tokens
    placed = model.pos_embed is not None and not model.dynamic_img_size and model.pos_embed.shape[1] == positions
    expect("image", placed, "its positions are unusual")
    return PlainTower(
        **vars(vision.timm_tower(model)),
        module=model,
        parts=TIMM | {"ln_post": "norm." if isinstance(model.norm, nn.LayerNorm) else "fc_norm."},
        positions=positions,
        heads=model.blocks[0].attn.num_heads,
        mlp_width=model.blocks[0].mlp.fc1.out_features,
        tower_of=timm_tower,
    )


def expect(tower: str, right: bool, why: str | None) -> None:
    """Raise BackboneError with the reason why a tower's weights cannot be changed, unless ``right``."""
    if not right:
        raise BackboneError(f"This backbone's {tower} tower cannot be computed with other weights than its own: {why}.")
