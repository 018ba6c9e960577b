"""The check of a spec's section ``secure_aggregation``."""

from __future__ import annotations

from promptfed.shared.methods.core.checks.mean_checks import check_one_mean
from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.spec.spec import FederationSpec

MOST_CLIENTS = 1024


def check_secure(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if ``spec`` needs more than the sums that the coordinator sees."""
    given = spec.secure_aggregation
    if given is None:
        return
    check_one_mean(method, spec.rounds, "sum", "they cannot be summed, and only their sum is known")
    rule = spec.aggregation
    if rule.rule != "mean":
        raise MethodError(f"the rule {rule.rule} needs each update, and only their sum is known: take rule mean")
    if rule.clip_norm is not None:
        raise MethodError("clip_norm needs each update, and only their sum is known: leave it out")
    if spec.privacy.protects_clients:
        raise MethodError("privacy.level client needs each update, and only their sum is known: take level sample")
    if spec.participation.min_clients < given.minimum:
        least = spec.participation.min_clients
        text = f"a round may begin with {least} clients (participation.min_clients), and a sum is of {given.minimum}"
        raise MethodError(f"{text} at least: raise min_clients to {given.minimum}")
    if spec.participation.min_clients > MOST_CLIENTS:
        raise MethodError(f"a sum is of {MOST_CLIENTS} clients at most: lower participation.min_clients")
