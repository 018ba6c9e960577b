"""TaskRes, federated: a residual R of the frozen text features, averaged by the coordinator.

Classes are told apart by the cosine of an image's feature with T(y) + α·R(y). R starts at zero, so that the first state
is the template's classifier; it is all that is trained and all that travels.

Source: Yu et al., "Task Residual for Tuning Vision-Language Models", CVPR 2023; the mean over clients is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F

from promptfed.shared.methods.core.context import cosine_logits
from promptfed.shared.methods.core.interface import (
    ClientContext,
    ClientUpdate,
    Combine,
    Hyperparameters,
    Method,
    MethodError,
    Phase,
    ServerContext,
    Split,
    TrainResult,
)
from promptfed.shared.methods.core.text_features import template_features
from promptfed.shared.methods.core.training import train
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.tensors import Tensors, TensorSpec

RESIDUAL = TensorSpec("residual", ("C", "d_e"))


class TaskResidualHyper(Hyperparameters):
    """TaskRes's one hyperparameter."""

    alpha: Annotated[float, Field(gt=0, le=10, description="what the residual is multiplied with")] = 0.5


def class_weights(text: Tensor, residual: Tensor, alpha: float) -> Tensor:
    """``(C, d_e)`` normalised T(y) + α·R(y) of ``text (C, d_e)`` and ``residual (C, d_e)``."""
    return F.normalize(text + alpha * residual, dim=-1)


class ResidualClassifier:
    """Cosine logits τ⁻¹·cos(I(x), T(y) + α·R(y)); a class that was not trained has no residual."""

    def __init__(self, context: ClientContext, residual: Tensor, alpha: float):
        text = template_features(context.backbone, context.template, context.class_names)
        learned = dict(zip(context.label_space or context.class_names, residual, strict=True))
        rows = [learned.get(name, torch.zeros_like(residual[0])) for name in context.class_names]
        self._text = class_weights(text, torch.stack(rows).to(text.device), alpha)
        self._scale = context.backbone.logit_scale

    def logits(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        return cosine_logits(self._scale, split.features(), indices, self._text)

    def weights(self) -> Tensors:
        """What plain code multiplies image features with: `promptfed export` writes it."""
        return {"class_weights": self._text}


class TaskResidual(Method):
    """One exchange a round: the residual down, the trained one up; the mean weighted by samples."""

    name = "task_residual"
    summary = "A residual of each class's text feature; it is all that is trained and all that travels."
    paper = "Yu et al., Task Residual for Tuning Vision-Language Models (TaskRes), CVPR 2023"
    Hyper = TaskResidualHyper
    hyper: TaskResidualHyper

    def check(self, spec: FederationSpec) -> None:
        """All clients must train the same rows, so the classes have to be the federation's."""
        if spec.class_names is None or self.hyper.label_space == "client":
            raise MethodError(f"{self.name} learns a row for each class: give class_names, and label_space federation")

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The residual."""
        return (RESIDUAL,)

    def phases(self, round: int, rounds: int) -> tuple[Phase, ...]:
        """One, whose result is a mean: robust rules may take its place."""
        return (Phase("train", down=(RESIDUAL,), up=(RESIDUAL,), mean=True),)

    def dims(self, context: ServerContext) -> dict[str, int]:
        """``C`` classes, and the width ``d_e`` of the joint embedding."""
        return {"C": len(context.class_names or ()), "d_e": context.shape.d_e}

    def initial_state(self, context: ServerContext, generator: Generator) -> Tensors:
        """Zero: round 0 is the template."""
        return {RESIDUAL.name: torch.zeros(RESIDUAL.resolve(self.dims(context)))}

    def aggregate(
        self, state: Tensors, phase: Phase, updates: Iterable[ClientUpdate], combine: Combine, context: ServerContext
    ) -> Tensors:
        """The weighted mean of the clients' residuals."""
        return combine(updates)

    def train(self, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        """E epochs of R on CE(τ⁻¹·cos(I(x), T(y) + α·R(y)))."""
        device, scale = context.backbone.device, context.backbone.logit_scale
        residual = payload[RESIDUAL.name].to(device).clone().requires_grad_()
        features, labels = context.train.features(), context.train.labels.to(device)
        text = template_features(context.backbone, context.template, context.class_names)

        def loss(indices: Tensor) -> Tensor:
            some = indices.to(device)
            weights = class_weights(text, residual, self.hyper.alpha)
            return F.cross_entropy(scale * features[some] @ weights.T, labels[some])

        final = train(context, [residual], loss)
        return TrainResult({RESIDUAL.name: residual.detach().cpu()}, metrics={"loss": final})

    def classifier(self, context: ClientContext, payload: Tensors, private: Tensors) -> ResidualClassifier:
        """Classifies with the global residual."""
        return ResidualClassifier(context, payload[RESIDUAL.name], self.hyper.alpha)
