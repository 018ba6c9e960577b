"""FedAvg, FedProx, FedBABU, Per-FedAvg and each client alone: the image tower itself is fine-tuned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from promptfed.shared.methods.core import generalization, visual
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.generalization import GAP, OWN_LOSS, ROUND, WEIGHTS, Representation, Subset
from promptfed.shared.methods.core.heads import Head, LinearHead, head_width
from promptfed.shared.methods.core.tower import HeadHyper, TowerHyper, TrainedTower, WeightMethod
from promptfed.shared.methods.core.training import TaskCancelled, batches, group_rate, learning_rate
from promptfed.shared.methods.core.visual import CHUNK, ImageClassifier
from promptfed.shared.methods.fedrep import PrivateHeadMethod
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import CHANGE, Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, Tensor, torch

BatchLoss = Callable[["Tensor"], "Tensor"]


class FedAvgHyper(HeadHyper):
    """Which weights are trained under which head, and two ways to generalise to domains that nobody has."""

    fedsr: bool = pf.option(
        False,
        "FedSR: behind the tower a normal distribution of a representation z, on which the linear head "
        "stands, kept short and near what its class alone would say",
    )
    d_z: int = pf.option(512, "fedsr: numbers of z", ge=1, le=8192)
    length_weight: float = pf.option(0.01, "fedsr: weight of the mean of ‖z‖²", ge=0, le=1000)
    divergence_weight: float = pf.option(0.0005, "fedsr: weight of the divergence", ge=0, le=1000)
    weighting: Literal["samples", "ga"] = pf.option(
        "samples",
        "samples: as the spec's aggregation says; ga: FedDG-GA's weights, larger for clients worse off with the "
        "mean; each tells that gap in loss, on a held-out tenth of its training images",
    )
    centred: bool = pf.option(True, "ga: the gaps less their mean, as the paper has it")


class FedAvg(WeightMethod):
    """Fine-tuning of the image tower, all of it or a part, under the template's text or a shared linear head.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, as the
    rows FedAvg in the tables of pFedPG, PLAN and FaST-PT, of which none gives rate, head or epochs. The weight decay
    is towards zero, of the weights and not of their change, which would be FedProx towards the frozen backbone.
    Options: FedSR and FedDG-GA's weights, both in `core.generalization`.
    """

    name = "fedavg"
    summary = "The image tower's own weights, all or a part, fine-tuned by each client and averaged."
    paper = "McMahan et al., Communication-Efficient Learning of Deep Networks (FedAvg), 2017"
    several_labels = True
    Hyper = FedAvgHyper
    hyper: FedAvgHyper

    @property
    def adjusts(self) -> bool:
        """Whether aggregation weights follow the gaps in loss."""
        return self.hyper.weighting == "ga"

    @property
    def disclosures(self) -> tuple[pf.Disclosed, ...]:
        """Also discloses the gap."""
        if not self.adjusts:
            return super().disclosures
        text = "how much worse the shared model does than your own last update, on a tenth of your training images"
        return (*super().disclosures, pf.Disclosed("operator", text))

    # Server half

    def check(self, spec: pf.FederationSpec) -> None:
        """Also refuses FedSR without a linear head."""
        if self.hyper.fedsr and not self.is_linear:
            raise pf.MethodError("fedsr puts a linear head behind a distribution of its own: take head: linear with it")
        super().check(spec)

    def travelling(self) -> tuple[TensorSpec, ...]:
        """Also FedSR's tensors."""
        return super().travelling() + (generalization.MAPS if self.hyper.fedsr else ())

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Also the clients' aggregation weights, which no client receives."""
        return super().state_tensors() + ((WEIGHTS, ROUND) if self.adjusts else ())

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """Also sends the gap; the state is then not a mean with the spec's weights."""
        [phase] = super().phases(round, rounds)
        return (replace(phase, up=(*phase.up, GAP), mean=False),) if self.adjusts else (phase,)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """Also FedSR's dimensions, whose head has the input z."""
        dims = super().dims(context)
        if self.hyper.fedsr:
            dims |= {"d_f": dims["d_h"], "d_z": self.hyper.d_z, "d_h": self.hyper.d_z}
        return dims | ({"n": len(context.clients)} if self.adjusts else {})

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """Also FedSR's start, and equal weights."""
        state, dims = super().initial_state(context, draws), self.dims(context)
        if self.hyper.fedsr:
            state |= generalization.fedsr_start(
                context.draws_of, context.seed, dims["classes"], dims["d_f"], dims["d_z"]
            )
        return state | (generalization.split_start(context) if self.adjusts else {})

    def adopt(self, state: Tensors, context: pf.ServerContext) -> Tensors:
        """A supplied state, with equal weights for the clients that there are."""
        return state | (generalization.split_start(context) if self.adjusts else {})

    def join(self, state: Tensors, client: pf.ClientInfo, context: pf.ServerContext) -> Tensors:
        """A newcomer gets the mean weight of the others."""
        return generalization.joined(state, client, context) if self.adjusts else state

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """Δ + the mean of the changes, by samples or by the adjusted weights."""
        if not self.adjusts:
            return super().aggregate(state, phase, updates, combine, context)
        counted = list(updates)  # mapped from files where they are large
        gaps = {update.client: float(update.tensors[GAP.name]) for update in counted}
        after, shares = generalization.adjusted(state, gaps, context, centred=self.hyper.centred)
        weighed = (
            pf.ClientUpdate(update.client, shares[update.client], _without_gap(update.tensors)) for update in counted
        )
        return super().aggregate(state, phase, weighed, combine, context) | after

    # Client half

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the received weights; with GA on nine tenths of the images, and the gap on the tenth."""
        if not self.adjusts:
            return self._trained(context, payload, private)
        aside, rest = generalization.held_out(context.seed, context.client, len(context.train))
        held_out, trained = (replace(context, train=Subset(context.train, rows)) for rows in (aside, rest))
        received = self._loss(held_out, payload, private)
        result = self._trained(trained, payload, private)
        learned = {
            name: payload[name].float() + result.update[CHANGE + name]
            for name in (spec.name for spec in self.travelling())
        }
        gap = received - float(private[OWN_LOSS]) if OWN_LOSS in private else 0.0
        kept = result.private | {OWN_LOSS: torch.tensor(self._loss(held_out, learned, result.private))}
        return pf.TrainResult(result.update | {GAP.name: torch.tensor(gap)}, kept, result.metrics)

    def _loss(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> float:
        """The mean cross-entropy of a state's classifier on ``context.train``."""
        scorer, labels = self.classifier(context.for_training(), payload, private), context.train.labels
        total = 0.0
        for rows in torch.split(torch.arange(len(labels)), CHUNK):
            scores = scorer.logits(context.train, rows)
            loss = F.cross_entropy(scores, labels[pf.sent_to(rows, labels.device)].to(scores.device))
            total += float(loss) * len(rows)
        return total / len(labels)

    def _trained(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        if not self.hyper.fedsr:
            return super().train(context, payload, private)
        device, tower = context.backbone.device, self.tower(context, payload, private).trainable()
        begun = self._representation(context, payload, private)
        head = begun.on(device, trainable=True)
        labels = context.train.labels.to(device)
        draws = pf.generator(context.seed, context.round, context.client, "fedsr")

        def loss(indices: Tensor) -> Tensor:
            features = self.features(tower, context.train.images(indices))
            noise = torch.randn(len(indices), self.hyper.d_z, generator=draws).to(device)
            entropy, length, divergence = head.losses(features, labels[pf.sent_to(indices, device)], noise)
            return entropy + self.hyper.length_weight * length + self.hyper.divergence_weight * divergence

        groups = self.head_groups(context, list(head.tensors.values()))
        final = pf.train(context, list(tower.leaves.values()), loss, groups=groups, reads_images=True)
        update = self.sent(tower)
        after = {name: tensor.detach().cpu() for name, tensor in head.tensors.items()}
        update |= {CHANGE + spec.name: after[spec.name] - begun.tensors[spec.name] for spec in generalization.SHARED}
        return pf.TrainResult(
            update, {spec.name: after[spec.name] for spec in generalization.REFERENCE}, {"loss": final}
        )

    def _representation(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> Representation:
        return Representation.of(context.label_space or context.class_names, payload, private)

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """By FedSR's mean probabilities of twenty draws, or as all of these methods."""
        if not self.hyper.fedsr:
            return super().classifier(context, payload, private)
        device, tower = context.backbone.device, self.tower(context, payload, private)
        head = self._representation(context, payload, private).among(context.class_names).on(device)
        noise = generalization.draws_for_images(context.seed, self.hyper.d_z)
        return ImageClassifier(lambda images: head.classified(self.features(tower, images), noise))


def _without_gap(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != GAP.name}


class FedProxHyper(HeadHyper):
    """FedAvg's hyperparameters and the weight of the proximal term."""

    mu: float = pf.option(0.01, "weight of the proximal term; its paper tries 0.001, 0.01, 0.1 and 1", ge=0, le=1000)


class FedProx(WeightMethod):
    """CE + (μ/2)·Σ‖W − W^r‖² over all that travels, W^r as received.

    Source: Li et al., "Federated Optimization in Heterogeneous Networks", 2020.
    """

    name = "fedprox"
    summary = "FedAvg of the image tower with a penalty on the distance to the received weights."
    paper = "Li et al., Federated Optimization in Heterogeneous Networks (FedProx), 2020"
    several_labels = True
    Hyper = FedProxHyper
    hyper: FedProxHyper

    def extra_loss(self, tower: TrainedTower, head: Head) -> visual.Term | None:
        """The proximal term."""
        if self.hyper.mu == 0:
            return None
        moving = [tower.leaves[kind] for kind in self.shared_kinds if kind in tower.leaves]
        received = [(leaf, leaf.detach().clone()) for leaf in [*moving, *head.parameters]]

        def term(indices: Tensor, images: Tensor, logits: Tensor) -> Tensor:
            distance = torch.stack([(leaf - begun).square().sum() for leaf, begun in received]).sum()
            return self.hyper.mu / 2 * distance

        return term


class TunedTowerClassifier:
    """Classifies with a copy that was tuned for it; ``make`` makes the classifier of the copy for a label space."""

    def __init__(self, make: Callable[[pf.ClientContext], pf.Classifier], context: pf.ClientContext):
        self._make, self._made = make, make(context)

    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        return self._made.logits(split, indices)

    def among(self, context: pf.ClientContext) -> TunedTowerClassifier:
        """The same copy over ``context.class_names``."""
        return TunedTowerClassifier(self._make, context)


class FedBABUHyper(TowerHyper):
    """What is trained of the tower, and the fine-tuning before an evaluation."""

    finetune_epochs: int = pf.option(
        5, "epochs over the client's training images before an evaluation", ge=1, le=10_000
    )
    finetune_learning_rate: float | None = pf.option(
        None, "the tower's rate in the fine-tuning; default: training.learning_rate", gt=0, le=1000
    )


class FedBABU(PrivateHeadMethod):
    """The head stays at its seeded start, so only the tower is trained and exchanged.

    Each client classifies with a copy of tower and head that it fine-tunes on its own training images and does not
    keep; one fine-tuning serves all label spaces. Source: Oh et al., "FedBABU", ICLR 2022.
    """

    name = "fedbabu"
    summary = "A shared image tower trained under a head that never changes, fine-tuned by each client for itself."
    paper = "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022"
    Hyper = FedBABUHyper
    hyper: FedBABUHyper

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Classifies with the tuned copy, which serves all label spaces of an evaluation."""
        rate = self.hyper.finetune_learning_rate or context.training.learning_rate
        tuning = context.for_tuning(self.hyper.finetune_epochs, rate)
        with torch.enable_grad():  # evaluations run without gradients
            tower = self.tower(tuning, payload, private).trainable()
            head = self.start_head(tuning, payload, private).trainable(tuning.backbone.device)
            self.fit(tuning, tower, head)
        return TunedTowerClassifier(partial(self.classify, tower, head), context)

    def start_head(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> LinearHead:
        """The fixed head, equal for all clients with the same number of classes."""
        return LinearHead.start(context, head_width(context.backbone, self.hyper.projected))

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of the tower."""
        tower = self.tower(context, payload, private).trainable()
        head = self.start_head(context, payload, private).to(context.backbone.device)
        loss = self.fit(context, tower, head, trains="tower")
        return pf.TrainResult(self.sent(tower), {}, {"loss": loss})

    def kept(self, tower: TrainedTower, head: Head) -> Tensors:
        """No private tensors."""
        return {}


class SingleSetFull(WeightMethod):
    """The local baseline of pFedPG's tables. It starts like `fedavg`, so the two differ only in sharing."""

    name = "singleset_full"
    summary = "Each client fine-tunes the image tower for itself and never shares it."
    paper = "SingleSet-Full in pFedPG's tables (Yang et al., 2023)"
    personal = True
    Hyper = HeadHyper
    hyper: HeadHyper

    def __init__(self, hyper: HeadHyper):
        super().__init__(hyper)
        self.takes_evaluators = not self.is_linear  # under a text head they classify zero-shot

    @property
    def shares_head(self) -> bool:
        """Nothing is shared."""
        return False

    @property
    def private_kinds(self) -> tuple[str, ...]:
        """All trained kinds."""
        return self.kinds

    def check(self, spec: pf.FederationSpec) -> None:
        """Refuses only options that cannot be trained."""
        self.check_options(spec)


class PerFedAvgHyper(HeadHyper):
    """FedAvg's hyperparameters, the two rates, and how long a client adapts."""

    inner_learning_rate: float | None = pf.option(
        None,
        "α, of the step that is looked ahead; default: the training's. A linear head has "
        "head_learning_rate in both steps",
        gt=0,
        le=1000,
    )
    adapt_steps: int = pf.option(1, "steps of rate α on own training images before a trainer classifies", ge=1, le=1000)


class PerFedAvg(WeightMethod):
    """Consecutive batches B, B′: W̃ = W − α∇L_B(W), then W ← W − β∇L_B′(W̃), β the training's rate. Plain SGD.

    A linear head moves at its own rate in both steps.

    Source: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees", NeurIPS 2020 (first order).
    Trainers classify with a copy adapted on own training images, which is not kept; evaluators with the global weights.
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

    ignores = ("optimizer", "momentum", "weight_decay")

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
            in_order = list(batches(count, size, 1, draws))
            values = []
            for first, second in zip(in_order[::2], in_order[1::2], strict=False):
                if context.cancelled():
                    raise TaskCancelled
                context.progress((epoch + 2 * len(values) / len(in_order)) / context.training.epochs)
                values.append(step(loss, parameters, first, second, alphas, betas))
        mean = float(torch.stack(values).double().mean())
        if not math.isfinite(mean):
            raise pf.MethodError(f"the loss is not finite in round {context.round}: lower training.learning_rate")
        return pf.TrainResult(self.sent(tower, head, begun), self.kept(tower, head), {"loss": mean})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """With the copy that ``adapt_steps`` on own training images lead to; evaluators with the global weights."""
        if not len(context.train):
            return super().classifier(context, payload, private)
        tuning = context.for_training()
        with torch.enable_grad():  # evaluations run without gradients
            tower = self.tower(tuning, payload, private).trainable()
            begun = self.start_head(tuning, payload, private)
            head = begun.trainable(tuning.backbone.device)
            loss, parameters = self._loss(tuning, tower, head), [*tower.leaves.values(), *head.parameters]
            draws = pf.generator(tuning.seed, tuning.round, tuning.client, "adapt")
            alphas, _ = self._rates(tuning, tower, head)
            endless = batches(len(tuning.train), tuning.training.batch_size, self.hyper.adapt_steps, draws)
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
        rates = [group_rate(context, group) for group in groups for _ in group.parameters]
        return [alpha] * len(tower.leaves) + rates, [beta] * len(tower.leaves) + rates

    def _loss(self, context: pf.ClientContext, tower: TrainedTower, head: Head) -> BatchLoss:
        labels = context.train.labels.to(context.backbone.device)

        def loss(indices: Tensor) -> Tensor:
            scores = head.logits(self.features(tower, context.train.images(indices)))
            return F.cross_entropy(scores, labels[pf.sent_to(indices, labels.device)])

        return loss


def step(
    loss: BatchLoss,
    parameters: Sequence[Tensor],
    first: Any,
    second: Any,
    alphas: Sequence[float],
    betas: Sequence[float],
) -> Tensor:
    """W ← W − β·∇L_second(W − α∇L_first(W)), in place; the loss there. Each tensor has its α and β."""
    begun = [parameter.detach().clone() for parameter in parameters]
    descend(parameters, torch.autograd.grad(loss(first), parameters), alphas)
    value = loss(second)
    slopes = torch.autograd.grad(value, parameters)
    with torch.no_grad():
        for parameter, start in zip(parameters, begun, strict=True):
            parameter.copy_(start)
    descend(parameters, slopes, betas)
    return value.detach()


def descend(parameters: Sequence[Tensor], slopes: Sequence[Tensor], rates: Sequence[float]) -> None:
    """One plain step of each tensor at its rate, in place."""
    with torch.no_grad():
        for parameter, slope, rate in zip(parameters, slopes, rates, strict=True):
            parameter.sub_(slope, alpha=rate)
