"""Checks of what is stored: all of a data folder and its database, and rounds computed again to the same hashes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from promptfed.coordinator.store.blobs import Blobs, DamagedBlob, digest_of, room
from promptfed.coordinator.store.database import CannotOpen, DatabaseAway, one_line
from promptfed.coordinator.store.opening import Store, open_to_look
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
        blob = f"the state of round {row.round} of {row.name} ({row.sha256})"
        why = _why_not(blobs, row.sha256, row.bytes)
        if why is None and _state_hash(blobs, row.sha256) != row.state_hash:
            why = f"is another state than the recorded {row.state_hash}"
        if why is not None:
            yield f"{blob} {why}"


def _updates(session: Session, blobs: Blobs) -> Iterator[str]:
    query = select(
        FederationRow.name, TaskRow.client, PhaseRow.round, PhaseRow.name.label("phase"), UpdateRow.sha256,
        UpdateRow.bytes,
    )  # fmt: skip
    joined = (
        query.join(TaskRow, TaskRow.id == UpdateRow.task_id)
        .join(PhaseRow, PhaseRow.id == TaskRow.phase_id)
        .join(FederationRow, FederationRow.id == TaskRow.federation_id)
        .where(UpdateRow.stored)
    )
    for row in _rows(session, joined.order_by(TaskRow.phase_id, TaskRow.client)):
        blob = f"the update of {row.client!r} in round {row.round} ({row.phase}) of {row.name}"
        yield from _damage(blobs, blob, row.sha256, row.bytes)


def _payloads(session: Session, blobs: Blobs) -> Iterator[str]:
    columns = (FederationRow.name, PhaseRow.round, PhaseRow.name.label("phase"))
    query = select(*columns, TaskRow.payload_sha256, TaskRow.payload_bytes).distinct()
    joined = (
        query.join(PhaseRow, PhaseRow.id == TaskRow.phase_id)
        .join(FederationRow, FederationRow.id == TaskRow.federation_id)
        .where(TaskRow.payload_stored, TaskRow.payload_sha256.is_not(None))
    )
    for row in _rows(session, joined):
        blob = f"the payload of round {row.round} ({row.phase}) of {row.name}"
        yield from _damage(blobs, blob, row.payload_sha256, row.payload_bytes)


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
    why = _why_not(blobs, digest, size)
    if why is not None:
        yield f"{name} ({digest}) {why}"


def _why_not(blobs: Blobs, digest: str, size: int | None = None) -> str | None:
    """What is wrong with a blob; None if it is intact."""
    try:
        place = blobs.places([digest])[0]
    except DamagedBlob as error:
        return error.why
    stored = len(place) if isinstance(place, bytes) else place.stat().st_size
    return f"has {stored} bytes instead of the recorded {size}" if size not in (None, stored) else None


def _state_hash(blobs: Blobs, digest: str) -> str | None:
    try:
        return state_hash(blobs.tensors(digest)[0])
    except TensorError:
        return None


@dataclass(frozen=True)
class CommittedStep:
    """One committed state, the state before it, and the clients that it knew.

    ``given``: the counted updates. ``terms``: the terms of its noise.
    """

    origin: str
    state: StateRow
    before: StateRow | None
    roster: tuple[str, ...]
    newcomers: tuple[str, ...]
    step: int = 0
    given: Given = NOTHING
    forgotten: str | None = None
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
        steps = steps_of(session, federation, round)
    if any(step.given.gone for step in steps):
        raise _gone(federation, round)
    return [_again(registry, federation, step) for step in steps]


def _gone(federation: Federation, round: int) -> UpdatesGone:
    why = f"retention: {federation.spec.retention}; a withdrawn client's may have been deleted"
    return UpdatesGone(f"tensors of round {round} are no longer kept ({why})")


def steps_of(session: Session, federation: Federation, round: int) -> list[CommittedStep]:
    """The steps that led to the states of a round. Raises UpdatesGone if a state is no longer kept."""
    rows = list(session.scalars(queries.states(federation.id).where(StateRow.round == round)))
    if not rows:
        return []
    before = queries.last_state(session, federation.id, StateRow.round <= round, StateRow.id < rows[0].id)
    newcomers, forgotten = joined_by_state(session, federation), _forgotten(session, federation)
    steps = []
    for row in rows:
        if not row.stored or (before is not None and not before.stored):
            raise _gone(federation, round)
        steps.append(_with_noise(session, federation, _step(session, federation, row, before, newcomers, forgotten)))
        before = row
    return steps


def _with_noise(session: Session, federation: Federation, step: CommittedStep) -> CommittedStep:
    """The step with the terms of its noise at level ``client``. Raises UpdatesGone if the noise key is deleted."""
    if not federation.spec.privacy.protects_clients or step.state.phase_id is None:
        return step
    phase = session.get_one(PhaseRow, step.state.phase_id)
    if phase.noise_key is None:
        raise _gone(federation, step.state.round)
    return replace(step, terms=sums.terms_of(federation, phase))


def joined_by_state(session: Session, federation: Federation) -> dict[int, list[str]]:
    """The clients that joined, by the id of the state that includes them."""
    made = _made_without_phase(session, federation, ("initial", "join"), "clients-joined")
    return {id: list(data["clients"]) for id, data in made}


def _forgotten(session: Session, federation: Federation) -> dict[int, str]:
    """The client that was forgotten, by the id of the state without it."""
    made = _made_without_phase(session, federation, (FORGOTTEN,), "client-forgotten")
    return {id: str(data["client"]) for id, data in made}


def _made_without_phase(
    session: Session, federation: Federation, origins: tuple[str, ...], kind: str
) -> Iterable[tuple[int, dict[str, Any]]]:
    """Ids of the states with these origins, each with the data of its event of this ``kind``."""
    made = queries.states(federation.id).where(StateRow.origin.in_(origins), StateRow.phase_id.is_(None))
    told = select(EventRow.data).where(EventRow.federation_id == federation.id, EventRow.kind == kind)
    ids = (state.id for state in session.scalars(made))
    return zip(ids, session.scalars(told.order_by(EventRow.id)), strict=False)


def _step(
    session: Session,
    federation: Federation,
    row: StateRow,
    before: StateRow | None,
    newcomers: Mapping[int, list[str]],
    forgotten: Mapping[int, str],
) -> CommittedStep:
    roster = [name for id, names in newcomers.items() if id < row.id for name in names]
    if row.id in forgotten:
        return CommittedStep(row.origin, row, before, tuple(roster), (), forgotten=forgotten[row.id])
    if row.phase_id is None:
        return CommittedStep(row.origin, row, before, tuple(roster), tuple(newcomers[row.id]))
    phase = session.get_one(PhaseRow, row.phase_id)
    counted, total = given(session, federation, row.phase_id), session.get(SumRow, row.phase_id)
    return CommittedStep(row.origin, row, before, tuple(roster), (), phase.step, counted, total=total)


def _again(registry: Registry, federation: Federation, step: CommittedStep) -> ReplayedState:
    before = _stored(registry, step.before) if step.before is not None else {}
    rule = global_state.rule_of(federation, before)
    replayed_hash = state_hash(computed(registry, federation, step, before, step.given.updates, rule))
    intact = step.before is None or state_hash(before) == step.before.state_hash
    intact = intact and state_hash(_stored(registry, step.state)) == step.state.state_hash
    return ReplayedState(
        origin=step.origin,
        state_hash=step.state.state_hash,
        replayed_hash=replayed_hash,
        same=intact and replayed_hash == step.state.state_hash,
    )


def computed(
    registry: Registry,
    federation: Federation,
    step: CommittedStep,
    before: Arrays,
    updates: Sequence[global_state.Counted],
    rule: Rule,
) -> Arrays:
    """Compute the state after a step from the state ``before`` it. Raises DamagedBlob."""
    context = federation.context([*step.roster, *step.newcomers])
    if step.before is None:
        return global_state.initial_state(registry.blobs, federation, context)
    if step.forgotten is not None:
        return global_state.forgotten(federation, before, step.forgotten, context)
    if step.newcomers:
        return global_state.joined(federation, before, step.roster, step.newcomers)
    phase = federation.method_phase(step.state.round, step.step)
    if step.terms is not None:
        stream = global_state.stored_updates(registry.blobs, updates)
        return sums.noised(federation, before, phase, stream, step.terms, context).after
    if step.total is not None:
        total = np.frombuffer(step.total.body, dtype="<i8").astype(np.int64)
        return sums.state_after(federation, before, phase, total, step.total.weight, context)[0]
    with room(registry.blobs) as rule.room:
        stored = global_state.stored_updates(registry.blobs, updates)
        return global_state.after_phase(federation, before, phase, stored, rule, context)


def _stored(registry: Registry, row: StateRow) -> Arrays:
    return registry.blobs.tensors(row.sha256)[0]
