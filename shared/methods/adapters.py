"""Adapters behind the frozen towers: FedTaskRes, FedCLIP-Adapter and FedCLIP; and FedLP, a linear probe.

FedCLIP's attention adapter weighs the coordinates of an image's embedding, a(I) = softmax(W₂·tanh(W₁I + b₁) + b₂) over
d_e, and classes are told apart by the cosine of a(I) ⊙ I with the template's text features. It is all that is trained
and all that travels. Its paper pairs each image with its own text within a batch, where other images of the same class
count as wrong. With class labels we take the cross-entropy over the classes instead, as for all compared methods.
Source: Lu et al., "FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning", 2023.

FedLP (LP++): its class weights are prototypes of images plus learned multiples of text features. Logits of an image's
normalised feature f are τ⁻¹·f·(w_k + α_k·t_k). LP++ has no τ, which only scales w and α. A task descends the loss L of
all its images at once by block Majorize-Minimize: steps of w and of α in turn, each of the length 1/γ that a bound γ of
L's curvature gives. So there is no learning rate, and no step increases L. Source: Huang et al., "LP++: A Surprisingly
Strong Linear Probe for Few-Shot CLIP", CVPR 2024 (arXiv 2404.02285). Summaries were read: the bounds are derived here,
and the start is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import check_class_rows, class_means, directions, rows_of_candidates
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, Tensor, no_grad, torch

RESIDUAL = TensorSpec("residual", ("classes", "d_e"))
Start = Literal["zero_shot", "random"]
START: Start = pf.option(
    "zero_shot", "zeros in the second layer, which is zero-shot, or random numbers as in the first"
)
BOTTLENECK = TensorSpec("image_w1", ("hidden", "d_e")), TensorSpec("image_w2", ("d_e", "hidden"))

Read = Callable[[pf.Split], "Tensor"]
"""A split's image features ``(N, d_e)``."""

ADAPTER = (
    TensorSpec("adapter_w1", ("d_e", "d_e")),
    TensorSpec("adapter_b1", ("d_e",)),
    TensorSpec("adapter_w2", ("d_e", "d_e")),
    TensorSpec("adapter_b2", ("d_e",)),
)
PROTOTYPES = TensorSpec("prototypes", ("classes", "d_e"))
TEXT_CHANGE = TensorSpec("text_weight_change", ("classes",))  # α − 1
MEANS = "means"  # the phase that starts the prototypes


class FedTaskResHyper(pf.Hyperparameters):
    """The weight of the residual."""

    alpha: float = pf.option(
        0.5, "α, weight of the residual that is added to a text feature; 0: zero-shot", ge=0, le=100
    )


class FedTaskRes(pf.Method):
    """One exchange a round: the residuals down, the trained residuals up; the mean weighted by samples.

    A class that is not one of the federation's has no residual and is classified by the template.
    """

    name = "fedtaskres"
    summary = (
        "A residual of each class's text feature; texts are encoded once, and training needs image features alone."
    )
    paper = "Yu et al., Task Residual for Tuning Vision-Language Models, 2023, made federated"
    several_labels = True
    protects = True
    Hyper = FedTaskResHyper
    hyper: FedTaskResHyper
    defaults = pf.defaults(epochs=1, batch_size=32, optimizer="adam", learning_rate=0.03, weight_decay=0)
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed(
            "operator",
            "about a mean feature of your images of each class, since the residual of a class moves towards it",
        ),
    )

    def check(self, spec: pf.FederationSpec) -> None:
        """A common list of classes."""
        check_class_rows(self, spec)

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The residuals."""
        return (RESIDUAL,)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``classes`` and ``d_e``."""
        return {"classes": len(context.class_names or ()), "d_e": context.shape.d_e}

    def class_weights(self, text: Tensor, residual: Tensor) -> Tensor:
        """(R1) ``(..., C, d_e)`` normalised t_k + α·x_k of ``text (C, d_e)`` and residuals ``(..., C, d_e)``."""
        return F.normalize(text + self.hyper.alpha * residual, dim=-1)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of CE(τ⁻¹·I·w_k) over the residuals, at the rate η/√d_e."""
        device, scale = context.backbone.device, context.backbone.logit_scale
        residual = pf.leaf(payload[RESIDUAL.name], context.backbone)
        features, labels = context.train.features(), context.train.labels.to(device)
        text = pf.template_features(context.backbone, context.template, context.class_names)
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, device)
            return loss_of(scale * features[rows] @ self.class_weights(text, residual).T, labels[rows])

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, device)
            weights = self.class_weights(text, copies[0])
            logits = scale * torch.einsum("bd,bcd->bc", features[rows], weights)
            return loss_of.each(logits, labels[rows])

        group = pf.Group([residual], relative_rate(context, text.shape[1]))
        final = pf.train(context, [], loss, groups=[group], objective=pf.Objective(units))
        return pf.TrainResult({RESIDUAL.name: residual}, metrics={"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextFeatureClassifier:
        """Cosines with the class weights."""
        text = pf.template_features(context.backbone, context.template, context.class_names)
        residual = rows_of_candidates(context, payload[RESIDUAL.name].to(text.device))
        return pf.TextFeatureClassifier(context.backbone.logit_scale, self.class_weights(text, residual))


def relative_rate(context: pf.ClientContext, width: int) -> float:
    """η/√width: a step of Adam is then about η times a typical coordinate of a normalised vector ``(width,)``."""
    return context.training.learning_rate / math.sqrt(width)


def started(specs: Sequence[TensorSpec], dims: dict[str, int], draws: Draws, start: Start) -> Tensors:
    """Layers uniform in ±1/√(inputs), drawn in order; zeros in the second half of ``specs`` but for a random start."""
    shapes = {spec.name: spec.resolve(dims) for spec in specs}
    drawn = {name: (draws.uniform(*shape) * 2 - 1) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    zero = () if start == "random" else list(drawn)[len(drawn) // 2 :]
    return drawn | {name: draws.xp.zeros_like(drawn[name]) for name in zero}


class FedCLIPAdapterHyper(pf.Hyperparameters):
    """How wide the adapter is, and how much of a feature it replaces."""

    reduction: int = pf.option(4, "the hidden layer has d_e / reduction units", ge=1, le=1024)
    alpha: float = pf.option(0.2, "α, share of A(I) in an image's feature; 0: zero-shot", ge=0, le=1)
    start: Start = START


def blended(weights: Sequence[Tensor], features: Tensor, share: float) -> Tensor:
    """(C1) ``(..., N, d_e)`` normalised s·ReLU(W₂·ReLU(W₁v)) + (1 − s)·v of ``features (..., N, d_e)``.

    ``weights``: W₁ ``(..., h, d_e)`` and W₂ ``(..., d_e, h)``.
    """
    narrow, wide = weights
    wider = torch.relu(features @ narrow.mT) @ wide.mT
    adapted = torch.maximum(wider, wider.new_zeros(()))  # a ReLU whose slope at 0 is ½: a W₂ of zeros is trained
    return F.normalize(share * adapted + (1 - share) * features, dim=-1)


class FedCLIPAdapter(pf.Method):
    """One exchange a round: the adapters down, the trained adapters up; the mean weighted by samples."""

    name = "fedclipadapter"
    summary = "A bottleneck network behind the frozen image tower, whose output is blended with the feature."
    paper = "Gao et al., CLIP-Adapter: Better Vision-Language Models with Feature Adapters, 2021, made federated"
    several_labels = True
    protects = True
    Hyper = FedCLIPAdapterHyper
    hyper: FedCLIPAdapterHyper
    defaults = pf.defaults(epochs=5, batch_size=32, optimizer="adam", learning_rate=0.1, weight_decay=0)
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed(
            "operator",
            "features of single images: the adapter's gradients are sums of multiples of them, and a coordinator that "
            "chooses the adapter can read some out of an update",
        ),
    )

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The adapter."""
        return BOTTLENECK

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``d_e`` and ``hidden``."""
        return {"d_e": context.shape.d_e, "hidden": max(1, context.shape.d_e // self.hyper.reduction)}

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """Every weight uniform in ±1/√(its inputs), as linear layers usually start; by default zeros in W₂."""
        return started(BOTTLENECK, self.dims(context), draws, self.hyper.start)

    def images(self, adapter: Tensors, features: Tensor) -> Tensor:
        """Image features ``(..., N, d_e)`` behind the adapter."""
        return blended([adapter[spec.name] for spec in BOTTLENECK], features, self.hyper.alpha)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of the adapter on the cross-entropy, each matrix at the rate η/√(its inputs)."""
        device, scale = context.backbone.device, context.backbone.logit_scale
        adapter = pf.leaves(payload, context.backbone)
        features, labels = context.train.features(), context.train.labels.to(device)
        text = pf.template_features(context.backbone, context.template, context.class_names)
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, device)
            logits = scale * self.images(adapter, features[rows]) @ text.T
            return loss_of(logits, labels[rows])

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            rows, own = pf.sent_to(indices, device), dict(zip(adapter, copies, strict=True))
            images = self.images(own, features[rows].unsqueeze(1))
            logits = scale * (images @ text.T).squeeze(1)
            return loss_of.each(logits, labels[rows])

        groups = [pf.Group([matrix], relative_rate(context, matrix.shape[-1])) for matrix in adapter.values()]
        final = pf.train(context, [], loss, groups=groups, objective=pf.Objective(units))
        return pf.TrainResult(adapter, metrics={"loss": final})

    @no_grad
    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Cosines of adapted features."""
        backbone = context.backbone
        adapter = {name: tensor.to(backbone.device) for name, tensor in payload.items()}
        text = pf.template_features(backbone, context.template, context.class_names)
        return pf.FeatureClassifier(lambda features: backbone.logit_scale * self.images(adapter, features) @ text.T)


class FedCLIPHyper(pf.Hyperparameters):
    """What the adapter sees and where it starts; it is as wide as the embeddings."""

    features: Literal["raw", "normalized"] = pf.option(
        "raw", "image features as the tower gives them, which the released code adapts, or on the unit sphere"
    )
    start: Start = START


def attended(adapter: Tensors, features: Tensor) -> Tensor:
    """``(B, d_e)`` normalised a(I) ⊙ I of image ``features (B, d_e)`` of any length."""
    w1, b1, w2, b2 = (adapter[spec.name] for spec in ADAPTER)
    attention = F.linear(torch.tanh(F.linear(features, w1, b1)), w2, b2).softmax(dim=-1)
    return F.normalize(attention * features, dim=-1)


def attended_each(adapters: Tensors, features: Tensor) -> Tensor:
    """`attended` of each row of ``features (b, d_e)`` by an adapter of its own, ``adapters`` of ``(b, *shape)``."""
    w1, b1, w2, b2 = (adapters[spec.name] for spec in ADAPTER)
    hidden = torch.tanh(torch.einsum("bij,bj->bi", w1, features) + b1)
    attention = (torch.einsum("bij,bj->bi", w2, hidden) + b2).softmax(dim=-1)
    return F.normalize(attention * features, dim=-1)


class FedCLIP(pf.Method):
    """One exchange a round: the adapter down, the trained adapter up; the mean weighted by samples."""

    name = "fedclip"
    summary = "An attention adapter behind the frozen image tower; the adapter is all that is trained and travels."
    paper = "Lu et al., FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning, 2023"
    several_labels = True
    protects = True
    Hyper = FedCLIPHyper
    hyper: FedCLIPHyper
    defaults = pf.defaults(20, epochs=3, batch_size=32, optimizer="adam", learning_rate=4e-4, weight_decay=0)
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed(
            "operator",
            "features of single images: the adapter's gradients are multiples of them, and a coordinator that "
            "chooses the adapter can read them out of an update nearly exactly",
        ),
    )

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The adapter."""
        return ADAPTER

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``d_e``."""
        return {"d_e": context.shape.d_e}

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """Every entry uniform in ±1/√d_e, as linear layers usually start; by default zeros in the second layer.

        All coordinates weigh the same then, which is zero-shot.
        """
        return started(ADAPTER, self.dims(context), draws, self.hyper.start)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of the adapter on CE(τ⁻¹·cos(a(I) ⊙ I, T(y)))."""
        device = context.backbone.device
        adapter = pf.leaves(payload, context.backbone)
        features, labels = self._read(context.train), context.train.labels.to(device)
        text = pf.template_features(context.backbone, context.template, context.class_names)
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            some = pf.sent_to(indices, device)
            logits = context.backbone.logit_scale * attended(adapter, features[some]) @ text.T
            return loss_of(logits, labels[some])

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            some, own = pf.sent_to(indices, device), dict(zip(adapter, copies, strict=True))
            logits = context.backbone.logit_scale * attended_each(own, features[some]) @ text.T
            return loss_of.each(logits, labels[some])

        final = pf.train(context, list(adapter.values()), loss, objective=pf.Objective(units))
        return pf.TrainResult(adapter, metrics={"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.FeatureClassifier:
        """Classifies by τ⁻¹·cos(a(I) ⊙ I, T(y)) with the global adapter."""
        backbone = context.backbone
        adapter = {name: tensor.to(backbone.device) for name, tensor in payload.items()}
        text = pf.template_features(backbone, context.template, context.class_names)
        return pf.FeatureClassifier(
            lambda features: backbone.logit_scale * attended(adapter, features) @ text.T, self._read
        )

    def _read(self, split: pf.Split) -> Tensor:
        return split.raw_features() if self.hyper.features == "raw" else split.features()


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
