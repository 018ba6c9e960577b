"""FedProGrad: PromptFL without the part of its gradient that opposes the template's predictions (ProGrad)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.training import train_by
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.lazy import F, torch

if TYPE_CHECKING:
    from torch import Tensor


class FedProGradHyper(pf.ContextHyper):
    """PromptFL's hyperparameters, and how the template's predictions hold its gradient."""

    weight: float = pf.option(1.0, "λ of the projection, or of the term in the loss (mode: penalty)", ge=0, le=1e6)
    mode: Literal["project", "penalty"] = pf.option(
        "project", "ProGrad's projection of the gradient, or λ·KL added to the loss and nothing projected"
    )


def projected(g_ce: Tensor, g_kl: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """G of gradients of one shape, taken as one vector each; and whether they were in conflict, a bool ``()``.

    G_ce where ⟨G_ce, G_kl⟩ ≥ 0, else G_ce − λ·⟨G_ce, Ĝ⟩·Ĝ with Ĝ = G_kl/‖G_kl‖ (ProGrad, Eq. 5).
    """
    against = g_kl.double()  # whose squares are not too small for it
    conflict = (g_ce.double() * against).sum() < 0
    along = against / torch.linalg.vector_norm(against)
    part = (weight * (g_ce.double() * along).sum() * along).to(g_ce.dtype)
    return torch.where(conflict, g_ce - part, g_ce), conflict


class TemplateLosses:
    """CE of a batch, and the cross-entropy between the template's predictions p⁰ and the context's, both means."""

    def __init__(self, context: pf.ClientContext):
        backbone = context.backbone
        self._scale, self._features = backbone.logit_scale, context.train.features()
        self._labels = context.train.labels.to(backbone.device)
        with torch.no_grad():
            known = pf.template_features(backbone, context.template, context.class_names)
            everything = torch.arange(len(context.train))
            self._known = pf.cosine_logits(self._scale, self._features, everything, known).softmax(dim=-1)

    def __call__(self, indices: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Of the images at ``indices (B,)`` and text features ``(C, d_e)``."""
        rows = pf.sent_to(indices, self._labels.device)
        logits = pf.cosine_logits(self._scale, self._features, indices, text)
        return F.cross_entropy(logits, self._labels[rows]), F.cross_entropy(logits, self._known[rows])


class FedProGrad(PromptFL):
    """The gradient of the cross-entropy, without its part against that of KL(p⁰ ‖ p), p⁰ of the template.

    Source: Zhu et al., "Prompt-aligned Gradient for Prompt Tuning" (ProGrad), ICCV 2023. Momentum and weight decay act
    on the projected gradient; KL's own constant part has no gradient and is left out.
    """

    name = "fedprograd"
    summary = "PromptFL whose gradient is projected where it works against the template's predictions."
    paper = "Zhu et al., Prompt-aligned Gradient for Prompt Tuning (ProGrad), 2023; PromptFL as above"
    unprotected = "its gradients are projected by others that are made of all of a client's images"
    Hyper = FedProGradHyper
    hyper: FedProGradHyper
    metrics = ("loss", "conflicting_steps")
    shares = ("conflicting_steps",)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the global context ``(m, d_t)``; sends the trained one."""
        backbone, weight = context.backbone, self.hyper.weight
        learned = pf.leaf(payload["context"], backbone)
        prompts, losses = pf.class_prompts(context, self.hyper.m), TemplateLosses(context)
        conflicts: list[Tensor] = []

        def penalised(indices: Tensor) -> Tensor:
            cross_entropy, to_template = losses(indices, backbone.encode_prompts(learned, prompts))
            return cross_entropy + weight * to_template

        def gradients(indices: Tensor) -> tuple[Tensor, list[Tensor]]:
            cross_entropy, to_template = losses(indices, backbone.encode_prompts(learned, prompts))
            (g_ce,) = torch.autograd.grad(cross_entropy, learned, retain_graph=True)
            (g_kl,) = torch.autograd.grad(to_template, learned)
            gradient, conflict = projected(g_ce, g_kl, weight)
            conflicts.append(conflict)
            return cross_entropy.detach(), [gradient]

        if self.hyper.mode == "penalty":
            metrics = {"loss": pf.train(context, [learned], penalised)}
        else:
            metrics = {"loss": train_by(context, [learned], gradients)}
            metrics["conflicting_steps"] = float(torch.stack(conflicts).double().mean())
        return pf.TrainResult({"context": learned}, metrics=metrics)
