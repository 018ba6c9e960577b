"""DP-FPL: a shared context, and each client's own context, which moves along low-rank factors of itself.

Source: Tran, Sun, Patterson, Milanova, "Privacy-Preserving Personalized Federated Prompt Learning for Multimodal Large
Language Models" (DP-FPL), ICLR 2025. Before each step the private context is split into two orthonormal factors and a
constant residual. The factors' gradients make its step. The paper's noise is added to these gradients. It comes with
no accountant and clips a batch's gradient, not an image's: `paper_epsilon` reproduces it for the paper's figures.
Under ``privacy.level: sample`` the shared context and the factors are trained by DP-SGD, in one norm, and the client's
ledger counts the cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.private_context import LOCAL
from promptfed.shared.methods.core.training import Reparameterisation, train_by, train_through
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

SHORTER = 10.0  # the released code divides the factors' gradients by it
PAPER_DELTA = 1e-5  # δ in the released code's noise


class DPFPLHyper(pf.ContextHyper):
    """A learned context, the factors of the private one, and the paper's noise."""

    b: int = pf.option(8, "rank b of the private context's factors u·v", ge=1, le=64)
    factorise: Literal["every_step", "every_task"] = pf.option(
        "every_step",
        "every_step: the released update, by gradients of both factors, the residual constant; "
        "every_task: factors once per task, then factors and residual are all trained",
    )
    paper_epsilon: float | None = pf.option(
        None,
        "ε in the released code's noise on the gradients of u and v (its --noise): smaller is noisier; "
        "it guarantees nothing, and is not for privacy.level sample",
        gt=0,
        le=1e6,
    )
    paper_clip: float = pf.option(10.0, "with paper_epsilon: length to which gradients are shortened", gt=0, le=1000)

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        """An older spec's ``paper_noise`` was no ε, so its value means something else today."""
        if isinstance(given, dict) and "paper_noise" in given:
            raise ValueError("paper_noise is gone: the released code's --noise is an ε; give it as paper_epsilon")
        return given


class DPFPL(pf.SharedContextMethod):
    """L = CE(p_G + p_L) with p_L = u·v + r; p_G is averaged, p_L stays at its client."""

    name = "dpfpl"
    summary = "A shared context, and a private one that moves along its low-rank factors, under noise."
    paper = "Tran et al., Privacy-Preserving Personalized Federated Prompt Learning for Multimodal LLMs (DP-FPL), 2025"
    personal = True
    protects = True
    Hyper = DPFPLHyper
    hyper: DPFPLHyper
    shared = TensorSpec("global_context", ("m", "d_t"))
    defaults = pf.defaults(100, epochs=1, learning_rate=0.001)

    def check(self, spec: pf.FederationSpec) -> None:
        """The paper's noise beside the sound one would protect nothing more."""
        super().check(spec)
        if self.hyper.paper_epsilon is not None and spec.privacy.level == "sample":
            raise pf.MethodError(
                "paper_epsilon is a reproduction that no accountant counts, and privacy.level sample has noise of its "
                "own: leave paper_epsilon out"
            )

    def local_context(self, context: pf.ClientContext, private: Tensors) -> Tensor:
        """The client's ``p_L (m, d_t)``: what it has trained, or its own start from N(0, 0.02²)."""
        if LOCAL in private:
            return private[LOCAL]
        draws = pf.generator(context.seed, self.name, context.client)
        return torch.randn(self.hyper.m, context.backbone.d_t, generator=draws) * pf.INIT_STD

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs over both contexts; sends the shared one alone."""
        shared = pf.leaf(payload[self.shared.name], context.backbone)
        local = self.local_context(context, private).to(context.backbone.device).clone()
        steps = self._by_task if self.hyper.factorise == "every_task" else self._by_step
        trained, final = steps(context, shared, local)
        return pf.TrainResult({self.shared.name: shared}, {LOCAL: trained}, {"loss": final})

    def _by_step(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> tuple[Tensor, float]:
        """The released update: p_L by `step_along` new factors of itself. Returns p_L and the loss."""
        draws = pf.generator(context.seed, self.name, context.client, context.round, "factors")
        rank, noise = min(self.hyper.b, *local.shape), self._noise(context)
        u, v = (torch.zeros_like(part, requires_grad=True) for part in (local[:, :rank], local[:rank]))
        r = torch.zeros_like(local)

        def renew() -> None:
            with torch.no_grad():
                for part, new in zip((u, v, r), orthonormal_factors(local, self.hyper.b, draws), strict=True):
                    part.copy_(new)

        def gradients(given: Sequence[Tensor]) -> Sequence[Tensor]:
            of_shared, of_u, of_v = given if noise is None else noise(given)
            return [of_shared, step_along(u.detach(), v.detach(), of_u, of_v)]

        through = Reparameterisation([shared, u, v], renew, gradients)
        loss, objective = self._losses(context, through.tensors, r)
        return local, train_through(context, [shared, local], loss, objective, through)

    def _by_task(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> tuple[Tensor, float]:
        """Factors once, then p_G, u, v and r all trained. Returns p_L and the loss."""
        draws = pf.generator(context.seed, self.name, context.client, context.round, "factors")
        own = [part.requires_grad_() for part in exact_factors(local, self.hyper.b, draws)]
        parameters, noise = [shared, *own], self._noise(context)
        loss, objective = self._losses(context, parameters)

        def noisy(indices: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            assert noise is not None
            value = loss(indices)
            *others, of_r = torch.autograd.grad(value, parameters)
            return value, [*noise(others), of_r]

        if noise is None:
            final = pf.train(context, parameters, loss, objective=objective)
        else:
            final = train_by(context, parameters, noisy)
        u, v, r = own
        return u @ v + r, final

    def _losses(
        self, context: pf.ClientContext, tensors: Sequence[Tensor], *constant: Tensor
    ) -> tuple[Any, pf.Objective]:
        """The batch's loss over ``tensors``, and each image's over copies of them; ``constant`` r is copied nowhere."""
        prompts, cross_entropy = pf.class_prompts(context, self.hyper.m), pf.BatchCrossEntropy(context)

        def loss(indices: Tensor) -> Tensor:
            return cross_entropy(indices, context.backbone.encode_prompts(personal(*tensors, *constant), prompts))

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            return cross_entropy.each(indices, context.backbone.encode_prompts(personal(*copies, *constant), prompts))

        return loss, pf.Objective(units)

    def _noise(self, context: pf.ClientContext) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        """From a batch's gradients of p_G, u and v the released code's: all shortened, u's and v's with noise."""
        if self.hyper.paper_epsilon is None or context.protection is not None:
            return None
        draws = pf.generator(context.seed, self.name, context.client, context.round, "paper's noise")
        clip = self.hyper.paper_clip
        std = paper_std(self.hyper.paper_epsilon, clip, context.rounds, context.training.batch_size)

        def noisy(gradients: Sequence[Tensor]) -> list[Tensor]:
            shared, *factors = (shortened(part, clip) for part in gradients)
            return [shared, *(part + std * drawn_like(part, draws) for part in factors)]

        return noisy

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Classifies with p_G + p_L; with p_G where there is nothing to train on."""
        learned = payload[self.shared.name]
        if private or len(context.train):
            learned = learned + self.local_context(context, private)
        return pf.TextPromptClassifier(context, learned)


def personal(shared: Tensor, u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """p_G + u·v + r ``(..., m, d_t)``."""
    return shared + u @ v + r


def orthonormal_factors(local: Tensor, b: int, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """u ``(m, b)`` of orthonormal columns, v ``(b, d_t)`` of orthonormal rows, and r = ``local (m, d_t)`` − u·v.

    u spans ``local``·Ω for a standard normal Ω ``(d_t, b)``, and v's rows span ``local``ᵀ·u: one step of the power
    method from both sides. b is at most m and d_t.
    """
    exact = local.detach().double()
    u, _ = torch.linalg.qr(exact @ _start(exact, b, draws))
    v = torch.linalg.qr(exact.T @ u)[0].T
    return _as(local, u), _as(local, v), _as(local, exact - u @ v)


def exact_factors(local: Tensor, b: int, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """As `orthonormal_factors`, but v = uᵀ·``local``: u·v is ``local``'s projection on u's columns."""
    exact = local.detach().double()
    u, _ = torch.linalg.qr(exact @ _start(exact, b, draws))
    u, v = _as(local, u), _as(local, u.T @ exact)
    return u, v, local - u @ v


def step_along(u: Tensor, v: Tensor, of_u: Tensor, of_v: Tensor) -> Tensor:
    """The released gradient of the private context ``(m, d_t)``, of its factors' gradients.

    With orthonormal factors and G the whole gradient it is (G·vᵀv + uuᵀ·G + uuᵀ·G·vᵀv)/10. The projection of G on the
    tangent space at u·v has a minus before the third term.
    """
    along = of_u @ v
    return (along + u @ of_v + u @ (u.T @ along)) / SHORTER


def paper_std(epsilon: float, clip: float, rounds: int, batch_size: int) -> float:
    """Standard deviation √(R·ln(1/δ))·C/(ε·B) of the released code's noise, with δ = 1e-5."""
    return math.sqrt(rounds * math.log(1 / PAPER_DELTA)) * clip / (epsilon * batch_size)


def shortened(gradient: Tensor, clip: float) -> Tensor:
    """``gradient`` at length ``clip`` at most."""
    short: Tensor = gradient * (clip / gradient.norm().clamp_min(1e-30)).clamp_max(1.0)
    return short


def drawn_like(tensor: Tensor, draws: torch.Generator) -> Tensor:
    """N(0, 1) in the shape of ``tensor``, drawn on the CPU."""
    return pf.sent_to(torch.randn(tensor.shape, generator=draws), tensor.device)


def _start(local: Tensor, b: int, draws: torch.Generator) -> Tensor:
    drawn = torch.randn(local.shape[1], min(b, *local.shape), generator=draws, dtype=local.dtype)
    return pf.sent_to(drawn, local.device)


def _as(like: Tensor, tensor: Tensor) -> Tensor:
    return tensor.to(like.dtype)
