"""Checks of the spec's ``loss`` that depend on the method or on privacy."""

from __future__ import annotations

from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.spec.spec import FederationSpec


def check_loss(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if ``method`` has a loss of its own, or if privacy hides what the loss reads."""
    if spec.loss.is_plain:
        return
    if not method.can_take_losses():
        raise MethodError(f"{method.name} trains with a loss of its own: leave loss out, or choose another method")
    if spec.loss.balance != "none" and spec.privacy.level == "sample":
        raise MethodError(
            "balance reads how many images of each class a client has, which privacy.level sample hides: "
            "take balance: none"
        )
