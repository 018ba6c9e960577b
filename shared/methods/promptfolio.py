"""PromptFolio: a fixed mixture of the text features of a shared and a private context.

Source: Pan et al., "Federated Learning from Vision-Language Foundation Models: Theoretical Analysis and Method"
(PromptFolio), NeurIPS 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.promptfl import PairLoss, PrivateContextMethod
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class PromptFolioHyper(pf.ContextHyper):
    """A learned context and how much the private one counts."""

    theta: float = pf.option(
        0.4, "share θ of the private context's text features; 0: all shared, 1: all private", ge=0, le=1
    )


def mixed(text: Tensor, theta: float) -> Tensor:
    """h = (1 − θ)·z^G + θ·z^L ``(C, d_e)`` of normalised ``text (2, C, d_e)``; not normalised again."""
    return (1 - theta) * text[0] + theta * text[1]


class PromptFolio(PrivateContextMethod):
    """CE of τ⁻¹·⟨I(x), (1 − θ)·z^G + θ·z^L⟩, trained over both contexts; the shared one is averaged."""

    name = "promptfolio"
    summary = "A fixed mixture of the text features of a shared context and of each client's private one."
    paper = "Pan et al., Federated Learning from Vision-Language Foundation Models (PromptFolio), 2024"
    several_labels = True
    protects = True
    Hyper = PromptFolioHyper
    hyper: PromptFolioHyper
    defaults = pf.defaults(10, epochs=5, batch_size=16, learning_rate=0.002)

    def pair_loss(self, context: pf.ClientContext) -> PairLoss:
        """CE of τ⁻¹·⟨I(x), h⟩; both contexts are encoded in one pass."""
        prompts, cross_entropy = pf.class_prompts(context, self.hyper.m), pf.BatchCrossEntropy(context)

        def loss(indices: Tensor, shared: Tensor, local: Tensor) -> Tensor:
            text = context.backbone.encode_prompts(torch.stack([shared, local]), prompts)
            return cross_entropy(indices, mixed(text, self.hyper.theta))

        return PairLoss(loss)

    def personal_classifier(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> pf.TextFeatureClassifier:
        """Logits (1 − θ)·logit^G + θ·logit^L."""
        backbone, prompts = context.backbone, pf.class_prompts(context, self.hyper.m)
        with torch.no_grad():
            text = backbone.encode_prompts(torch.stack([shared, local]), prompts)
        return pf.TextFeatureClassifier(backbone.logit_scale, mixed(text, self.hyper.theta))
