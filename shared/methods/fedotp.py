"""FedOTP: for each image and class a transport plan decides which patch speaks to the shared or the private context.

Source: Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated Learning" (FedOTP), CVPR
2024. The plan is unbalanced: only a share γ of the patches speaks at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.promptfl import PairLoss, PrivateContextMethod
from promptfed.shared.tensors.lazy import F, Tensor, into_graph, no_grad, torch

TINY = 1e-37  # a row of the kernel that float32 has lost: no mass goes there


@dataclass(frozen=True)
class TransportPlan:
    """Plans of many problems. None of it has a gradient.

    ``masses (..., M, N)``; ``iterations (...)`` pairs of steps, int64; ``converged (...)``, before they were used up;
    ``capped (..., M)``, the patches that carry as much as they may.
    """

    masses: Tensor
    iterations: Tensor
    converged: Tensor
    capped: Tensor


@no_grad
def unbalanced(
    similarities: Tensor, mass: float, epsilon: float, *, iterations: int = 100, threshold: float = 1e-3
) -> TransportPlan:
    """argmin ⟨1 − S, T⟩ − εH(T), at most 1/M from every patch and exactly mass/N to every prompt.

    Scaling: u ← min(1/M ⊘ (Kv), 1), v ← (mass/N) ⊘ (Kᵀu), a problem's last step always v's.
    """
    patches = similarities.shape[-2]

    def cap(kernel_v: Tensor) -> Tensor:
        return (1 / patches / kernel_v.clamp_min(TINY)).clamp_max(1)

    return _scaled(similarities, mass, epsilon, iterations, threshold, cap, start_with_u=False)


@no_grad
def balanced(similarities: Tensor, epsilon: float, *, iterations: int = 100, threshold: float = 1e-2) -> TransportPlan:
    """argmin ⟨1 − S, T⟩ − εH(T) with exactly 1/M from every patch and 1/N to every prompt (Sinkhorn's scaling)."""
    patches = similarities.shape[-2]

    def fill(kernel_v: Tensor) -> Tensor:
        return 1 / patches / kernel_v.clamp_min(TINY)

    plan = _scaled(similarities, 1.0, epsilon, iterations, threshold, fill, start_with_u=True)
    return replace(plan, capped=torch.ones_like(plan.capped))


def average(similarities: Tensor) -> TransportPlan:
    """The same mass everywhere: ⟨T, S⟩ is the mean similarity."""
    shape, device = similarities.shape, similarities.device
    return TransportPlan(
        torch.full_like(similarities.detach(), 1 / (shape[-2] * shape[-1])),
        torch.zeros(shape[:-2], dtype=torch.int64, device=device),
        torch.ones(shape[:-2], dtype=torch.bool, device=device),
        torch.zeros(shape[:-1], dtype=torch.bool, device=device),
    )


def _scaled(
    similarities: Tensor,
    mass: float,
    epsilon: float,
    iterations: int,
    threshold: float,
    u_of: Callable[[Tensor], Tensor],
    *,
    start_with_u: bool,
) -> TransportPlan:
    """T = diag(u)·K·diag(v), u and v in turn, each problem until max |v − v'| ≤ threshold·v, or ``iterations``."""
    given = similarities.detach().flatten(0, -3) if similarities.dim() > 3 else similarities.detach()
    if given.dim() == 2:
        given = given.unsqueeze(0)
    # The shift of each prompt's column is absorbed by v exactly; with it float32 holds for an ε of 0.01.
    kernel = torch.exp((given - given.amax(dim=-2, keepdim=True)) / epsilon)  # (P, M, N)
    problems, patches, prompts = kernel.shape
    share = mass / prompts
    u = kernel.new_ones(problems, patches)
    v = kernel.new_ones(problems, prompts)
    if not start_with_u:
        v = share / torch.einsum("pmn,pm->pn", kernel, u)
    used = torch.full((problems,), 0 if start_with_u else 1, dtype=torch.int64, device=kernel.device)
    active = torch.arange(problems, device=kernel.device)
    left, own_u, own_v, own_used, moving = kernel, u, v, used, torch.ones_like(used, dtype=torch.bool)
    # A GPU would have to be waited for, and a graph has the same steps for all: there later steps change nothing.
    looks = kernel.device.type == "cpu" and not into_graph()
    for _ in range(iterations - (0 if start_with_u else 1)):
        if looks and not bool(moving.any()):
            break
        if looks and not bool(moving.all()):
            u[active], v[active], used[active] = own_u, own_v, own_used
            rest = (active, left, own_u, own_v, own_used, moving)
            active, left, own_u, own_v, own_used, moving = (part[moving] for part in rest)
        next_u = u_of(torch.einsum("pmn,pn->pm", left, own_v))
        next_v = share / torch.einsum("pmn,pm->pn", left, next_u)
        going = ((next_v - own_v).abs() > threshold * next_v).any(dim=-1)
        own_u = torch.where(moving.unsqueeze(-1), next_u, own_u)
        own_v = torch.where(moving.unsqueeze(-1), next_v, own_v)
        own_used = own_used + moving
        moving = moving & going
    u[active], v[active], used[active] = own_u, own_v, own_used
    converged = torch.ones_like(used, dtype=torch.bool)
    converged[active] = ~moving
    lead = similarities.shape[:-2]
    masses = u.unsqueeze(-1) * kernel * v.unsqueeze(-2)
    return TransportPlan(
        masses.reshape(similarities.shape),
        used.reshape(lead),
        converged.reshape(lead),
        (u < 1).reshape(similarities.shape[:-1]),
    )


MOST_ENTRIES = 1 << 23  # of a plan that is made at once: images are scored in parts

PLAN_METRICS = ("transport_iterations", "transport_not_converged", "patches_at_their_cap")

Kind = Literal["unbalanced", "balanced", "average"]


@dataclass(frozen=True)
class Transport:
    """How plans are made: kind, mass γ (of unbalanced ones), entropy ε, stop, and the pooled feature's weight w."""

    kind: Kind
    mass: float
    epsilon: float
    iterations: int
    threshold: float
    pooled_weight: float = 0.0

    def plan(self, similarities: Tensor) -> TransportPlan:
        """Of similarities ``(..., M, N)``."""
        if self.kind == "average":
            return average(similarities)
        if self.kind == "balanced":
            return balanced(similarities, self.epsilon, iterations=self.iterations, threshold=self.threshold)
        return unbalanced(similarities, self.mass, self.epsilon, iterations=self.iterations, threshold=self.threshold)


@dataclass
class PlanStatistics:
    """Means over the problems of a task's steps: how hard they were, and how many patches carry all they may."""

    problems: int = 0
    patches: int = 0
    sums: Tensor | None = None  # (3,) of iterations, problems that are not finished, and capped patches: on the device

    def add(self, plan: TransportPlan) -> None:
        """Count the problems of one step."""
        self.problems += plan.iterations.numel()
        self.patches += plan.capped.numel()
        sums = torch.stack([plan.iterations.sum(), (~plan.converged).sum(), plan.capped.sum()])
        self.sums = sums if self.sums is None else self.sums + sums

    def metrics(self) -> dict[str, float]:
        """By the names that reports give them."""
        over = max(1, self.problems), max(1, self.problems), max(1, self.patches)
        sums = [0, 0, 0] if self.sums is None else self.sums.tolist()
        return {name: total / count for name, total, count in zip(PLAN_METRICS, sums, over, strict=True)}


@dataclass
class PatchTextLogits:
    """logit = q·Σ_pn T_pn·S_pn + w·q·⟨f, normalise(mean_n z̃^n)⟩, with T a constant for gradients.

    S has the cosines of patches and texts. z̃ are the texts at their own lengths, as PLOT averages them.
    """

    scale: float
    transport: Transport
    statistics: PlanStatistics = field(default_factory=PlanStatistics)

    def __call__(self, split: pf.Split, indices: Tensor, text: Tensor) -> Tensor:
        """``(B, C)`` of the images at ``indices (B,)`` and raw ``text (N, C, d_e)``, which gradients go to."""
        prompts, classes, _ = text.shape
        directions = F.normalize(text, dim=-1)
        patches = split.patches(indices)
        at_once = max(1, MOST_ENTRIES // max(1, classes * prompts * patches.shape[1]))
        parts = [self._scores(part, directions) for part in torch.split(patches, at_once)]
        logits = self.scale * (torch.cat(parts) if parts else text.new_zeros(0, classes))
        if self.transport.pooled_weight:
            pooled = split.features()[pf.sent_to(indices, text.device)]
            logits = logits + self.transport.pooled_weight * self.scale * pooled @ F.normalize(text.mean(0), dim=-1).T
        return logits

    def _scores(self, patches: Tensor, text: Tensor) -> Tensor:
        """``(B, C)`` ⟨T, S⟩ of ``patches (B, M, d_e)`` and normalised ``text (N, C, d_e)``."""
        prompts, classes, width = text.shape
        flat = patches @ text.reshape(prompts * classes, width).T  # (B, M, N·C)
        similarities = flat.reshape(*patches.shape[:2], prompts, classes).permute(0, 3, 1, 2)  # (B, C, M, N)
        plan = self.transport.plan(similarities)
        self.statistics.add(plan)
        scores: Tensor = (plan.masses * similarities).sum(dim=(-2, -1))
        return scores


class PatchTextClassifier:
    """Classifies by the patches of an image; there are no weights that plain code could use."""

    def __init__(self, context: pf.ClientContext, transport: Transport, contexts: Tensor):
        """contexts: ``(N, m, d_t)``, each before every candidate's name."""
        prompts = pf.class_prompts(context, contexts.shape[1])
        with torch.no_grad():
            self._text = context.backbone.encode_prompts(contexts, prompts, normalize=False)
        self._logits = PatchTextLogits(context.backbone.logit_scale, transport)

    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        return self._logits(split, indices, self._text)


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
