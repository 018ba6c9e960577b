"""Checks of the spec's ``loss`` that depend on the method or on privacy."""

from __future__ import annotations

from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.spec.spec import FederationSpec


def check_loss(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if ``method`` has a loss of its own, or if privacy hides what the loss reads."""
    several = spec.task == "multi_label"
    if several and (spec.loss.kind in ("gce", "mae") or spec.loss.balance == "class_balanced"):
        what = "balance: class_balanced" if spec.loss.balance == "class_balanced" else f"kind: {spec.loss.kind}"
        raise MethodError(
            f"{what} is for one label per image: with task: multi_label take kind: cross_entropy or asymmetric, and "
            "balance: none or logit_adjusted"
        )
    if not several and spec.loss.kind == "asymmetric":
        raise MethodError("kind: asymmetric is for images with several labels: set task: multi_label, or leave it out")
    if spec.loss.is_plain:
        return
    if not method.can_take_losses():
        raise MethodError(f"{method.name} trains with a loss of its own: leave loss out, or choose another method")
    if spec.loss.balance != "none" and spec.loss.counts == "own" and spec.privacy.level == "sample":
        raise MethodError(
            "balance reads how many images of each class a client has, which privacy.level sample hides: "
            "take balance: none, or counts: federation"
        )
