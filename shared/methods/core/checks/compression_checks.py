"""The check of a spec's section ``compression``."""

from __future__ import annotations

from promptfed.shared.methods.core.checks.mean_checks import check_changes, check_one_mean
from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.spec.spec import FederationSpec


def check_compression(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if changes or payloads of ``spec`` cannot be compressed."""
    if spec.compression.up != "none":
        _check_up(method, spec)
    if spec.compression.down == "bf16":
        _check_rounding(method, spec)


def _check_rounding(method: Method, spec: FederationSpec) -> None:
    """Changes from a rounded payload are added to the state that was rounded."""
    if spec.secure_aggregation is not None:
        raise MethodError("a secure sum is of tensors that began at the state itself: take down delta, or none")
    if spec.privacy.level == "client":
        raise MethodError("privacy.level client measures changes from the state itself: take down delta, or none")
    so = "the rounding would add up: take down delta, or none"
    check_one_mean(method, spec.rounds, "round", so)
    check_changes(method, spec.rounds, "add")


def _check_up(method: Method, spec: FederationSpec) -> None:
    if spec.secure_aggregation is not None:
        raise MethodError("a secure sum has its own grid of whole numbers: leave compression out")
    check_one_mean(method, spec.rounds, "compress", "what is lost cannot be added to the next change")
