"""The check of a spec's section ``schedule``."""

from __future__ import annotations

from promptfed.shared.methods.core.checks.mean_checks import check_changes, check_one_mean
from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.spec.spec import FederationSpec


def check_schedule(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if ``spec`` cannot run in asynchronous rounds."""
    if spec.schedule is None:
        return
    if spec.validates:
        raise MethodError("in a validation nobody trains: leave it out")
    check_one_mean(method, spec.rounds, "buffer", "a late change cannot be added to a newer state")
    if any(len(method.phases(round, spec.rounds)) > 1 for round in {1, min(2, spec.rounds), spec.rounds}):
        raise MethodError(f"{method.name} asks the same clients twice in a round, and here nobody waits for anybody")
    check_changes(method, spec.rounds, "add")
    if spec.secure_aggregation is not None:
        raise MethodError("a secure sum is of clients that answer together: leave secure_aggregation out")
    if spec.privacy.level == "client":
        raise MethodError("privacy.level client needs rounds whose clients are drawn together: take level sample")
    if spec.participation.fraction < 1:
        raise MethodError("participation.fraction is for rounds: give schedule.concurrency instead")
