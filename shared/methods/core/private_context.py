"""Base of methods in which each client trains a private context and a shared one (FedOTP, PromptFolio, Prompt+PER).

Both are trained on the client's images. The shared context is sent and averaged; the private one stays. The methods
differ in the loss and in the classifier.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

LOCAL = "local_context"
MOST_VECTORS = 64  # rows of the common draw; a private context starts with its first rows


@dataclass(frozen=True)
class PairLoss:
    """The loss of one task, and the metrics reported after training.

    ``of`` takes indices ``(B,)``, the shared context ``(m, d_t)`` and the private one ``(m_l, d_t)``.
    """

    of: Callable[[Tensor, Tensor, Tensor], Tensor]
    metrics: Callable[[], dict[str, float]] = dict


class PrivateContextMethod(pf.SharedContextMethod):
    """A shared context that is averaged, and a private one ``local_context (m_l, d_t)`` that never leaves its client.

    The private context starts from a common draw N(0, 0.02²), seeded by the federation's seed and the method's name.
    Trainers that have not trained yet classify with that start. Evaluators have no private context and classify with
    the shared one alone; trainers are also measured in this way (``global``).
    """

    personal = True
    shared = TensorSpec("global_context", ("m", "d_t"))

    def local_length(self, context: pf.ClientContext) -> int:
        """``m_l``, vectors of the private context: as many as ``m``."""
        return self.hyper.m

    def local_context(self, context: pf.ClientContext, private: Tensors) -> Tensor:
        """The client's private context ``(m_l, d_t)``: the trained one, or the common start."""
        if LOCAL in private:
            return private[LOCAL]
        drawn = torch.randn(MOST_VECTORS, context.backbone.d_t, generator=pf.generator(context.seed, self.name))
        return drawn[: self.local_length(context)] * pf.INIT_STD

    @abstractmethod
    def pair_loss(self, context: pf.ClientContext) -> PairLoss:
        """The loss of one task."""

    @abstractmethod
    def personal_classifier(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> pf.Classifier:
        """Classifies with both contexts."""

    def global_classifier(self, context: pf.ClientContext, shared: Tensor) -> pf.Classifier:
        """Classifies with the shared context ``(m, d_t)`` alone."""
        return pf.TextPromptClassifier(context, shared)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs over both contexts; sends the shared one, keeps the other."""
        backbone, batch_loss = context.backbone, self.pair_loss(context)
        shared = pf.leaf(payload[self.shared.name], backbone)
        local = pf.leaf(self.local_context(context, private), backbone)
        final = pf.train(
            context,
            [shared, local],
            lambda indices: batch_loss.of(indices, shared, local),
            reads_images=self.needs.patch_tokens,
        )
        return pf.TrainResult({self.shared.name: shared}, {LOCAL: local}, {"loss": final} | batch_loss.metrics())

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Classifies with both contexts; with the shared one alone if there are no training images."""
        shared = payload[self.shared.name]
        if private or len(context.train):
            return self.personal_classifier(context, shared, self.local_context(context, private))
        return self.global_classifier(context, shared)

    def variants(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> dict[str, pf.Classifier]:
        """``global``: the evaluators' classifier on a trainer's data."""
        if not private and not len(context.train):
            return {}
        return {"global": self.global_classifier(context, payload[self.shared.name])}
