"""Which weights of an image tower are trained, by kind, and a tower whose trained weights take gradients.

A kind is one sort of tensor: of a block's, those of all trained blocks are stacked ``(k, ...)``, so that names and
symbolic shapes depend on no tower. What travels and is kept is the change from the frozen backbone, zero at the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from promptfed.shared.clip.sizes import BLOCK_KINDS
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import HeadRate
from promptfed.shared.methods.core.visual import CacheBlocks, Towers, VisualHyper, held_at_once
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import checkpointing, torch

if TYPE_CHECKING:
    from torch import Tensor

    from promptfed.shared.clip import Backbone
    from promptfed.shared.clip.towers.copies import PlainTower

Trainable = Literal["all", "last_k", "norms", "biases", "none"]

_BLOCK_SHAPES: dict[str, tuple[str, ...]] = {
    "ln_1_weight": ("d_v",),
    "ln_1_bias": ("d_v",),
    "in_proj_weight": ("d_v3", "d_v"),
    "in_proj_bias": ("d_v3",),
    "out_proj_weight": ("d_v", "d_v"),
    "out_proj_bias": ("d_v",),
    "ln_2_weight": ("d_v",),
    "ln_2_bias": ("d_v",),
    "c_fc_weight": ("h", "d_v"),
    "c_fc_bias": ("h",),
    "c_proj_weight": ("d_v", "h"),
    "c_proj_bias": ("d_v",),
}
_OTHER_SHAPES: dict[str, tuple[str | int, ...]] = {
    "conv1_weight": ("d_v", 3, "p", "p"),
    "class_embedding": ("d_v",),
    "positional_embedding": ("s", "d_v"),
    "ln_pre_weight": ("d_v",),
    "ln_pre_bias": ("d_v",),
    "ln_post_weight": ("d_v",),
    "ln_post_bias": ("d_v",),
    "proj": ("d_v", "d_e"),
}
NORMS = frozenset(kind for kind in (*_BLOCK_SHAPES, *_OTHER_SHAPES) if kind.startswith("ln_"))
_LAST = ("ln_post_weight", "ln_post_bias", "proj")


class TowerHyper(VisualHyper):
    """Which weights of the image tower are trained, and how changes travel."""

    trainable: Trainable = pf.option(
        "all",
        "all: every weight of the image tower; last_k: its last k blocks and what follows them; norms: "
        "the layer norms; biases: all biases; none: the linear head alone (a linear probe)",
    )
    k: int = pf.option(1, "last_k: how many blocks, counted from the last", ge=1, le=256)
    projected: bool = pf.option(False, "the linear head stands on the feature behind the image tower's projection")
    head_learning_rate: HeadRate = None
    transport: Literal["float32", "bfloat16"] = pf.option(
        "float32", "how changes travel, both ways; bfloat16: half the bytes, each number to three digits"
    )
    cache_blocks: CacheBlocks = False


def trained_kinds(trainable: Trainable, projected: bool) -> tuple[str, ...]:
    """The kinds that are trained, in order of name; ``projected``: the projection is used at all."""
    every = (*_BLOCK_SHAPES, *_OTHER_SHAPES)
    chosen: Iterable[str] = {
        "all": every,
        "last_k": (*_BLOCK_SHAPES, *_LAST),
        "norms": NORMS,
        "biases": [kind for kind in every if kind.endswith("_bias")],
        "none": (),
    }[trainable]
    return tuple(sorted(kind for kind in chosen if kind != "proj" or projected))


def tensor_spec(kind: str) -> TensorSpec:
    """The change of a kind, as it stands in a state."""
    if kind in _BLOCK_SHAPES:
        return TensorSpec(kind, ("k", *_BLOCK_SHAPES[kind]))
    return TensorSpec(kind, _OTHER_SHAPES[kind])


def tower_dims(method: str, trainable: Trainable, k: int, context: pf.ServerContext) -> dict[str, int]:
    """Numbers for the symbols of `tensor_spec`. Raises MethodError where the backbone's shape does not say them."""
    shape = context.shape
    if shape.d_v is None or shape.vision_layers is None or shape.mlp_width is None or shape.positions is None:
        raise pf.MethodError(
            f"{method} trains the weights of a vision transformer; this backbone's image tower is none of the plain "
            "kind, or the shape does not say its mlp_width and positions: choose a ViT model, or leave the shape out"
        )
    if shape.patch_size is None:
        raise pf.MethodError(f"{method} needs square patches (patch_size), and this backbone's shape says none")
    layers = shape.vision_layers
    if trainable == "last_k" and k > layers:
        raise pf.MethodError(f"k = {k}, but the image tower has {layers} blocks: lower it, or take trainable: all")
    return {
        "k": k if trainable == "last_k" else layers,
        "d_v": shape.d_v,
        "d_v3": 3 * shape.d_v,
        "h": shape.mlp_width,
        "p": shape.patch_size,
        "s": shape.positions,
        "d_e": shape.d_e,
    }


def own_dims(method: str, trainable: Trainable, k: int, context: pf.ClientContext) -> dict[str, int]:
    """The same of what a client knows by itself."""
    from promptfed.shared.clip import shape_of

    shape = shape_of(context.backbone)
    names, training = context.class_names, context.training
    return tower_dims(
        method, trainable, k, pf.ServerContext(training, shape, names, (), seed=context.seed, rounds=context.rounds)
    )


@dataclass(frozen=True)
class TrainedTower:
    """A private copy of the image tower in which some weights are W = frozen + change, the others the backbone's own.

    ``leaves`` holds W by kind, float32, of a block's stacked from block ``first`` on. What a tower lacks is left out.
    ``start`` has the change of each kind that it was made with.
    """

    backbone: Backbone
    tower: PlainTower
    hyper: TowerHyper
    first: int
    leaves: Tensors
    start: Mapping[str, Tensor]

    @classmethod
    def of(cls, backbone: Backbone, hyper: TowerHyper, changes: Mapping[str, Tensor]) -> TrainedTower:
        """With ``changes`` by kind added; copies, which take no gradient yet."""
        tower = backbone.vision_tower()
        stacked = [len(change) for kind, change in changes.items() if kind in BLOCK_KINDS]
        first = tower.layers - (stacked[0] if stacked else tower.layers)
        leaves = {}
        for kind, change in sorted(changes.items()):
            parts = list(tower.named(kind, first).values())
            if parts:
                frozen = torch.stack(parts) if kind in BLOCK_KINDS else parts[0].reshape(change.shape)
                leaves[kind] = frozen.float() + change.to(frozen.device)
        return cls(backbone, tower.copy(), hyper, first, leaves, changes)

    def trainable(self) -> TrainedTower:
        """The same with leaves that take gradients."""
        leaves = {kind: leaf.detach().clone().requires_grad_() for kind, leaf in self.leaves.items()}
        return replace(self, leaves=leaves)

    def changes(self) -> Tensors:
        """By kind of ``start``, how far W has moved from frozen + start; zero for what the tower lacks."""
        begun = TrainedTower.of(self.backbone, self.hyper, self.start).leaves
        return {
            kind: (self.leaves[kind].detach() - begun[kind]).cpu() if kind in self.leaves else torch.zeros_like(change)
            for kind, change in self.start.items()
        }

    def weights(self) -> Tensors:
        """W by the names of the copy's own weights."""
        weights: Tensors = {}
        for kind, leaf in self.leaves.items():
            # Taken apart at once: the gradient of an index would be a tensor of all blocks, for each of them.
            parts = leaf.unbind(0) if kind in BLOCK_KINDS else [leaf]
            weights |= zip(self.tower.named(kind, self.first), parts, strict=True)
        return weights

    def read(self, split: pf.Split, indices: Tensor) -> Tensor:
        """The tower's inputs at ``indices (B,)``: with ``cache_blocks`` rows before block ``first``, else images."""
        return split.block_rows(indices, self.first) if self.hyper.cache_blocks else split.images(indices)

    def features(self, inputs: Tensor, *, projected: bool, normalize: bool) -> Tensor:
        """``(B, d_e)`` of inputs as `read` gives them; ``(B, d_v)`` before the projection unless ``projected``."""
        tower, inputs = self.tower, self.backbone.image_input(inputs)
        tower.put(self.weights())

        def encode(part: Tensor) -> Tensor:
            with Towers(self.backbone, self.hyper).image_precision():
                rows = tower.run(part, self.first) if self.hyper.cache_blocks else tower.run(tower.rows(part))
                pooled = tower.pool(rows)
                features = (tower.project(pooled) if projected else pooled).float()
            return torch.nn.functional.normalize(features, dim=-1) if normalize else features

        size = held_at_once(self.backbone, self.hyper)
        if size is None or not torch.is_grad_enabled():
            return encode(inputs)
        parts = torch.split(inputs, size)
        return torch.cat([checkpointing.checkpoint(encode, part, use_reentrant=False) for part in parts])
