"""What the methods with visual prompts share: prompted encoders, their options, training on images, classification.

Notation: `B` images, `C` classes, `m` prompt tokens, `d_t` and `d_v` widths of the text and the image tower, `d_e` of
the joint embedding; prompts `(depth, m, d)` replace their slots in each of the first `depth` blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import Head, TextHead, head_groups
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors.lazy import Tensor, checkpointing, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone, ClassPrompts


CHUNK = 32  # images in one pass where no gradient is kept
NEEDS = pf.Needs(vision_transformer=True, cached_features=False)

Logits = Callable[["Tensor"], "Tensor"]
"""Logits ``(B, C)`` of preprocessed images ``(B, 3, H, W)``."""
Term = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""A term of the loss, of a batch's indices ``(B,)``, its images ``(B, 3, H, W)`` and logits ``(B, C)``."""


class VisualHyper(pf.Hyperparameters):
    """How the image tower is run, which changes what is computed by rounding alone."""

    autocast: Literal["none", "bf16"] = pf.option(
        "none", "bf16: the image tower computes in bfloat16; texts, prompts, losses and optimizer do not"
    )


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

        size = self.backbone.held_images
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
    """Scores images by ``logits``, which is handed them in chunks and without gradients."""

    def __init__(self, logits: Logits):
        self._logits = logits

    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        with torch.no_grad():
            return torch.cat([self._logits(split.images(part)) for part in torch.split(indices, CHUNK)])


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
) -> float:
    """Minimise CE(logits) + term over ``parameters`` and ``groups`` in place; a batch's images are read once.

    Returns the mean loss over the samples of the last epoch. Raises as `promptfed.shared.methods.core.training.train`.
    """
    labels, loss_of = context.train.labels.to(context.backbone.device), pf.ClassificationLoss(context)

    def loss(indices: Tensor) -> Tensor:
        images = context.train.images(indices)
        scores = logits(images)
        value = loss_of(scores, labels[pf.sent_to(indices, labels.device)])
        return value if term is None else value + term(indices, images, scores)

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
