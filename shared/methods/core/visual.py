"""What the methods with visual prompts share: prompted encoders, their options, training on images, classification.

Notation: `B` images, `C` classes, `m` prompt tokens, `d_t` and `d_v` widths of the text and the image tower, `d_e` of
the joint embedding; prompts `(depth, m, d)` replace their slots in each of the first `depth` blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import Head, TextHead, head_groups
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors.lazy import Tensor, checkpointing, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone, ClassPrompts


CHUNK = 32  # images in one pass where no gradient is kept
NEEDS = pf.Needs(vision_transformer=True, cached_features=False)

Logits = Callable[["Tensor"], "Tensor"]
"""Logits ``(B, C)`` of a tower's inputs, as `Read` gives them."""
Read = Callable[[pf.Split, "Tensor"], "Tensor"]
"""What a tower is given for the images at indices ``(B,)`` of a split.

The preprocessed images ``(B, 3, H, W)``, or the rows ``(B, S, d_v)`` that are kept before one of its blocks.
"""
Term = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""A term of the loss, of a batch's indices ``(B,)``, the tower's inputs and logits ``(B, C)``."""


def images_of(split: pf.Split, indices: Tensor) -> Tensor:
    """The preprocessed images themselves: the `Read` of a tower that changes from its first block on."""
    return split.images(indices)


CacheBlocks = Annotated[
    bool,
    Field(
        description="keep on the client's disk, in 16 bits, what each image is before the first block that changes "
        "(ViT-B/16: 303 kB an image): the frozen blocks below run once an image instead of once a step"
    ),
]


class VisualHyper(pf.Hyperparameters):
    """How the image tower is run; neither option changes what is computed but for rounding."""

    autocast: Literal["none", "bf16"] = pf.option(
        "none", "bf16: the image tower computes in bfloat16; texts, prompts, losses and optimizer do not"
    )
    checkpoint: int | None = pf.option(
        None,
        "activation checkpointing: hold the image tower's activations for so many images at once and "
        "compute the others' again in the backward pass; default: hold all",
        ge=1,
    )


def held_at_once(backbone: Backbone, hyper: VisualHyper) -> int | None:
    """For how many images the image tower's activations are held at once: the option's, or what the device can hold."""
    return min((size for size in (hyper.checkpoint, backbone.held_images) if size is not None), default=None)


@dataclass(frozen=True)
class Towers:
    """The frozen backbone's prompted encoders under a method's options."""

    backbone: Backbone
    hyper: VisualHyper

    def images(self, images: Tensor, prompts: Tensor, *, pooled: bool = False, normalize: bool = True) -> Tensor:
        """``(B, d_e)`` features of images ``(B, 3, H, W)`` under prompts ``(depth, m, d_v)``.

        ``pooled``: ``(B, d_v)``, before the projection.
        """

        def encode(part: Tensor, prompts: Tensor) -> Tensor:
            with self.image_precision():
                return self.backbone.encode_images_prompted(part, prompts, pooled=pooled, normalize=normalize)

        size = held_at_once(self.backbone, self.hyper)
        if size is None or not torch.is_grad_enabled():
            return encode(images, prompts)
        parts = torch.split(images, size)
        return torch.cat([checkpointing.checkpoint(encode, part, prompts, use_reentrant=False) for part in parts])

    def text(self, prompts: Tensor, classes: ClassPrompts) -> Tensor:
        """``(C, d_e)`` normalised features of all classes under prompts ``(depth, m, d_t)``."""
        prompts = prompts.to(self.backbone.device)
        deep = prompts[1:] if len(prompts) > 1 else None
        return self.backbone.encode_prompts(prompts[0], classes, deep=deep)

    def cosine(self, features: Tensor, text: Tensor) -> Tensor:
        """``(B, C)`` logits τ⁻¹·I(x)·T(y) of normalised features ``(B, d_e)`` and ``(C, d_e)`` (plan.txt, Eq. 1)."""
        return self.backbone.logit_scale * features @ text.T

    def image_precision(self) -> AbstractContextManager[object]:
        """Within it the image tower computes in the precision of the options."""
        if self.hyper.autocast == "none":
            return nullcontext()
        return torch.autocast(self.backbone.device.type, torch.bfloat16)


class ImageClassifier:
    """Scores images by ``logits``, which is handed what ``read`` gives in chunks and without gradients."""

    def __init__(self, logits: Logits, read: Read = images_of):
        self._logits, self._read = logits, read

    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        with torch.no_grad():
            return torch.cat([self._logits(self._read(split, part)) for part in torch.split(indices, CHUNK)])


def prompted_logits(towers: Towers, context: pf.ClientContext, text: Tensor, visual: Tensor) -> Logits:
    """Logits among ``context.class_names`` under fixed text and visual prompts ``(depth, m, d)``."""
    classes = towers.backbone.class_prompts(context.class_names, text.shape[1])
    visual = visual.to(towers.backbone.device)
    with torch.no_grad():
        features = towers.text(text, classes)
    return lambda images: towers.cosine(towers.images(images, visual), features)


def train_on_images(
    context: pf.ClientContext,
    parameters: list[Tensor],
    logits: Logits,
    term: Term | None = None,
    *,
    groups: Sequence[pf.Group] = (),
    read: Read = images_of,
) -> float:
    """Minimise CE(logits) + term over ``parameters`` and ``groups`` in place; a batch's inputs are read once.

    Returns the mean loss over the samples of the last epoch. Raises as `promptfed.shared.methods.core.training.train`.
    """
    labels, loss_of = context.train.labels.to(context.backbone.device), pf.ClassificationLoss(context)

    def loss(indices: Tensor) -> Tensor:
        inputs = read(context.train, indices)
        scores = logits(inputs)
        value = loss_of(scores, labels[pf.sent_to(indices, labels.device)])
        return value if term is None else value + term(indices, inputs, scores)

    return pf.train(context, parameters, loss, groups=groups, reads_images=True)


def drawn(draws: Draws, *shape: int) -> Any:
    """Entries drawn from N(0, 0.02²)."""
    return draws.normal(*shape) * pf.INIT_STD


def vpt_bound(patch_size: int | None, d_v: int) -> float:
    """VPT's start is uniform in ±√(6/(3·p² + d_v)), for patches of p pixels (Jia et al., 2022).

    Raises:
        MethodError: the patches' size is not known.
    """
    if patch_size is None:
        raise pf.MethodError(
            "the backbone's shape does not say how large the patches are (patch_size), on which the prompts' start "
            "depends: create the federation with `promptfed federation create`, or leave the shape out"
        )
    return math.sqrt(6 / (3 * patch_size**2 + d_v))


def vision_width(method: str, context: pf.ServerContext) -> int:
    """``d_v`` of an image tower that prompts can enter. Raises MethodError where there is none."""
    shape = context.shape
    if shape.d_v is None or shape.vision_layers is None:
        raise pf.MethodError(
            f"{method} needs a vision transformer that prompts can enter; this backbone's image tower is none"
        )
    return shape.d_v


def vision_dims(method: str, depth: int | None, context: pf.ServerContext) -> dict[str, int]:
    """``d_v`` and ``depth_v``: prompts in the first ``depth`` blocks of the image tower, or in all of them."""
    width = vision_width(method, context)
    return {"d_v": width, "depth_v": _depth(depth, context.shape.vision_layers, "image tower")}


def text_dims(method: str, m: int, depth: int | None, context: pf.ServerContext) -> dict[str, int]:
    """``d_t`` and ``depth_t``: prompts in the first ``depth`` blocks of the text tower, or in all of them."""
    width = pf.text_width(method, m, context)
    return {"d_t": width, "depth_t": _depth(depth, context.shape.text_layers, "text tower")}


def _depth(depth: int | None, layers: int | None, tower: str) -> int:
    if layers is None:
        raise pf.MethodError(f"the backbone's shape does not say how many blocks the {tower} has: give it, or no shape")
    if depth is not None and depth > layers:
        raise pf.MethodError(f"depth = {depth}, but the {tower} has {layers} blocks: lower it, or leave it out for all")
    return layers if depth is None else depth


def check_kept_blocks(method: str, spec: pf.FederationSpec, *, frozen_below: bool, how: str) -> None:
    """Raise MethodError where no block below the changed ones is left, or images change from step to step."""
    if not frozen_below:
        raise pf.MethodError(f"{method} changes the first block too, so that no rows can be kept: {how}")
    if spec.training.augmentation != "none":
        raise pf.MethodError(
            "cache_blocks keeps what an image is, and with training.augmentation it is another one in every step: "
            "leave one of them out"
        )


@dataclass(frozen=True)
class PromptedHead:
    """H(F([c, P, z])): a head on the image tower's feature under visual prompts P ``(depth, m, d_v)``.

    ``projected``: a linear head stands behind the tower's projection. ``rate``: the head's own learning rate.
    """

    towers: Towers
    head: Head
    projected: bool
    rate: float | None

    def logits(self, images: Tensor, prompts: Tensor) -> Tensor:
        """``(B, C)`` logits of images ``(B, 3, H, W)``."""
        if isinstance(self.head, TextHead):
            return self.head.logits(self.towers.images(images, prompts))
        return self.head.logits(self.towers.images(images, prompts, pooled=not self.projected, normalize=False))

    def train(self, context: pf.ClientContext, prompts: Tensor, settle: Callable[[], None] = lambda: None) -> float:
        """Minimise CE over ``prompts`` and the head in place; the mean loss of the last epoch.

        ``settle`` is called before each step and after the last one: it may change ``prompts``.
        """

        def logits(images: Tensor) -> Tensor:
            settle()
            return self.logits(images, prompts)

        loss = train_on_images(context, [prompts], logits, groups=head_groups(context, self.head.parameters, self.rate))
        settle()
        return loss

    def classifier(self, context: pf.ClientContext, prompts: Tensor) -> ImageClassifier:
        """Classifies with ``prompts`` as they are."""
        prompts = prompts.to(context.backbone.device)
        return ImageClassifier(lambda images: self.logits(images, prompts))
