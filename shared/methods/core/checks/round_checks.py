"""The checks of a federation without rounds, and of one that selects a round."""

from __future__ import annotations

from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.methods.core.interface.hooks import AdoptsStates, GrowsWithClients
from promptfed.shared.spec.spec import FederationSpec

OF_TRAINING = ("privacy", "secure_aggregation", "selection")
"""Sections of a spec that say something of training alone."""


def check_rounds(spec: FederationSpec) -> None:
    """Raise MethodError if ``spec`` has no rounds, and no export to evaluate, or says how to train."""
    if spec.rounds:
        return
    if spec.continues is None:
        raise MethodError("0 rounds evaluate an export on the clients' images: create it --from one, or give 1 or more")
    given = [name for name in OF_TRAINING if getattr(spec, name) != FederationSpec.model_fields[name].default]
    if given:
        raise MethodError(f"0 rounds train nobody: leave {given[0]} out")


def check_selection(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if no round of a federation of ``spec`` can be selected."""
    if spec.selection is None:
        return
    if spec.evaluations != "plain" or spec.privacy.level != "none" or spec.secure_aggregation is not None:
        text = "a choice among rounds takes the sites' accuracies, which protection withholds and noise would decide"
        raise MethodError(f"{text}: leave selection, or privacy and secure_aggregation, out")
    if spec.retention != "all":
        raise MethodError("the chosen round may be an early one: give retention all")
    if isinstance(method, GrowsWithClients | AdoptsStates):
        raise MethodError(f"the state of {method.name} grows with its clients, and an early one lacks later ones")
