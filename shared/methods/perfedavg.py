"""Per-FedAvg: weights from which one step on a client's own images leads far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import Head, LinearHead
from promptfed.shared.methods.core.tower import TrainedTower, WeightMethod, WeightsHyper
from promptfed.shared.methods.core.training import TaskCancelled, batches, group_rate, learning_rate
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.lazy import F, torch

if TYPE_CHECKING:
    from torch import Tensor

BatchLoss = Callable[["Tensor"], "Tensor"]
DELTA = 1e-3  # of the finite difference


class PerFedAvgHyper(WeightsHyper):
    """FedAvg's hyperparameters, the two rates, and how long a client adapts."""

    inner_learning_rate: float | None = pf.option(
        None,
        "α, of the step that is looked ahead; default: the training's. A linear head has "
        "head_learning_rate in both steps",
        gt=0,
        le=1000,
    )
    adapt_steps: int = pf.option(1, "steps of rate α on own training images before a trainer classifies", ge=1, le=1000)
    hessian: bool = pf.option(False, "the Hessian's product with the gradient as well, by a finite difference")


class PerFedAvg(WeightMethod):
    """Consecutive batches B, B′: W̃ = W − α∇L_B(W), then W ← W − β∇L_B′(W̃), β the training's rate. Plain SGD.

    A linear head moves at its own rate in both steps.

    Source: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees", NeurIPS 2020 (first order;
    with ``hessian`` its finite-difference variant). Trainers classify with a copy adapted on own training images,
    which is not kept; evaluators with the global weights.
    """

    name = "perfedavg"
    summary = "Image tower weights from which one step on a client's own images leads far (first-order MAML)."
    paper = "Fallah et al., Personalized Federated Learning with Theoretical Guarantees (Per-FedAvg), 2020"
    Hyper = PerFedAvgHyper
    hyper: PerFedAvgHyper
    personal = True
    defaults = WeightMethod.defaults | pf.defaults(
        optimizer="sgd", learning_rate=1e-3, momentum=0.0, weight_decay=0.0, batch_size=32, epochs=1
    )

    def check(self, spec: pf.FederationSpec) -> None:
        """The steps are plain ones."""
        super().check(spec)
        training = spec.training
        if training.optimizer != "sgd" or training.momentum or training.weight_decay:
            raise pf.MethodError("perfedavg takes plain steps: leave out optimizer, momentum and weight_decay")

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs over pairs of batches; a last one without a partner is left out."""
        tower = self.tower(context, payload, private).trainable()
        begun = self.start_head(context, payload, private)
        head = begun.trainable(context.backbone.device)
        count, size = len(context.train), context.training.batch_size
        if math.ceil(count / size) < 2:
            raise pf.MethodError(
                f"perfedavg needs two batches, and client {context.client!r} has {count} images in batches of {size}: "
                "lower training.batch_size"
            )
        loss, parameters = self._loss(context, tower, head), [*tower.leaves.values(), *head.parameters]
        alphas, betas = self._rates(context, tower, head)
        context.count_trained(sum(parameter.numel() for parameter in parameters))
        values: list[Tensor] = []
        for epoch in range(context.training.epochs):
            draws = pf.generator(context.seed, context.round, context.phase, context.client, "batches", epoch)
            given = list(batches(count, size, 1, draws))
            values = []
            for first, second in zip(given[::2], given[1::2], strict=False):
                if context.cancelled():
                    raise TaskCancelled
                context.progress((epoch + 2 * len(values) / len(given)) / context.training.epochs)
                values.append(step(loss, parameters, first, second, alphas, betas, hessian=self.hyper.hessian))
        mean = float(torch.stack(values).double().mean())
        if not math.isfinite(mean):
            raise pf.MethodError(f"the loss is not finite in round {context.round}: lower training.learning_rate")
        return pf.TrainResult(self.sent(tower, head, begun), self.kept(tower, head), {"loss": mean})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """With the copy that ``adapt_steps`` on own training images lead to; evaluators with the global weights."""
        if not len(context.train):
            return super().classifier(context, payload, private)
        own = context.for_training()
        with torch.enable_grad():  # evaluations run without gradients
            tower = self.tower(own, payload, private).trainable()
            begun = self.start_head(own, payload, private)
            head = begun.trainable(own.backbone.device)
            loss, parameters = self._loss(own, tower, head), [*tower.leaves.values(), *head.parameters]
            draws = pf.generator(own.seed, own.round, own.client, "adapt")
            alphas, _ = self._rates(own, tower, head)
            endless = batches(len(own.train), own.training.batch_size, self.hyper.adapt_steps, draws)
            for _, indices in zip(range(self.hyper.adapt_steps), endless, strict=False):
                descend(parameters, torch.autograd.grad(loss(indices), parameters), alphas)
        if not isinstance(head, LinearHead):
            head = self.start_head(context, payload, private)
        return self.classify(tower, head, context)

    def _rates(self, context: pf.ClientContext, tower: TrainedTower, head: Head) -> tuple[list[float], list[float]]:
        """α and β of each trained tensor in this round: of the tower's, then of a linear head's."""
        beta = learning_rate(context.training, context.round, context.rounds)
        alpha = beta if self.hyper.inner_learning_rate is None else self.hyper.inner_learning_rate
        groups = self.head_groups(context, head.parameters)
        own = [group_rate(context, group) for group in groups for _ in group.parameters]
        return [alpha] * len(tower.leaves) + own, [beta] * len(tower.leaves) + own

    def _loss(self, context: pf.ClientContext, tower: TrainedTower, head: Head) -> BatchLoss:
        labels = context.train.labels.to(context.backbone.device)

        def loss(indices: Tensor) -> Tensor:
            scores = head.logits(self.features(tower, tower.read(context.train, indices)))
            return F.cross_entropy(scores, labels[pf.sent_to(indices, labels.device)])

        return loss


def step(
    loss: BatchLoss,
    parameters: Sequence[Tensor],
    first: Any,
    second: Any,
    alphas: Sequence[float],
    betas: Sequence[float],
    *,
    hessian: bool,
) -> Tensor:
    """W ← W − β·g with g = ∇L_second(W − α∇L_first(W)), in place; the loss there. Each tensor has its α and β.

    ``hessian``: g − ∇²L_first(W)·αg, its product by the difference of gradients at W ± δ·αg/max α.
    """
    begun = [parameter.detach().clone() for parameter in parameters]

    def moved_by(rates: Sequence[float]) -> tuple[Tensor, ...]:
        """∇L_first at W − rates·g."""
        _put(parameters, begun)
        descend(parameters, slopes, rates)
        return torch.autograd.grad(loss(first), parameters)

    descend(parameters, torch.autograd.grad(loss(first), parameters), alphas)
    value = loss(second)
    slopes = list(torch.autograd.grad(value, parameters))
    if hessian:
        most = max(alphas)
        sizes = [DELTA * alpha / most for alpha in alphas]
        pairs = zip(slopes, moved_by([-size for size in sizes]), moved_by(sizes), strict=True)
        slopes = [slope - most * (plus - minus) / (2 * DELTA) for slope, plus, minus in pairs]
    _put(parameters, begun)
    descend(parameters, slopes, betas)
    return value.detach()


def descend(parameters: Sequence[Tensor], slopes: Sequence[Tensor], rates: Sequence[float]) -> None:
    """One plain step of each tensor at its rate, in place."""
    with torch.no_grad():
        for parameter, slope, rate in zip(parameters, slopes, rates, strict=True):
            parameter.sub_(slope, alpha=rate)


def _put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
