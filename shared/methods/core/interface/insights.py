"""What a method may offer besides learning, for reports and the operator's page. All of it is optional.

A method offers one of these by having the member; who wants it asks with ``isinstance``, as of `Fixed` and `Mixes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from promptfed.shared.methods.core.interface import base
from promptfed.shared.tensors import Tensors


@dataclass(frozen=True)
class Measured:
    """What the server half found out when it closed a phase: of the ``phase``, and of ``clients`` by name."""

    phase: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)


@runtime_checkable
class MeasuresPhases(Protocol):
    """A method with numbers of its own in the reports of phases, such as PLAN's attention shares γ."""

    def measure(self, before: Tensors, phase: base.Phase, after: Tensors, context: base.ServerContext) -> Measured:
        """Finite numbers for the report of ``phase``, from the states before and after it."""


@runtime_checkable
class MeasuresUpdates(Protocol):
    """A method with numbers for reports that only the updates tell, such as FedLoRA's error of averaging factors."""

    def aggregate_measured(
        self,
        state: Tensors,
        phase: base.Phase,
        updates: base.Updates,
        combine: base.Combine,
        context: base.ServerContext,
    ) -> tuple[Tensors, Measured]:
        """The state of `Method.aggregate`, and finite numbers for the report of ``phase``.

        Asked only where the coordinator may read each update: not of a secure sum, nor where its mean is noised.
        """


@runtime_checkable
class ChoosesPrompts(Protocol):
    """A method of whose state another part than all shared float tensors is what it learns."""

    def prompts(self, state: Tensors) -> Tensors:
        """What is learned, by name, to be followed from its start."""


@runtime_checkable
class LearnsContexts(Protocol):
    """A method that learns vectors which stand where word embeddings do, so that words can be near them."""

    def contexts(self, state: Tensors, context: base.ServerContext, class_features: Mapping[str, Tensor]) -> Tensors:
        """Vectors ``(m, d_t)`` by label.

        ``class_features``: the normalised text feature ``(d_e,)`` of each bare class name, or of none.
        """


@runtime_checkable
class PlacesClients(Protocol):
    """A method whose state tells clients apart, so that the page can draw which are alike."""

    def client_vectors(
        self, state: Tensors, context: base.ServerContext, class_features: Mapping[str, Tensor]
    ) -> Tensors:
        """By client, what the state says of it or makes for it, in one shape for all; none where it says nothing."""


@runtime_checkable
class GeneratesPrompts(Protocol):
    """A method whose state holds a generator of prompts for any class names."""

    def generate(self, state: Tensors, text_features: Tensor, context: base.ServerContext) -> Tensors:
        """Prompts for classes with normalised ``text_features (C, d_e)``."""


@runtime_checkable
class HasVariants(Protocol):
    """A method whose clients can classify in further ways, which evaluations compare."""

    def variants(self, context: base.ClientContext, payload: Tensors, private: Tensors) -> dict[str, base.Classifier]:
        """Classifiers that are measured beside `Method.classifier`, by the name that reports give them."""


def learned_prompts(method: base.Method, state: Tensors) -> Tensors:
    """What ``method`` learns, by name: what it chooses, or all float tensors of ``state`` that clients may see."""
    if isinstance(method, ChoosesPrompts):
        return method.prompts(state)
    shared = [spec for spec in method.state_tensors() if spec.shared_with_clients and spec.dtype == "float32"]
    return {spec.name: state[spec.name] for spec in shared}
