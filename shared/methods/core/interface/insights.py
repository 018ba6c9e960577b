"""Optional features of a method for reports.

A method implements one by defining the member; callers check with ``isinstance``, as for `Fixed` and `Mixes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from promptfed.shared.methods.core.interface import base
from promptfed.shared.tensors import Tensors

if TYPE_CHECKING:
    pass


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
class HasVariants(Protocol):
    """A method with additional classifiers, which evaluations compare."""

    def variants(self, context: base.ClientContext, payload: Tensors, private: Tensors) -> dict[str, base.Classifier]:
        """Classifiers that are measured in addition to `Method.classifier`, by their names in reports."""
