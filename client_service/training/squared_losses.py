"""The sum of squared losses that a client reports where the federation chooses its clients by it."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from promptfed.client_service.training.data import TRAIN, ClientData
from promptfed.client_service.training.evaluation import logits_of
from promptfed.shared.methods.core.interface.base import ClientContext, Method
from promptfed.shared.spec.participation import SQUARED_LOSSES
from promptfed.shared.tensors import Tensors


def squared_losses(
    method: Method, context: ClientContext, data: ClientData, payload: Tensors, private: Tensors
) -> dict[str, float]:
    """Σ loss² over the training images, of the classifier from which training starts; nothing if nobody asks for it.

    The loss of an image is the cross-entropy. Of several labels it is the mean binary one over the known labels.
    Images without a label count zero.

    Raises:
        TaskCancelled: the task was withdrawn meanwhile.
    """
    if not context.terms.squared_losses:
        return {}
    split, total = data.split(TRAIN, context.class_names), 0.0
    with torch.no_grad():
        classifier, begin = method.classifier(context, payload, private), 0
        for logits in logits_of(classifier, split, context.cancelled):
            labels = split.labels[begin : begin + len(logits)]
            begin += len(logits)
            scores = logits.double().cpu()
            if labels.ndim == 1:
                losses = F.cross_entropy(scores, labels, reduction="none", ignore_index=-1)
            else:
                known = (labels >= 0).double()
                each = F.binary_cross_entropy_with_logits(scores, labels.clamp(min=0).double(), reduction="none")
                losses = (each * known).sum(dim=1) / known.sum(dim=1).clamp(min=1)
            total += float((losses**2).sum())
    return {SQUARED_LOSSES: total}
