"""FedOTP: for each image and class a transport plan decides which patch speaks to the shared or the private context.

Source: Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated Learning" (FedOTP), CVPR
2024. The plan is unbalanced: only a share γ of the patches speaks at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.patch_texts import PLAN_METRICS, PatchTextClassifier, PatchTextLogits, Transport
from promptfed.shared.methods.promptfl import PairLoss, PrivateContextMethod
from promptfed.shared.tensors.lazy import F, torch

if TYPE_CHECKING:
    from torch import Tensor


class FedOTPHyper(pf.ContextHyper):
    """A learned context, and how patches and prompts are matched."""

    gamma: float = pf.option(0.8, "γ, the mass that goes to the prompts: 1 is balanced", gt=0, le=1)
    epsilon: float = pf.option(0.1, "weight ε of the plan's entropy", ge=0.01, le=10)
    iterations: int = pf.option(100, "most pairs of scaling steps of a plan", ge=1, le=10_000)
    threshold: float = pf.option(1e-3, "relative change of a plan's column scaling at which it is done", ge=0, lt=1)
    transport: Literal["unbalanced", "balanced", "average"] = pf.option(
        "unbalanced", "the paper's plan, or its ablations: classical transport, or the mean similarity"
    )
    pooled_weight: float = pf.option(
        0.0, "weight of the pooled feature's logit beside the patches'; not FedOTP's", ge=0, le=1e3
    )


class FedOTP(PrivateContextMethod):
    """CE of q·Σ_pn T_pn·⟨g_p, z^n⟩ over both contexts n, T constant for gradients; the shared context is averaged.

    Evaluators have one prompt, the shared context's, to which all of γ goes.
    """

    name = "fedotp"
    summary = "Optimal transport between an image's patches and a shared and a private context's class features."
    paper = "Li et al., Global and Local Prompts Cooperation via Optimal Transport for Federated Learning, 2024"
    needs = pf.Needs(patch_tokens=True)
    protects = True
    Hyper = FedOTPHyper
    hyper: FedOTPHyper
    metrics = ("loss", *PLAN_METRICS)
    defaults = pf.defaults(10, epochs=5, batch_size=32, learning_rate=0.001)

    @property
    def plans(self) -> Transport:
        """How plans are made."""
        hyper = self.hyper
        how = hyper.transport, hyper.gamma, hyper.epsilon, hyper.iterations, hyper.threshold
        return Transport(*how, pooled_weight=hyper.pooled_weight)

    def pair_loss(self, context: pf.ClientContext) -> PairLoss:
        """CE over the transported similarities; both contexts are encoded in one pass."""
        backbone, prompts = context.backbone, pf.class_prompts(context, self.hyper.m)
        labels, logits = context.train.labels.to(backbone.device), PatchTextLogits(backbone.logit_scale, self.plans)

        def loss(indices: Tensor, shared: Tensor, local: Tensor) -> Tensor:
            text = backbone.encode_prompts(torch.stack([shared, local]), prompts, normalize=False)
            return F.cross_entropy(logits(context.train, indices, text), labels[pf.sent_to(indices, labels.device)])

        return PairLoss(loss, logits.statistics.metrics)

    def personal_classifier(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> PatchTextClassifier:
        """With both contexts."""
        return PatchTextClassifier(context, self.plans, torch.stack([shared.cpu(), local.cpu()]))

    def global_classifier(self, context: pf.ClientContext, shared: Tensor) -> PatchTextClassifier:
        """With the shared context as the only prompt."""
        return PatchTextClassifier(context, self.plans, shared.unsqueeze(0))
