"""``--verify``: checks everything stored in a data folder and its database, and names what is damaged."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Row, Select, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from promptfed.coordinator.engine import audit
from promptfed.coordinator.problems import first_error
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.backend import CannotOpen, DatabaseAway, one_line
from promptfed.coordinator.store.blobs import Blobs, DamagedBlob, digest_of
from promptfed.coordinator.store.opening import Store, open_to_look
from promptfed.coordinator.store.tables import (
    DELETING,
    EvaluationRow,
    FederationRow,
    PhaseRow,
    StateRow,
    TaskRow,
    UpdateRow,
)
from promptfed.shared.api.access_schemas import BrokenChain, check_chain
from promptfed.shared.canonical import canonical_json
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.tensors import TensorError, state_hash

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


# Checks, each of one kind of data


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
