"""Methods for images with several labels: each class is present or absent, by a threshold that the federation learns.

An image's logit of class c is s·(cos(f, t_c) + β), with the method's own cosines. The one number β travels beside the
method's tensors; −β is the cosine from which a class counts as present. `make_method` derives such a method from an
ordinary one that declares ``several_labels``, so that a method's file says nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from promptfed.shared.methods.core.array_library import OF_THE_METHOD
from promptfed.shared.methods.core.interface import (
    Classifier,
    ClientContext,
    ClientInfo,
    Combine,
    Method,
    MethodError,
    Phase,
    ServerContext,
    Split,
    TrainResult,
    Updates,
)
from promptfed.shared.methods.core.objectives import LabelLoss, Objective
from promptfed.shared.methods.core.text_features import template_features
from promptfed.shared.seeds import Draws
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, Tensor, torch
from promptfed.shared.tensors.transfer import sent_to

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone

BIAS = TensorSpec("label_bias", (1,))
STEP = 4.0  # 1/L: the second derivative of a mean binary cross-entropy in its bias is at most 1/4


class LabelBias(LabelLoss):
    """b = s·β, one number that is added to all logits, and trained by gradient steps of its own.

    ``leaf (1,)`` is C·b, so that its gradient is the mean over the classes and at most 1, like that of one logit.
    The spec's optimizer and rates do not apply to it: a step of 1/L lowers the loss for any scale of the logits.
    """

    def __init__(self, beta: Tensor, backbone: Backbone, classes: int):
        self._unit = classes * backbone.logit_scale
        self._classes = classes
        self.leaf = (beta.to(backbone.device) * self._unit).detach().clone().requires_grad_()
        self._current = self.leaf

    @property
    def value(self) -> Tensor:
        """β ``(1,)``."""
        return self.leaf.detach() / self._unit

    def added(self, logits: Tensor) -> Tensor:
        """``logits (B, C)`` plus b, or plus each image's own copy of it."""
        return logits + (self._current / self._classes).reshape(-1, 1)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over the classes that ``labels (B, C)`` know to be present (1) or absent (0)."""
        logits = self.added(logits)
        losses = torch.where(labels == 1, -F.logsigmoid(logits), -F.logsigmoid(-logits))
        return torch.where(labels >= 0, losses, 0.0).sum(dim=1)

    def step(self) -> None:
        """One step along the leaf's gradient, if it has one."""
        if self.leaf.grad is not None:
            with torch.no_grad():
                self.leaf -= STEP * self._classes * self.leaf.grad
            self.leaf.grad = None

    def among(self, objective: Objective) -> Objective:
        """``objective`` with the leaf as the last of its parameters."""

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            self._current = copies[-1]
            try:
                return objective.units(copies[:-1], indices)
            finally:
                self._current = self.leaf

        common = objective.common
        others: Callable[[Sequence[Tensor]], Tensor] | None = None
        if common is not None:
            others = lambda parameters: common(parameters[:-1])  # noqa: E731
        return Objective(units, others)


class ThresholdClassifier:
    """A classifier's logits plus s·β: above 0 a class counts as present."""

    def __init__(self, classifier: Classifier, bias: float):
        self.classifier, self.bias = classifier, bias

    def logits(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        return self.classifier.logits(split, indices) + self.bias


class PresenceTemplates:
    """Zero-shot: s·(cos(f, "a photo of a c") − cos(f, "a photo without a c")); above 0 a class counts as present."""

    def __init__(self, context: ClientContext):
        self._scale = context.backbone.logit_scale
        present, absent = (
            template_features(context.backbone, template, context.class_names)
            for template in (context.template, absent_template(context.template))
        )
        self._difference = present - absent

    def logits(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        features = split.features()
        return self._scale * features[sent_to(indices, features.device)] @ self._difference.T


def absent_template(template: str) -> str:
    """The template of an absent class: " without " in place of the first " of "."""
    return template.replace(" of ", " without ", 1) if " of " in template else "a photo without a {}."


class SeveralLabels(Method):
    """What `several_labels` adds to a method: β in its state, its phases, its training and its classifier."""

    server = OF_THE_METHOD

    @property
    def _shared(self) -> bool:
        """Whether the method itself exchanges anything; otherwise β stays with the client too."""
        return bool(super().state_tensors())  # type: ignore[safe-super]

    def check(self, spec: FederationSpec) -> None:
        """A common list of classes, of which each client trains all."""
        if spec.class_names is None:
            raise MethodError("several labels per image need class_names, the federation's list of classes")
        if getattr(self.hyper, "label_space", "federation") != "federation":
            raise MethodError("several labels per image need label_space: federation")
        for option, plain in {"head": "text", "fedsr": False, "generalization": "none"}.items():
            if getattr(self.hyper, option, plain) != plain:
                raise MethodError(f"several labels per image need {option}: {plain}")
        super().check(spec)

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Also β, if anything is exchanged."""
        return (*super().state_tensors(), BIAS) if self._shared else ()  # type: ignore[safe-super]

    def phases(self, round: int, rounds: int) -> tuple[Phase, ...]:
        """β travels down and up in phases that send something up."""
        return tuple(
            replace(phase, down=_with_bias(phase.down), up=_with_bias(phase.up)) if phase.up else phase
            for phase in super().phases(round, rounds)
        )

    def initial_state(self, context: ServerContext, draws: Draws) -> Tensors:
        """β = 0."""
        return self._started(super().initial_state(context, draws), draws)

    def initial_state_with(self, backbone: Backbone, context: ServerContext, draws: Draws) -> Tensors:
        """β = 0."""
        return self._started(super().initial_state_with(backbone, context, draws), draws)

    def _started(self, state: Tensors, draws: Draws) -> Tensors:
        return state | {BIAS.name: draws.xp.zeros(1, dtype=draws.xp.float32)} if self._shared else state

    def payload(self, state: Tensors, phase: Phase | None, client: ClientInfo, context: ServerContext) -> Tensors:
        """Also β, as float32 whatever the method's tensors travel as."""
        tensors = super().payload(state, phase, client, context)
        return tensors | {BIAS.name: state[BIAS.name]} if BIAS.name in tensors else tensors

    def payload_tensors(self, phase: Phase | None) -> tuple[TensorSpec, ...]:
        """Also β."""
        specs = super().payload_tensors(phase)
        return _with_bias(specs) if self._shared else specs

    def aggregate(
        self, state: Tensors, phase: Phase, updates: Updates, combine: Combine, context: ServerContext
    ) -> Tensors:
        """β by the federation's rule, like the tensors of a mean."""
        combined: Tensors = {}

        def noted(given: Updates) -> Tensors:
            result = combine(given)
            combined.update(result)
            return result

        after = super().aggregate(state, phase, updates, noted, context)
        return after | {BIAS.name: combined.get(BIAS.name, state[BIAS.name])} if self._shared else after

    def train(self, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        """The method's training with the loss of several labels, which trains β beside its tensors."""
        bias = LabelBias(self._bias(payload, private), context.backbone, len(context.class_names))
        arguments = replace(context, label_loss=bias), _without_bias(payload), _without_bias(private)
        result = super().train(*arguments)  # type: ignore[safe-super]
        learned = {BIAS.name: bias.value}
        if not self._shared:
            return replace(result, private=result.private | learned)
        return replace(result, update=result.update | learned)

    def classifier(self, context: ClientContext, payload: Tensors, private: Tensors) -> ThresholdClassifier:
        """The method's classifier with the threshold."""
        arguments = context, _without_bias(payload), _without_bias(private)
        inner = super().classifier(*arguments)  # type: ignore[safe-super]
        return ThresholdClassifier(inner, context.backbone.logit_scale * float(self._bias(payload, private)))

    def _bias(self, payload: Tensors, private: Tensors) -> Tensor:
        held = payload if self._shared else private
        return held.get(BIAS.name, torch.zeros(1))


def _with_bias(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return (*(spec for spec in specs if spec.name != BIAS.name), BIAS)


def _without_bias(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != BIAS.name}


@cache
def for_several_labels(kind: type[Method]) -> type[Method]:
    """``kind`` for images with several labels."""
    attributes = {name: vars(kind).get(name, False) for name in ("protects", "several_labels")}
    return type(kind.__name__, (SeveralLabels, kind), attributes)


def is_for_several_labels(method: Method) -> bool:
    """Whether a method was made for images with several labels."""
    return isinstance(method, SeveralLabels)
