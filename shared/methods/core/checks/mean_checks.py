"""Checks whether a method's updates have one mean, which secure sums and noise require."""

from __future__ import annotations

from promptfed.shared.methods.core.interface.base import Method, MethodError, Phase


def distinct_phases(method: Method, rounds: int) -> list[Phase]:
    """The distinct phases of a first, a second and a last round."""
    return list(dict.fromkeys(phase for round in (1, 2, rounds) for phase in method.phases(round, rounds)))


def check_one_mean(method: Method, rounds: int, nothing: str, so: str) -> None:
    """Raise MethodError unless the updates of each phase are combined to one mean of real numbers.

    ``nothing`` and ``so`` are the ends of the messages: the purpose that is void, and the consequence.
    """
    phases = distinct_phases(method, rounds)
    if not any(phase.up for phase in phases):
        raise MethodError(f"{method.name} sends nothing up: there is nothing to {nothing}")
    others = [phase.name for phase in phases if not phase.mean]
    if others:
        raise MethodError(f"{method.name} does not combine its updates by a mean in its phase {others[0]!r}: {so}")
    if not method.one_payload:
        raise MethodError(f"{method.name} gives each client another payload, from which it trains: {so}")
    if type(method).expected_update is not Method.expected_update:
        raise MethodError(f"{method.name} asks clients for different tensors: {so}")
    if any(tensor.dtype != "float32" for phase in phases for tensor in phase.up):
        raise MethodError(f"{method.name} sends tensors that are no real numbers: {so}")
