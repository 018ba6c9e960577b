"""A securely summed phase as steps of the round machine: train, share, mask, confirm, unmask; in attempts.

Each attempt has its own step numbers, so that a round's stages stay in one order: attempt 2 of a phase follows attempt
1, and where an attempt succeeds the others are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

from promptfed.coordinator.domain.run_state import PhasePlan, SecureStep
from promptfed.shared.messages import TaskKind
from promptfed.shared.spec.spec_aggregation import SecureAggregationSpec
from promptfed.shared.spec.spec_section import ceil_fraction

KINDS: tuple[TaskKind, ...] = ("train", "share", "mask", "confirm", "unmask")
TRAIN, SHARE, MASK, CONFIRM, UNMASK = range(5)
ATTEMPTS = 2  # at a phase, with the same training


def steps_of(phases: Iterable[PhasePlan], spec: SecureAggregationSpec) -> tuple[PhasePlan, ...]:
    """The round's stages if each of the method's ``phases`` is summed securely."""
    plans: list[PhasePlan] = []
    for number, phase in enumerate(phases):
        begin = len(plans)
        after = begin + len(KINDS) * ATTEMPTS
        for attempt in range(1, ATTEMPTS + 1):
            first = len(plans)
            following = first + len(KINDS) if attempt < ATTEMPTS else None
            name = phase.name if attempt == 1 else f"{phase.name}/{attempt}"
            for index, kind in enumerate(KINDS):
                step = SecureStep(index, attempt, number, phase.name, first, following, after)
                own = name if index == TRAIN else f"{name}/{kind}"
                plans.append(PhasePlan(own, phase.ask, kind, spec.step_seconds if index else None, step))
    return tuple(plans)


def needed(spec: SecureAggregationSpec, step: SecureStep, cohort: int) -> int:
    """How many clients must answer ``step`` of an attempt for which ``cohort`` clients have sent keys."""
    threshold = max(2, ceil_fraction(spec.threshold, cohort))
    if step.index == TRAIN:
        return spec.minimum
    return max(threshold, spec.minimum) if step.index in (SHARE, MASK) else threshold
