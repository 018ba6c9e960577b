"""PromptFolio: a fixed mixture of the text features of a shared and a private context.

Source: Pan et al., "Federated Learning from Vision-Language Foundation Models: Theoretical Analysis and Method"
(PromptFolio), NeurIPS 2024.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.context import BatchCrossEntropy, ContextHyper, TextFeatureClassifier, class_prompts
from promptfed.shared.methods.core.private_context import PairLoss, PrivateContextMethod


class PromptFolioHyper(ContextHyper):
    """A learned context and how much the private one counts."""

    theta: Annotated[
        float,
        Field(ge=0, le=1, description="share θ of the private context's text features; 0: all shared, 1: all private"),
    ] = 0.4


def mixed(text: Tensor, theta: float) -> Tensor:
    """h = (1 − θ)·z^G + θ·z^L ``(C, d_e)`` of normalised ``text (2, C, d_e)``; not normalised again."""
    return (1 - theta) * text[0] + theta * text[1]


class MixtureLoss(PairLoss):
    """CE of τ⁻¹·⟨I(x), h⟩."""

    def __init__(self, context: pf.ClientContext, m: int, theta: float):
        self._backbone, self._theta = context.backbone, theta
        self._prompts, self._cross_entropy = class_prompts(context, m), BatchCrossEntropy(context)

    def __call__(self, indices: Tensor, shared: Tensor, local: Tensor) -> Tensor:
        """Both contexts ``(m, d_t)`` are encoded in one pass."""
        text = self._backbone.encode_prompts(torch.stack([shared, local]), self._prompts)
        return self._cross_entropy(indices, mixed(text, self._theta))


class PromptFolio(PrivateContextMethod):
    """CE of τ⁻¹·⟨I(x), (1 − θ)·z^G + θ·z^L⟩, trained over both contexts; the shared one is averaged."""

    name = "promptfolio"
    summary = "A fixed mixture of the text features of a shared context and of each client's private one."
    paper = "Pan et al., Federated Learning from Vision-Language Foundation Models (PromptFolio), 2024"
    protects = True
    Hyper = PromptFolioHyper
    hyper: PromptFolioHyper
    defaults: ClassVar[dict[str, Any]] = {
        "rounds": 10,
        "training": {"epochs": 5, "batch_size": 16, "learning_rate": 0.002},
    }

    def pair_loss(self, context: pf.ClientContext) -> MixtureLoss:
        """CE over the mixture's logits."""
        return MixtureLoss(context, self.hyper.m, self.hyper.theta)

    def personal_classifier(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> TextFeatureClassifier:
        """Logits (1 − θ)·logit^G + θ·logit^L."""
        backbone, prompts = context.backbone, class_prompts(context, self.hyper.m)
        with torch.no_grad():
            text = backbone.encode_prompts(torch.stack([shared, local]), prompts)
        return TextFeatureClassifier(backbone.logit_scale, mixed(text, self.hyper.theta))
