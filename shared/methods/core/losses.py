"""The classification loss of a client's training, as the spec's section ``loss`` describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core.interface.base import ClientContext
from promptfed.shared.tensors.lazy import F, torch

if TYPE_CHECKING:
    from torch import Tensor


class ClassificationLoss:
    """The loss of logits under the labels of a client's training images, which are among ``class_names``."""

    def __init__(self, context: ClientContext):
        self._spec, self._shift, self._weights = context.terms.loss, None, None
        self._unlabelled, self._bias = context.unlabelled, context.label_bias
        if self._spec.balance == "none" or (self._unlabelled and context.protection is not None):
            return  # predictions depend on records, and no noise covers how many there are of a class
        counts, device = _class_counts(context), context.backbone.device
        if not counts.any():
            return
        if self._bias is not None:
            present, known = counts[0], counts.sum(dim=0)
            share = (present + 0.5) / (known + 1)  # a class that no image has, or every image, keeps a finite shift
            self._shift = self._spec.adjustment * torch.logit(share.double()).float().to(device)
            return
        counts = counts[0].to(device)
        if self._spec.balance == "logit_adjusted":
            # A class without images has the shift -inf: it is no alternative of the softmax.
            self._shift = self._spec.adjustment * torch.log(counts / counts.sum())
        else:
            inverse = 1 / (1 - torch.pow(self._spec.beta, counts))  # infinite without images, which no label has
            self._weights = torch.where(counts > 0, inverse / inverse[counts > 0].mean(), 0.0)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of ``logits (B, C)`` under ``labels (B,)``, or ``(B, C)`` where there may be several."""
        if self._bias is None and self._spec.is_plain and not self._unlabelled:
            return F.cross_entropy(logits, labels)
        return self.each(logits, labels).mean()

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Losses ``(B,)`` of ``logits (B, C)`` under ``labels (B,)`` or ``(B, C)``; zero without a label (-1)."""
        if self._bias is not None:
            logits = self._bias.added(logits)
        if self._shift is not None:
            logits = logits + self._shift
        if self._bias is not None:
            return self._of_several(logits, labels)
        losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-1)
        if self._spec.kind != "cross_entropy":
            q = 1.0 if self._spec.kind == "mae" else self._spec.q
            losses = -torch.expm1(-q * losses) / q  # (1 - p^q)/q, of -log p
        return losses if self._weights is None else losses * self._weights[labels]

    def _of_several(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over the classes of each image that are known to be present (1) or absent (0)."""
        spec = self._spec
        if spec.kind == "asymmetric":
            p = torch.sigmoid(logits)
            raised = (p - spec.margin).clamp(min=0)
            present = (1 - p) ** spec.gamma_positive * -F.logsigmoid(logits)
            absent = raised**spec.gamma_negative * -torch.log1p(-raised.clamp(max=1 - 1e-7))
        else:
            present, absent = -F.logsigmoid(logits), -F.logsigmoid(-logits)
        losses = torch.where(labels == 1, present, absent)
        return torch.where(labels >= 0, losses, 0.0).sum(dim=1)


def _class_counts(context: ClientContext) -> Tensor:
    """The client's training images by class ``(1, C)``, or present and absent ``(2, C)``."""
    names, labels = context.class_names, context.train.labels
    if labels.ndim == 2:
        return torch.stack([(labels == 1).sum(dim=0), (labels == 0).sum(dim=0)])
    return torch.bincount(labels[labels >= 0], minlength=len(names))[None]
