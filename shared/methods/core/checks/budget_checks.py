"""The check of a spec's section ``training.budget``."""

from __future__ import annotations

from promptfed.shared.methods.core.checks.mean_checks import check_changes, check_one_mean, distinct_phases
from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.spec.spec import FederationSpec


def check_budget(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if changes of ``spec`` cannot be weighed by FedNova."""
    if spec.training.budget is None:
        return
    if spec.validates:
        raise MethodError("in a validation nobody trains: leave it out")
    if spec.training.optimizer != "sgd":
        text = f"FedNova has weights for the steps of sgd, and none for {spec.training.optimizer}"
        raise MethodError(f"{text}: take optimizer sgd with a learning rate for it, or leave budget out")
    if spec.secure_aggregation is not None:
        raise MethodError("weights follow from the steps, and with secure sums no number leaves a client: leave it out")
    if spec.privacy.level == "sample":
        raise MethodError("privacy.level sample accounts for the steps of training.epochs: leave budget out")
    if spec.privacy.level == "client":
        raise MethodError("privacy.level client clips changes to one length, which steps must not scale: leave it out")
    check_one_mean(method, spec.rounds, "weigh", "there is no change to weigh by its steps")
    check_changes(method, spec.rounds, "weigh")
    names = {phase.name for phase in distinct_phases(method, spec.rounds)}
    if len(names) > 1:
        raise MethodError(f"{method.name} does different things in its phases: leave budget out")
    if method.own_steps is not None:
        raise MethodError(f"{method.name} has no weights for its steps, because {method.own_steps}: leave budget out")
