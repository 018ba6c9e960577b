"""DP-FPL: a shared context, and each client's own as low-rank factors and a residual, trained under noise.

Source: Tran, Sun, Patterson, Milanova, "Privacy-Preserving Personalized Federated Prompt Learning for Multimodal Large
Language Models" (DP-FPL), ICLR 2025. Its noise goes on the factors' gradients at a client and on the shared context's
at the server. What it adds has no accountant, leaves the residual in the clear, and clips a batch's gradient, not a
record's: `paper_noise` reproduces that, for its figures. Under ``privacy.level: sample`` all four tensors are trained
by DP-SGD instead, in one norm, and the client's ledger says what that costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from promptfed.shared.methods.core.base import Classifier, ClientContext, MethodError, TrainResult
from promptfed.shared.methods.core.context import (
    INIT_STD,
    BatchCrossEntropy,
    ContextHyper,
    SharedContextMethod,
    TextPromptClassifier,
    class_prompts,
)
from promptfed.shared.methods.core.private_context import LOCAL
from promptfed.shared.methods.core.protection import Objective
from promptfed.shared.methods.core.training import train, train_by
from promptfed.shared.seeds import generator
from promptfed.shared.spec import FederationSpec
from promptfed.shared.tensors import Tensors, TensorSpec


class DPFPLHyper(ContextHyper):
    """A learned context, the rank of the private one's factors, and the paper's noise."""

    b: Annotated[int, Field(ge=1, le=64, description="rank b of the private context's factors u·v")] = 8
    paper_noise: Annotated[
        float | None,
        Field(
            ge=0,
            le=1000,
            description="the paper's noise on the gradients of u and v, in multiples of paper_clip; it guarantees "
            "nothing, and is not for privacy.level sample",
        ),
    ] = None
    paper_clip: Annotated[float, Field(gt=0, le=1000, description="length to which these gradients are shortened")] = (
        10.0
    )


class DPFPL(SharedContextMethod):
    """L = CE(p_G + p_L) with p_L = u·v + r, factorised anew in each task; p_G travels, p_L stays."""

    name = "dpfpl"
    summary = "A shared context, and a private one in low-rank factors and a residual, under noise."
    paper = "Tran et al., Privacy-Preserving Personalized Federated Prompt Learning for Multimodal LLMs (DP-FPL), 2025"
    personal = True
    protects = True
    Hyper = DPFPLHyper
    hyper: DPFPLHyper
    shared = TensorSpec("global_context", ("m", "d_t"))
    defaults: ClassVar[dict[str, Any]] = {
        "rounds": 100,
        "training": {"epochs": 1, "learning_rate": 0.001},
    }

    def check(self, spec: FederationSpec) -> None:
        """The paper's noise beside the sound one would protect nothing more."""
        super().check(spec)
        if self.hyper.paper_noise is not None and spec.privacy.level == "sample":
            raise MethodError(
                "paper_noise is a reproduction that no accountant counts, and privacy.level sample has noise of its "
                "own: leave paper_noise out"
            )

    def local_context(self, context: ClientContext, private: Tensors) -> Tensor:
        """The client's ``p_L (m, d_t)``: what it has trained, or its own start from N(0, 0.02²)."""
        if LOCAL in private:
            return private[LOCAL]
        draws = generator(context.seed, self.name, context.client)
        return torch.randn(self.hyper.m, context.backbone.d_t, generator=draws) * INIT_STD

    def train(self, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        """E epochs over p_G, u, v and r; sends the shared context alone."""
        backbone = context.backbone
        draws = generator(context.seed, self.name, context.client, context.round, "factors")
        factors = factorised(self.local_context(context, private), self.hyper.b, draws)
        parameters = [
            part.to(backbone.device).clone().requires_grad_() for part in (payload[self.shared.name], *factors)
        ]
        prompts, cross_entropy = class_prompts(context, self.hyper.m), BatchCrossEntropy(context)

        def loss(indices: Tensor) -> Tensor:
            return cross_entropy(indices, backbone.encode_prompts(personal(parameters), prompts))

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            return cross_entropy.each(indices, backbone.encode_prompts(personal(copies), prompts))

        if self.hyper.paper_noise is None or context.protection is not None:
            final = train(context, parameters, loss, objective=Objective(units))
        else:
            final = train_by(context, parameters, self._paper(context, parameters, loss))
        shared, u, v, r = (part.detach().cpu() for part in parameters)
        return TrainResult({self.shared.name: shared}, {LOCAL: u @ v + r}, {"loss": final})

    def _paper(self, context: ClientContext, parameters: Sequence[Tensor], loss: Any) -> Any:
        """The batch's gradients: those of p_G, u and v shortened, u's and v's with noise, r's as it is."""
        draws = generator(context.seed, self.name, context.client, context.round, "paper's noise")
        clip, level = self.hyper.paper_clip, self.hyper.paper_noise or 0.0

        def gradients(indices: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            value = loss(indices)
            shared, u, v, r = torch.autograd.grad(value, list(parameters))
            noisy = [shortened(part, clip) + level * clip * drawn_like(part, draws) for part in (u, v)]
            return value, [shortened(shared, clip), *noisy, r]

        return gradients

    def classifier(self, context: ClientContext, payload: Tensors, private: Tensors) -> Classifier:
        """Classifies with p_G + p_L; with p_G where there is nothing to train on."""
        learned = payload[self.shared.name]
        if private or len(context.train):
            learned = learned + self.local_context(context, private)
        return TextPromptClassifier(context.backbone, learned, class_prompts(context, self.hyper.m))


def personal(parameters: Sequence[Tensor]) -> Tensor:
    """p_G + u·v + r ``(..., m, d_t)`` of p_G, u, v and r."""
    shared, u, v, r = parameters
    return shared + u @ v + r


def factorised(local: Tensor, b: int, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """u ``(m, b)`` of orthonormal columns, v ``(b, d_t)`` and r ``(m, d_t)`` with u·v + r = ``local (m, d_t)``.

    One step of the power method from a random start (PowerSGD: Vogels et al., 2019); b is at most m and d_t.
    """
    rank = min(b, *local.shape)
    exact = local.double()
    start = torch.randn(local.shape[1], rank, generator=draws, dtype=torch.float64)
    u, _ = torch.linalg.qr(exact @ start)
    v = u.T @ exact
    return u.float(), v.float(), local - u.float() @ v.float()


def shortened(gradient: Tensor, clip: float) -> Tensor:
    """``gradient`` at length ``clip`` at most."""
    return gradient * min(1.0, clip / max(float(gradient.norm()), 1e-30))


def drawn_like(tensor: Tensor, draws: torch.Generator) -> Tensor:
    """N(0, 1) in the shape of ``tensor``, drawn on the CPU."""
    return torch.randn(tensor.shape, generator=draws).to(tensor.device)
