"""FedLP (LP++): class weights are prototypes of images plus learned multiples of text features.

Logits of an image's normalised feature f are τ⁻¹·f·(w_k + α_k·t_k). LP++ has no τ, which only scales w and α. A task
descends the loss L of all its images at once by block Majorize-Minimize: steps of w and of α in turn, each of the
length 1/γ that a bound γ of L's curvature gives. So there is no learning rate, and no step increases L.
Source: Huang et al., "LP++: A Surprisingly Strong Linear Probe for Few-Shot CLIP", CVPR 2024 (arXiv 2404.02285).
Summaries were read: the bounds are derived here, and the start is ours.
"""

from __future__ import annotations

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import check_class_rows, class_means, directions, rows_of_candidates
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, Tensor, no_grad, torch

PROTOTYPES = TensorSpec("prototypes", ("classes", "d_e"))
TEXT_CHANGE = TensorSpec("text_weight_change", ("classes",))  # α − 1
MEANS = "means"  # the phase that starts the prototypes


class FedLPHyper(pf.Hyperparameters):
    """Where the prototypes start."""

    image_weight: float = pf.option(
        1.0, "length of the prototypes at the start, with text features of length 1", ge=0, le=1e3
    )


class FedLP(pf.Method):
    """In round 1 class means up; then in each round w and α both ways. A class nobody trained on is zero-shot."""

    name = "fedlp"
    summary = "A linear probe of image prototypes and weighted text features, whose steps need no learning rate."
    paper = "Huang et al., LP++: A Surprisingly Strong Linear Probe for Few-Shot CLIP, 2024, made federated"
    unprotected = "its steps have a length that follows from all images together"
    Hyper = FedLPHyper
    hyper: FedLPHyper
    defaults = pf.defaults(epochs=20)
    ignores = pf.STEPS
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed("operator", "once: the sum of your images' features of each class; then the prototypes you train"),
    )

    def check(self, spec: pf.FederationSpec) -> None:
        """A common list of classes."""
        check_class_rows(self, spec)

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """w and α − 1, both zero before the first round, which is zero-shot."""
        return (PROTOTYPES, TEXT_CHANGE)

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """w and α both ways; before that, in the first round, sums of features up."""
        train = super().phases(round, rounds)
        return train if round > 1 else (pf.Phase(MEANS, down=(), up=(PROTOTYPES,), mean=True), *train)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``classes`` and ``d_e``."""
        return {"classes": len(context.class_names or ()), "d_e": context.shape.d_e}

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """The mean; of sums of features, their directions in the length ``image_weight``."""
        after = super().aggregate(state, phase, updates, combine, context)
        if phase.name != MEANS:
            return after
        return after | {PROTOTYPES.name: self.hyper.image_weight * directions(after[PROTOTYPES.name])}

    @no_grad
    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """Sums of features, or E steps of each block."""
        if context.phase == MEANS:
            return pf.TrainResult({PROTOTYPES.name: class_means(context)})
        context.expect_images()
        device = context.backbone.device
        prototypes, change = (payload[spec.name].to(device) for spec in self.state_tensors())
        context.count_trained(prototypes.numel() + change.numel())
        problem = Problem(context)
        for _ in range(context.training.epochs):
            if context.cancelled():
                raise TaskCancelled
            prototypes = prototypes - problem.slope(prototypes, change).T @ problem.features / problem.image_bound
            change = change - (problem.slope(prototypes, change) * problem.nearness).sum(dim=0) / problem.text_bounds
        loss = float(F.cross_entropy(problem.logits(prototypes, change), problem.labels))
        return pf.TrainResult({PROTOTYPES.name: prototypes, TEXT_CHANGE.name: change}, metrics={"loss": loss})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextFeatureClassifier:
        """f·(w_k + α_k·t_k); the template for a class that was not trained."""
        text = pf.template_features(context.backbone, context.template, context.class_names)
        prototypes, change = (
            rows_of_candidates(context, payload[spec.name].to(text.device)) for spec in self.state_tensors()
        )
        return pf.TextFeatureClassifier(context.backbone.logit_scale, prototypes + (1 + change)[:, None] * text)


class Problem:
    """A client's loss L(w, α), the mean cross-entropy over its N images, and bounds of its curvature.

    The Hessian of a cross-entropy in its logits is at most ½·1. The logits are linear in w with the factor τ⁻¹·f, and
    in α_k with τ⁻¹·f·t_k. So γ_w = ½·τ⁻²·λ_max(Σ ffᵀ/N), and γ_αk = ½·τ⁻²·Σ (f·t_k)²/N bounds each α_k.
    """

    def __init__(self, context: pf.ClientContext):
        self.features, self.labels = context.train.features(), context.train.labels.to(context.backbone.device)
        text = pf.template_features(context.backbone, context.template, context.class_names)
        self.nearness = self.features @ text.T  # (N, C)
        self._scale, count = context.backbone.logit_scale, len(self.features)
        spread = float(torch.linalg.matrix_norm(self.features, ord=2)) ** 2 / count
        self.image_bound = self._scale**2 * spread / 2
        self.text_bounds = (self._scale**2 * self.nearness.square().mean(dim=0) / 2).clamp_min(1e-12)

    def logits(self, prototypes: Tensor, change: Tensor) -> Tensor:
        """``(N, C)`` of w ``(C, d_e)`` and α − 1 ``(C,)``."""
        return self._scale * (self.features @ prototypes.T + (1 + change) * self.nearness)

    def slope(self, prototypes: Tensor, change: Tensor) -> Tensor:
        """``(N, C)`` τ⁻¹·(p − y)/N: times f it is ∂L/∂w, times f·t_k it is ∂L/∂α_k."""
        shares = self.logits(prototypes, change).softmax(dim=-1)
        return self._scale * (shares - F.one_hot(self.labels, shares.shape[1])) / len(shares)
