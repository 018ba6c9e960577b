"""Optional features of a method for reports and the operator's page.

A method implements one by defining the member; callers check with ``isinstance``, as for `Fixed` and `Mixes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from promptfed.shared.methods.core.interface import base
from promptfed.shared.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """Numbers that the server half measured when it closed a phase: of the ``phase``, and of ``clients`` by name."""

    phase: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)


@runtime_checkable
class MeasuresPhases(Protocol):
    """A method with its own numbers in the reports of phases, such as PLAN's attention shares γ."""

    def measure(self, before: Tensors, phase: base.Phase, after: Tensors, context: base.ServerContext) -> Measured:
        """Finite numbers for the report of ``phase``, from the states before and after it."""


@runtime_checkable
class MeasuresUpdates(Protocol):
    """A method with reported numbers that need the updates, such as FedLoRA's error of averaging factors."""

    def aggregate_measured(
        self,
        state: Tensors,
        phase: base.Phase,
        updates: base.Updates,
        combine: base.Combine,
        context: base.ServerContext,
    ) -> tuple[Tensors, Measured]:
        """The state of `Method.aggregate`, and finite numbers for the report of ``phase``.

        Called only if the coordinator may read each update: not for secure sums, nor if the mean is noised.
        """


@runtime_checkable
class ChoosesPrompts(Protocol):
    """A method that learns something other than all shared float tensors of its state."""

    def prompts(self, state: Tensors) -> Tensors:
        """The learned tensors by name, to be tracked from their start."""


@runtime_checkable
class LearnsContexts(Protocol):
    """A method that learns vectors in the space of word embeddings, so that near words can be shown."""

    def contexts(self, state: Tensors, context: base.ServerContext, class_features: Mapping[str, Tensor]) -> Tensors:
        """Vectors ``(m, d_t)`` by label.

        ``class_features``: the normalised text features ``(d_e,)`` of the bare class names, if known.
        """


@runtime_checkable
class PlacesClients(Protocol):
    """A method whose state differs by client, so that the page can show which clients are alike."""

    def client_vectors(
        self, state: Tensors, context: base.ServerContext, class_features: Mapping[str, Tensor]
    ) -> Tensors:
        """A tensor for each client, all of one shape; clients without one are left out."""


@runtime_checkable
class GeneratesPrompts(Protocol):
    """A method whose state contains a generator of prompts for any class names."""

    def generate(self, state: Tensors, text_features: Tensor, context: base.ServerContext) -> Tensors:
        """Prompts for classes with normalised ``text_features (C, d_e)``."""


@runtime_checkable
class HasVariants(Protocol):
    """A method with additional classifiers, which evaluations compare."""

    def variants(self, context: base.ClientContext, payload: Tensors, private: Tensors) -> dict[str, base.Classifier]:
        """Classifiers that are measured in addition to `Method.classifier`, by their names in reports."""


def learned_prompts(method: base.Method, state: Tensors) -> Tensors:
    """The tensors that ``method`` learns, by name: its choice, or all float tensors of ``state`` visible to clients."""
    if isinstance(method, ChoosesPrompts):
        return method.prompts(state)
    shared = [spec for spec in method.state_tensors() if spec.shared_with_clients and spec.dtype == "float32"]
    return {spec.name: state[spec.name] for spec in shared}
