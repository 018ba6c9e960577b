"""The check of how a spec's section ``participation`` chooses clients."""

from __future__ import annotations

from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.spec.participation import BY_LOSS, SQUARED_LOSSES
from promptfed.shared.spec.spec import FederationSpec


def check_choice(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if ``spec`` cannot choose its clients in this way."""
    part = spec.participation
    if spec.validates and (not part.is_plain or part.require is not None):
        raise MethodError("in a validation nobody trains: leave choice, over_select, require and cool_down out")
    if spec.privacy.level == "client" and (not part.is_plain or part.require is not None):
        raise MethodError(
            "privacy.level client accounts for clients that are drawn alike: leave choice, over_select, require and "
            "cool_down out"
        )
    if part.choice == "all_available" and (part.fraction < 1 or part.over_select > 1):
        raise MethodError("choice all_available asks every client: leave fraction and over_select out")
    if part.over_select > 1 and spec.secure_aggregation is not None:
        raise MethodError("a secure sum needs the shares of all that began it: leave over_select out")
    if part.choice in BY_LOSS:
        _check_losses(method, spec)


def _check_losses(method: Method, spec: FederationSpec) -> None:
    choice = spec.participation.choice
    if spec.secure_aggregation is not None:
        raise MethodError(f"choice {choice} reads losses, and with secure sums no number leaves a client")
    if spec.privacy.level != "none":
        raise MethodError(f"choice {choice} reads losses, which no noise covers: with privacy take another one")
    phases = method.phases(1, spec.rounds)
    if not phases or (choice == "power_of_choice" and "loss" not in method.metrics):
        raise MethodError(f"choice {choice} reads losses, and {method.name} reports none")
    if choice == "oort":
        given = {tensor.name for tensor in phases[0].down}
        lacking = sorted({tensor.name for tensor in method.payload_tensors(None)} - given)
        if lacking or method.fine_tunes:
            why = f"its clients train without {lacking[0]}" if lacking else "its classifiers are trained first"
            raise MethodError(f"choice oort needs {SQUARED_LOSSES} of the state that clients receive; {why}")
