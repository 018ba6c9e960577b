"""Logits of image patches against several text features of each class, weighed by a transport plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.transport import TransportPlan, average, balanced, unbalanced
from promptfed.shared.tensors.lazy import F, torch

if TYPE_CHECKING:
    from torch import Tensor

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
