"""The check of a federation in which sites validate an export."""

from __future__ import annotations

from promptfed.shared.methods.core.interface.base import MethodError
from promptfed.shared.spec.spec import FederationSpec

OF_TRAINING = ("privacy", "secure_aggregation", "tuning", "held_out", "loss")
"""Sections of a spec that say something of training alone."""


def check_validation(spec: FederationSpec) -> None:
    """Raise MethodError if ``spec`` validates, and not an export, or says how to train."""
    if not spec.validates:
        return
    if spec.continues is None:
        raise MethodError("kind validation takes an export: create it with `promptfed validate`, or give continues")
    given = [name for name in OF_TRAINING if getattr(spec, name) != FederationSpec.model_fields[name].default]
    if given:
        raise MethodError(f"in a validation nobody trains: leave {given[0]} out")
