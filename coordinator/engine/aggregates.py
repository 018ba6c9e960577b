"""Result of an aggregation: the state after a closed phase, and what its report keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation import changes, global_state
from promptfed.coordinator.aggregation.given import Given
from promptfed.coordinator.aggregation.rules import Judged
from promptfed.coordinator.aggregation.server_half import call
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import private_jobs, secure_jobs
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.tables import PhaseRow, TaskRow, UpdateRow
from promptfed.coordinator.store.tensor_blobs import room
from promptfed.shared.methods.core.interface.base import Phase, ServerContext
from promptfed.shared.methods.core.interface.insights import Measured, MeasuresPhases
from promptfed.shared.tensors import Arrays, method_part


@dataclass(frozen=True)
class Computed:
    """Result of an aggregation: the state, what the report keeps, what the rule made of each counted client."""

    after: Arrays
    measured: dict[str, Any]
    judged: Mapping[str, Judged]
    clients: list[str]
    summed: secure_jobs.Summed | None = None


def computed(registry: Registry, federation: Federation, state: Arrays, phase_id: int, given: Given) -> Computed:
    """The state after the closed phase, of its stored updates or its secure sum.

    Raises:
        SecureError: the sum cannot be one of honest clients.
    """
    changed: dict[str, float] = {}
    run = federation.run
    if federation.spec.secure_aggregation is not None:
        summed = secure_jobs.summed(registry, federation, state, run.round, run.step)
        return Computed(summed.after, summed.measured(), {}, [], summed)
    phase = federation.method_phase(run.round, run.step)
    if federation.spec.privacy.protects_clients:
        return _computed_with_noise(registry, federation, state, phase_id, phase, given)
    context, rule = federation.context(), global_state.rule_of(federation, state)
    payload = lru_cache(maxsize=8)(lambda sha256: registry.blobs.tensors(sha256)[0])  # of most, the same
    with room(registry.blobs) as rule.room:
        stored = global_state.stored_updates(registry.blobs, given.updates)
        measured = changes.measured(stored, lambda client: payload(given.payloads[client]), changed)
        after, told = global_state.after_phase(federation, state, phase, measured, rule, context)
    measures = _measured(federation, state, phase, after, context)
    measures = Measured(measures.phase | told.phase, measures.clients | told.clients)
    report = {**_finite(measures), "changes": _finite_numbers(changed)}
    return Computed(after, report, rule.judged, [client for client, _, _ in given.updates])


def _computed_with_noise(
    registry: Registry,
    federation: Federation,
    state: Arrays,
    phase_id: int,
    phase: Phase,
    given: Given,
) -> Computed:
    with registry.database.read() as session:
        terms = private_jobs.terms_of(federation, session.get_one(PhaseRow, phase_id))
        before = private_jobs.released(session, federation)
    stream, context = global_state.stored_updates(registry.blobs, given.updates), federation.context()
    noised = private_jobs.noised(federation, state, phase, stream, terms, context)
    measures = _measured(federation, state, phase, noised.after, context)
    told = {"changes": noised.mean.lengths, "privacy": noised.measured(federation, before + 1, registry.noise.kind)}
    return Computed(
        noised.after, {**_finite(measures), **told}, noised.judged(), [client for client, _, _ in given.updates]
    )


def note_judged(session: Session, phase_id: int, judged: Mapping[str, Judged]) -> None:
    """Store the rule's verdict on each counted update."""
    if not judged:
        return
    mine = (TaskRow.phase_id == phase_id, TaskRow.counted)
    rows = session.execute(
        select(TaskRow.client, UpdateRow).join(UpdateRow, UpdateRow.task_id == TaskRow.id).where(*mine)
    )
    for client, row in rows:
        if client in judged:
            row.judged = asdict(judged[client])


def _measured(federation: Federation, before: Arrays, phase: Phase, after: Arrays, context: ServerContext) -> Measured:
    if not isinstance(federation.method, MeasuresPhases):
        return Measured()
    measured: Measured = call(federation, "measure", method_part(before), phase, method_part(after), context)
    return measured


def _finite(measured: Measured) -> dict[str, Any]:
    """The finite numbers of ``measured``, for the report."""
    clients = {name: _finite_numbers(numbers) for name, numbers in sorted(measured.clients.items())}
    return {"phase": _finite_numbers(measured.phase), "clients": clients}


def _finite_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
