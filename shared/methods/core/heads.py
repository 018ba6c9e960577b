"""Heads turn visual features into logits: the template's text features, or a linear head."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from promptfed.shared.canonical import canonical_json
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.seeds import DrawsOf
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import lengths, namespace
from promptfed.shared.tensors.lazy import F, Tensor, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone


HEAD_RATE = 0.01
"""The rate of a new linear head beside a trained image tower, the best of three."""
HeadRate = Annotated[
    float | None,
    Field(
        gt=0,
        le=1000,
        description="learning rate of the linear head, which starts from scratch; training.schedule scales it too; "
        f"default: {HEAD_RATE} beside a trained image tower, training.learning_rate beside prompts",
    ),
]

WEIGHT, BIAS, CLASSES = "head_weight", "head_bias", "head_classes"  # names of the tensors, private ones or shared
SHARED_HEAD = (TensorSpec(WEIGHT, ("classes", "d_h")), TensorSpec(BIAS, ("classes",)))


@dataclass(frozen=True)
class TextHead:
    """Logits τ⁻¹·f·T(template(y)) of normalised features ``f (B, d_e)``; ``text (C, d_e)`` is a constant."""

    text: Tensor
    scale: float

    @classmethod
    def of(cls, context: pf.ClientContext) -> TextHead:
        """The head over ``context.class_names``."""
        text = pf.template_features(context.backbone, context.template, context.class_names)
        return cls(text, context.backbone.logit_scale)

    @property
    def parameters(self) -> list[Tensor]:
        """Nothing here is trained."""
        return []

    def trainable(self, device: torch.device) -> TextHead:
        """Itself: nothing here is trained."""
        return self

    def among(self, class_names: Sequence[str]) -> TextHead:
        """The same head, which is made for the task's candidates."""
        return self

    def logits(self, features: Tensor) -> Tensor:
        """``(B, C)`` logits of normalised features ``(B, d_e)``."""
        return self.scale * features @ self.text.T

    def private(self) -> Tensors:
        """No tensors: the backbone can recompute the text features."""
        return {}


@dataclass(frozen=True)
class LinearHead:
    """pFedPG's H_n, logits W·f + b of pooled features ``f (B, d)`` for ``names``: ``weight (C, d)``, ``bias (C,)``."""

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor

    @classmethod
    def start(cls, context: pf.ClientContext, width: int) -> LinearHead:
        """The untrained head over the label space of ``context.train``; ``width`` is the width of its features.

        W is uniform in ±1/√d, b zero. Every client of a federation draws the same W for the same number of classes.
        """
        names = context.for_training().class_names
        start = head_start(pf.generator, context.seed, len(names), width)
        return cls(names, start[WEIGHT], start[BIAS])

    @classmethod
    def shared(cls, class_names: Sequence[str] | None, tensors: Mapping[str, Tensor]) -> LinearHead:
        """The head in a federation's state; its rows belong to the spec's ``class_names``.

        Raises:
            MethodError: the number of classes in the spec is not the number of rows.
        """
        names, weight = tuple(class_names or ()), tensors[WEIGHT]
        if len(names) != len(weight):
            raise pf.MethodError(
                f"the shared linear head has {len(weight)} rows for {len(names)} classes: its rows stand for the "
                "spec's class_names, which have to be given and kept"
            )
        return cls(names, weight, tensors[BIAS])

    @classmethod
    def of(cls, context: pf.ClientContext, private: Tensors, width: int) -> LinearHead:
        """The client's own head: the trained one, or the start.

        Raises:
            MethodError: the client is an evaluator and trains no head, or its head was trained for other classes.
        """
        if WEIGHT not in private:
            if len(context.train) == 0:
                raise pf.MethodError(
                    f"client {context.client!r} trains nothing, so it has no linear head: leave evaluators out, or use "
                    "a method with text features (head: text)"
                )
            return cls.start(context, width)
        names = context.for_training().class_names
        weight, bias = private[WEIGHT], private[BIAS]
        if tuple(weight.shape) != (len(names), width):
            classes, features = weight.shape
            raise pf.MethodError(
                f"the linear head of client {context.client!r} is for {classes} classes and features of {features}; "
                f"now it has {len(names)} and {width}: enrol it under another name"
            )
        if CLASSES in private and not private[CLASSES].equal(_digest(names)):
            raise pf.MethodError(
                f"the linear head of client {context.client!r} was trained for as many classes, but with other names "
                "or in another order: give the client its former data, or enrol it under another name"
            )
        return cls(names, weight, bias)

    def trainable(self, device: torch.device) -> LinearHead:
        """A copy on ``device`` whose weight and bias take gradients."""
        there = self.to(device)
        weight, bias = (tensor.clone().requires_grad_() for tensor in there.parameters)
        return LinearHead(self.names, weight, bias)

    def to(self, device: torch.device) -> LinearHead:
        """The head on ``device``."""
        return LinearHead(self.names, self.weight.to(device), self.bias.to(device))

    @property
    def parameters(self) -> list[Tensor]:
        """Weight and bias."""
        return [self.weight, self.bias]

    def logits(self, features: Tensor) -> Tensor:
        """``(B, C)`` logits of pooled features ``(B, d)``."""
        return F.linear(features, self.weight.to(features.device), self.bias.to(features.device))

    def among(self, class_names: Sequence[str]) -> LinearHead:
        """The head with the rows of ``class_names``, in that order.

        Raises:
            MethodError: the head was never trained for one of the classes.
        """
        unknown = [name for name in class_names if name not in self.names]
        if unknown:
            raise pf.MethodError(
                f"a linear head cannot score {unknown[0]!r}, a class that it was not trained for: leave that test set "
                "out, or use a method with text features (head: text)"
            )
        rows = torch.tensor([self.names.index(name) for name in class_names], device=self.weight.device)
        return LinearHead(tuple(class_names), self.weight[rows], self.bias[rows])

    def private(self) -> Tensors:
        """The tensors that the client stores: ``head_classes (4,)`` is a digest of the class names of the rows."""
        return {WEIGHT: self.weight.detach().cpu(), BIAS: self.bias.detach().cpu(), CLASSES: _digest(self.names)}


Head = TextHead | LinearHead


def head_groups(context: pf.ClientContext, parameters: Sequence[Tensor], rate: float | None) -> tuple[pf.Group, ...]:
    """The optimizer group of a new head's ``parameters`` with ``rate`` or the spec's rate; none without parameters."""
    return (pf.Group(parameters, rate or context.training.learning_rate),) if parameters else ()


def check_head_rate(method: str, given: float | None, *, linear: bool, alone: bool) -> None:
    """Raise MethodError for a ``given`` head_learning_rate if no new head is trained together with other tensors."""
    if given is None:
        return
    if not linear:
        raise pf.MethodError(
            f"head_learning_rate is the rate of a linear head, and {method} classifies by the template's texts here: "
            "leave it out, or take head: linear with it"
        )
    if alone:
        raise pf.MethodError(
            "head_learning_rate is for a head beside other trained numbers; here the head is trained alone: set "
            "training.learning_rate instead"
        )


def head_start(draws_of: DrawsOf, seed: int, classes: int, width: int) -> Tensors:
    """``head_weight (classes, width)`` uniform in ±1/√width and ``head_bias (classes,)`` zero, drawn from the seed."""
    draws = draws_of(seed, "head")
    weight = (draws.uniform(classes, width) * 2 - 1) / math.sqrt(width)
    return {WEIGHT: weight, BIAS: draws.xp.zeros(classes, dtype=draws.xp.float32)}


def shared_classes(method: str, class_names: Sequence[str] | None) -> int:
    """The number of rows of a shared linear head. Raises MethodError if the spec names no classes."""
    if not class_names:
        raise pf.MethodError(
            f"{method} shares a linear head, whose rows stand for classes: list the federation's class_names in the "
            "spec, or take head: text"
        )
    return len(class_names)


def _digest(names: tuple[str, ...]) -> Tensor:
    """A digest ``(4,)`` int64 of names and their order."""
    digest = hashlib.sha256(canonical_json(list(names)).encode()).digest()
    return torch.tensor([int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 32, 8)])


def head_width(backbone: Backbone, projected: bool) -> int:
    """Width of a head's input features: those before the image tower's projection, or d_e after it."""
    return backbone.d_e if projected else backbone.d_pooled


def check_class_rows(method: pf.Method, spec: pf.FederationSpec) -> None:
    """Raise MethodError if ``spec`` has no common list of classes for the rows of a shared tensor."""
    if spec.class_names is None:
        raise pf.MethodError(
            f"{method.name} learns a row for every class: list the federation's class_names in the spec"
        )
    if method.hyper.label_space != "federation":
        raise pf.MethodError(f"{method.name}'s rows are for the federation's classes: leave label_space out")


def rows_of_candidates(context: pf.ClientContext, rows: Tensor) -> Tensor:
    """The rows of ``rows (C, ...)`` for ``context.class_names``; zero for a class that is not one of the federation's.

    Raises:
        MethodError: the number of rows is not the number of trained classes.
    """
    names = context.label_space or context.class_names
    if len(rows) != len(names):
        raise pf.MethodError(
            f"the shared state has {len(rows)} rows for {len(names)} classes: keep the spec's class_names"
        )
    extended = torch.cat([rows, torch.zeros_like(rows[:1])])  # the index -1 is the row of zeros
    return extended[context.trained_rows()]


def class_means(context: pf.ClientContext) -> Tensor:
    """``(C, d_e)`` Σ_{y=c} f/N of the N training features; their weighted mean over clients is that of all images."""
    context.expect_images()
    features, labels = context.train.features(), context.train.labels.to(context.backbone.device)
    sums = features.new_zeros(len(context.class_names), features.shape[1])
    return sums.index_add_(0, labels, features) / len(features)


def directions(rows: Any) -> Any:
    """``rows (C, d)``, each normalised; a row of zeros stays. The server half uses it."""
    sizes = lengths(rows)
    return rows / namespace(rows).where(sizes > 0, sizes, 1.0)[:, None]
