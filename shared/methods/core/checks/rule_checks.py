"""The check of a spec's aggregation rule."""

from __future__ import annotations

from promptfed.shared.methods.core.checks.mean_checks import distinct_phases
from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.spec.spec_aggregation import AggregationSpec

ROUNDING = 1e-9  # tolerance for a share times a number


def check_rule(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if the rule of ``spec.aggregation`` does not suit the method or the number of updates."""
    check_means(method, spec)
    least = spec.participation.least_answers
    try:
        # With f = floor(tolerate * K), a condition that holds for the fewest updates holds for more.
        check_krum(spec.aggregation, least)
    except MethodError as error:
        raise MethodError(
            f"{error}, and a phase may close with {least}: raise participation.min_clients or quorum, or choose median"
        ) from None


def check_means(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if ``spec.aggregation`` is not the plain mean but the method's phases are no means."""
    given = spec.aggregation
    if given.is_plain_mean and given.server.optimizer == "none":
        return
    if given.is_plain_mean:
        wanted = f"the server optimizer {given.server.optimizer}"
    else:
        wanted = f"the rule {given.rule}" if given.rule != "mean" else "clip_norm"
    phases = distinct_phases(method, spec.rounds)
    if not any(phase.up for phase in phases):
        raise MethodError(f"{wanted} has nothing to work on: {method.name} sends nothing up; leave it out")
    others = [phase.name for phase in phases if not phase.mean]
    if others:
        raise MethodError(
            f"{wanted} cannot take the mean's place: {method.name} does not combine its updates by a mean in "
            f"its phase {others[0]!r}; leave it out"
        )


def check_krum(given: AggregationSpec, count: int) -> None:
    """Raise MethodError if ``count`` updates are too few for Krum: K < 2f + 3 (Blanchard et al., 2017), or f = 0."""
    if given.rule not in ("krum", "multi_krum"):
        return
    tolerate = given.tolerate
    assert tolerate is not None
    if count * (1 - 2 * tolerate) < 3 - ROUNDING or count * tolerate < 1 - ROUNDING:
        least = 3
        while least * (1 - 2 * tolerate) < 3 - ROUNDING or least * tolerate < 1 - ROUNDING:
            least += 1
        raise MethodError(f"{given.rule} with tolerate {tolerate:g} needs at least {least} updates")
