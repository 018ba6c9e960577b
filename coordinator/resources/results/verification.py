"""Checks of what is stored: all of a data folder and its database, and rounds computed again to the same hashes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import ValidationError
from sqlalchemy import Row, Select, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.aggregation.global_state import NOTHING, Given, given
from promptfed.coordinator.aggregation.rules import Rule
from promptfed.coordinator.aggregation.secure_sums import NoiseTerms
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import audit, sums
from promptfed.coordinator.engine.jobs import FORGOTTEN
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.problems import NoState, UpdatesGone, first_error
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.backend import CannotOpen, DatabaseAway, one_line
from promptfed.coordinator.store.blobs import Blobs, DamagedBlob, digest_of
from promptfed.coordinator.store.opening import Store, open_to_look
from promptfed.coordinator.store.stored_tensors import room
from promptfed.coordinator.store.tables import (
    DELETING,
    EvaluationRow,
    EventRow,
    FederationRow,
    PhaseRow,
    StateRow,
    SumRow,
    TaskRow,
    UpdateRow,
)
from promptfed.shared.api.api_schemas import BrokenChain, check_chain
from promptfed.shared.api.report_schemas import ReplayedState
from promptfed.shared.canonical import canonical_json
from promptfed.shared.messages import ENDED
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.tensors import Arrays, TensorError, state_hash

AT_ONCE = 1000  # rows that are held of a query
WHOLE, DAMAGED, CANNOT_LOOK, AWAY = 0, 1, 2, 3
"""Exit codes."""

Reading = Callable[[Session, Blobs], Iterator[str]]


def verify(settings: Settings) -> int:
    """Check the store of the settings, and print a line for each damaged item; returns the exit code."""
    try:
        with closing(open_to_look(settings)) as store:
            return _look(store)
    except DatabaseAway as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return AWAY
    except (CannotOpen, OSError) as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return CANNOT_LOOK


def _look(store: Store) -> int:
    damaged = 0
    for name, reading in CHECKS.items():
        try:
            with store.database.read() as session:
                for line in reading(session, store.blobs):
                    damaged += 1
                    print(f"damaged: {line}", flush=True)
        except (SQLAlchemyError, ValueError) as error:
            damaged += 1
            print(f"damaged: {name} cannot be read: {one_line(getattr(error, 'orig', None) or error)}", flush=True)
    place = store.database.backend.place
    print(f"{damaged} damaged in {place}" if damaged else f"all of {place} and its blobs is what was stored")
    return DAMAGED if damaged else WHOLE


def _database(session: Session, blobs: Blobs) -> Iterator[str]:
    if session.connection().dialect.name == "sqlite":
        for (verdict,) in session.connection().exec_driver_sql("PRAGMA integrity_check"):
            if verdict != "ok":
                yield f"the database itself: {one_line(verdict)}"
        for row in session.connection().exec_driver_sql("PRAGMA foreign_key_check"):
            yield f"the database itself: a row of {row[0]} belongs to none of {row[2]}"


def _specs(session: Session, blobs: Blobs) -> Iterator[str]:
    here = FederationRow.state != DELETING
    for id, name in session.execute(select(FederationRow.id, FederationRow.name).where(here)).all():
        try:
            FederationSpec.model_validate(
                session.execute(select(FederationRow.spec).where(FederationRow.id == id)).scalar_one()
            )
        except ValidationError as error:
            yield f"the spec of {name}: {first_error(error)}"
        except json.JSONDecodeError as error:
            yield f"the spec of {name}: {one_line(error)}"


def _states(session: Session, blobs: Blobs) -> Iterator[str]:
    query = select(FederationRow.name, StateRow.round, StateRow.sha256, StateRow.bytes, StateRow.state_hash)
    joined = query.join(FederationRow, FederationRow.id == StateRow.federation_id).where(StateRow.stored)
    for row in _rows(session, joined.order_by(StateRow.id)):
        blob = f"the state of round {row.round} of {row.name}"
        damage = list(_damage(blobs, blob, row.sha256, row.bytes))
        if not damage and _state_hash(blobs, row.sha256) != row.state_hash:
            damage = [f"{blob} ({row.sha256}) is another state than the recorded {row.state_hash}"]
        yield from damage


def _updates(session: Session, blobs: Blobs) -> Iterator[str]:
    query = _of_tasks(TaskRow.client, UpdateRow.sha256, UpdateRow.bytes)
    joined = query.join(UpdateRow, UpdateRow.task_id == TaskRow.id).where(UpdateRow.stored)
    for row in _rows(session, joined.order_by(TaskRow.phase_id, TaskRow.client)):
        blob = f"the update of {row.client!r} in round {row.round} ({row.phase}) of {row.name}"
        yield from _damage(blobs, blob, row.sha256, row.bytes)


def _payloads(session: Session, blobs: Blobs) -> Iterator[str]:
    query = _of_tasks(TaskRow.payload_sha256, TaskRow.payload_bytes).distinct()
    for row in _rows(session, query.where(TaskRow.payload_stored, TaskRow.payload_sha256.is_not(None))):
        blob = f"the payload of round {row.round} ({row.phase}) of {row.name}"
        yield from _damage(blobs, blob, row.payload_sha256, row.payload_bytes)


def _of_tasks(*columns: Any) -> Select[*tuple[Any, ...]]:
    """These columns of all tasks, with the names of their federation and phase, and the round."""
    place = (FederationRow.name, PhaseRow.round, PhaseRow.name.label("phase"))
    query = select(*place, *columns).select_from(TaskRow).join(PhaseRow, PhaseRow.id == TaskRow.phase_id)
    return query.join(FederationRow, FederationRow.id == TaskRow.federation_id)


def _supplied(session: Session, blobs: Blobs) -> Iterator[str]:
    for row in _rows(session, select(FederationRow.name, FederationRow.supplied_state)):
        if row.supplied_state is not None:
            yield from _damage(blobs, f"the supplied initial state of {row.name}", row.supplied_state)


def _evaluations(session: Session, blobs: Blobs) -> Iterator[str]:
    query = select(TaskRow.client, FederationRow.name, EvaluationRow.digest, EvaluationRow.body)
    joined = query.join(TaskRow, TaskRow.id == EvaluationRow.task_id).join(
        FederationRow, FederationRow.id == TaskRow.federation_id
    )
    for row in _rows(session, joined):
        if digest_of(canonical_json(row.body).encode()) != row.digest:
            yield f"an evaluation of {row.client!r} in {row.name} has changed: its digest was {row.digest}"


def _audit_log(session: Session, blobs: Blobs) -> Iterator[str]:
    try:
        check_chain(audit.entries(session, 0, sys.maxsize))
    except BrokenChain as error:
        yield f"the audit log: {error}"


CHECKS: dict[str, Reading] = {
    "the database itself": _database,
    "specs": _specs,
    "states": _states,
    "updates": _updates,
    "payloads": _payloads,
    "what was supplied": _supplied,
    "evaluations": _evaluations,
    "the audit log": _audit_log,
}


def _rows(session: Session, query: Select[*tuple[Any, ...]]) -> Iterator[Row[Any]]:
    yield from session.execute(query.execution_options(yield_per=AT_ONCE))


def _damage(blobs: Blobs, name: str, digest: str, size: int | None = None) -> Iterator[str]:
    """A line if the blob is damaged."""
    try:
        place = blobs.places([digest])[0]
    except DamagedBlob as error:
        yield f"{name} ({digest}) {error.why}"
        return
    stored = len(place) if isinstance(place, bytes) else place.stat().st_size
    if size not in (None, stored):
        yield f"{name} ({digest}) has {stored} bytes instead of the recorded {size}"


def _state_hash(blobs: Blobs, digest: str) -> str | None:
    try:
        return state_hash(blobs.tensors(digest)[0])
    except TensorError:
        return None


@dataclass(frozen=True)
class Step:
    """How a committed state was made of the one ``before`` it, whose clients were those of ``roster``.

    ``names``: who joined, or was forgotten. ``given``: the counted updates. ``terms``: those of its noise.
    """

    state: StateRow
    before: StateRow | None
    roster: list[str]
    names: list[str]
    number: int = 0
    given: Given = NOTHING
    total: SumRow | None = None
    terms: NoiseTerms | None = None


def replay(registry: Registry, federation: Federation, round: int) -> list[ReplayedState]:
    """Compute every state of a completed round again.

    Raises:
        NoState, UpdatesGone: before anything is computed.
    """
    run = federation.run
    if not (round < run.round or (round == run.round and run.state in ENDED)):
        raise NoState(
            f"round {round} is not over: {federation.name} is in round {run.round}; wait, or name an earlier one"
        )
    with registry.database.read() as session:
        steps = _steps(session, federation, round)
    return [_again(registry, federation, step) for step in steps]


def _steps(session: Session, federation: Federation, round: int) -> list[Step]:
    """The steps that led to the states of a round. Raises UpdatesGone if any tensors of them are no longer kept."""
    rows = list(session.scalars(queries.states(federation.id).where(StateRow.round == round)))
    if not rows:
        return []
    before = queries.last_state(session, federation.id, StateRow.round <= round, StateRow.id < rows[0].id)
    joined = _names(session, federation, ("initial", "join"), "clients-joined")
    names = joined | _names(session, federation, (FORGOTTEN,), "client-forgotten")
    steps = []
    for row in rows:
        roster = [name for id, newcomers in joined.items() if id < row.id for name in newcomers]
        step = Step(row, before, roster, names.get(row.id, []))
        if row.phase_id is not None:
            step = _of_phase(session, federation, step, session.get_one(PhaseRow, row.phase_id))
        if not row.stored or (before is not None and not before.stored) or step.given.gone:
            raise _gone(federation, round)
        steps.append(step)
        before = row
    return steps


def _gone(federation: Federation, round: int) -> UpdatesGone:
    why = f"retention: {federation.spec.retention}; a withdrawn client's may have been deleted"
    return UpdatesGone(f"tensors of round {round} are no longer kept ({why})")


def _of_phase(session: Session, federation: Federation, step: Step, phase: PhaseRow) -> Step:
    """The step with what its phase was given. Raises UpdatesGone if the key of its noise is deleted."""
    terms = None
    if federation.spec.privacy.protects_clients:
        if phase.noise_key is None:
            raise _gone(federation, phase.round)
        terms = sums.terms_of(federation, phase)
    counted, total = given(session, federation, phase.id), session.get(SumRow, phase.id)
    return replace(step, number=phase.step, given=counted, total=total, terms=terms)


def _names(session: Session, federation: Federation, origins: tuple[str, ...], kind: str) -> dict[int, list[str]]:
    """By id of the states with these origins: the clients of its event of this ``kind``."""
    made = queries.states(federation.id).where(StateRow.origin.in_(origins), StateRow.phase_id.is_(None))
    events = select(EventRow.data).where(EventRow.federation_id == federation.id, EventRow.kind == kind)
    pairs = zip(session.scalars(made), session.scalars(events.order_by(EventRow.id)), strict=False)
    return {state.id: data["clients"] if "clients" in data else [data["client"]] for state, data in pairs}


def _again(registry: Registry, federation: Federation, step: Step) -> ReplayedState:
    recorded = step.state.state_hash
    before = registry.blobs.tensors(step.before.sha256)[0] if step.before is not None else {}
    replayed = state_hash(_computed(registry, federation, step, before))
    intact = step.before is None or state_hash(before) == step.before.state_hash
    intact = intact and _state_hash(registry.blobs, step.state.sha256) == recorded
    same = intact and replayed == recorded
    return ReplayedState(origin=step.state.origin, state_hash=recorded, replayed_hash=replayed, same=same)


def _computed(registry: Registry, federation: Federation, step: Step, before: Arrays) -> Arrays:
    """Compute the state after a step from the state ``before`` it. Raises DamagedBlob."""
    if step.before is None:
        return global_state.initial_state(registry.blobs, federation, federation.context(step.names))
    context = federation.context(step.roster)
    if step.state.origin == FORGOTTEN:
        return global_state.forgotten(federation, before, step.names[0], context)
    if step.state.phase_id is None:
        return global_state.joined(federation, before, step.roster, step.names)
    phase = federation.method_phase(step.state.round, step.number)
    updates = global_state.stored_updates(registry.blobs, step.given.updates)
    if step.terms is not None:
        return sums.noised(federation, before, phase, updates, step.terms, context)[0]
    if step.total is not None:
        total = np.frombuffer(step.total.body, dtype="<i8").astype(np.int64)
        return sums.state_after(federation, before, phase, total, step.total.weight, context)[0]
    rule = Rule(federation.spec.aggregation, before)
    with room(registry.blobs) as rule.room:
        return global_state.after_phase(federation, before, phase, updates, rule, context)
