"""Visual prompts under a head: their training, and the classifier that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import Head, TextHead, head_groups
from promptfed.shared.methods.core.visual import ImageClassifier, Towers, train_on_images

if TYPE_CHECKING:
    from torch import Tensor


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
