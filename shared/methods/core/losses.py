"""The classification loss of a client's training: cross-entropy, or of several labels the binary cross-entropies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core.interface.base import ClientContext
from promptfed.shared.tensors.lazy import F, torch

if TYPE_CHECKING:
    from torch import Tensor


class ClassificationLoss:
    """The loss of logits under the labels of a client's training images, which are among ``class_names``."""

    def __init__(self, context: ClientContext):
        self._bias = context.label_bias

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of ``logits (B, C)`` under ``labels (B,)``, or ``(B, C)`` where there may be several."""
        if self._bias is None:
            return F.cross_entropy(logits, labels)
        return self.each(logits, labels).mean()

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Losses ``(B,)`` of ``logits (B, C)`` under ``labels (B,)``.

        Under ``labels (B, C)``: the sum over the classes that are known to be present (1) or absent (0).
        """
        if self._bias is None:
            return F.cross_entropy(logits, labels, reduction="none")
        logits = self._bias.added(logits)
        losses = torch.where(labels == 1, -F.logsigmoid(logits), -F.logsigmoid(-logits))
        return torch.where(labels >= 0, losses, 0.0).sum(dim=1)
