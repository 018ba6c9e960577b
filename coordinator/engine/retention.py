"""Removal of federations, of earlier rounds' tensors (``retention: last_round``), and of blobs that no row names.

One transaction hides a federation, then its rows are deleted in small transactions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from sqlalchemy import delete, or_, select, true, update
from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import audit
from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import (
    DELETING,
    BlobRow,
    ClientRow,
    EventRow,
    FederationRow,
    ObjectRow,
    PhaseRow,
    StateRow,
    TaskRow,
    UpdateRow,
)
from promptfed.shared.messages import ENDED
from promptfed.shared.service.fault_points import point

AT_ONCE = 500  # digests that one query asks for
SWEPT_AT_ONCE = 5000  # blobs that one query compares with the rows that name them
TURN_SECONDS = 0.001  # left to others, since who lets go of a lock and takes it again at once is mostly the first
NAMING: tuple[tuple[Any, Any], ...] = (
    (StateRow.sha256, StateRow.stored),
    (UpdateRow.sha256, UpdateRow.stored),
    (TaskRow.payload_sha256, TaskRow.payload_stored),
    (FederationRow.supplied_state, true()),
)
"""Columns that name blobs, and where they do."""

ROWS_AT_ONCE = 500  # rows of one transaction, and with a task go its update and its evaluation
BEHIND_TASKS: tuple[Any, ...] = (StateRow, EventRow, ClientRow, PhaseRow)


def has_to_retire(federation: Federation, retired: int) -> bool:
    """Whether rounds have passed whose tensors are not kept, beyond the ``retired`` ones."""
    return federation.spec.retention == "last_round" and _kept_from(federation) > retired


def retire(registry: Registry, id: str) -> None:
    """Remove updates, payloads and states of the rounds before the last completed one; their rows stay."""
    federation = registry.get(id)
    bound = _kept_from(federation)
    with registry.change(id) as change:
        digests = set(_retire_rows(change.session, id, bound))
    collect(registry, digests)
    registry.retired[id] = bound


def remove_updates(session: Session, id: str, client: str) -> set[str]:
    """Mark a client's updates and payloads as removed; returns their digests. Rows and their figures stay."""
    mine = (TaskRow.federation_id == id, TaskRow.client == client)
    updates = (UpdateRow.task_id.in_(select(TaskRow.id).where(*mine)), UpdateRow.stored)
    digests = set(session.scalars(select(UpdateRow.sha256).where(*updates)))
    payloads = session.scalars(select(TaskRow.payload_sha256).where(*mine, TaskRow.payload_stored))
    digests.update(digest for digest in payloads if digest is not None)
    session.execute(update(UpdateRow).where(*updates).values(stored=False))
    # Without the key nobody takes the noise off what is left, to see what this client has changed.
    counted = select(TaskRow.phase_id).where(*mine, TaskRow.counted)
    session.execute(update(PhaseRow).where(PhaseRow.id.in_(counted)).values(noise_key=None))
    session.execute(update(TaskRow).where(*mine).values(payload_stored=False))
    return digests


def awaits_computing(session: Session, id: str, client: str) -> bool:
    """Whether an accepted update of ``client`` may still have to be aggregated."""
    waiting = (TaskRow.client == client, TaskRow.status == "answered", PhaseRow.completed_at.is_(None))
    return session.execute(queries.tasks_with_phases(id).where(*waiting).limit(1)).first() is not None


def collect(registry: Registry, digests: Iterable[str]) -> None:
    """Remove those of ``digests`` that no row names any more, some at a time: meanwhile nothing else can change."""
    candidates = sorted(digests)
    for begin in range(0, len(candidates), AT_ONCE):
        some = candidates[begin : begin + AT_ONCE]
        with registry.exclusively(), registry.database.read() as session:
            registry.blobs.remove(set(some) - _named(session, some))
        time.sleep(TURN_SECONDS)


def sweep(registry: Registry) -> None:
    """Remove every blob that no row names, some at a time: what a crash between a blob and its row has left."""
    for column in (BlobRow.digest, ObjectRow.digest):
        last: str | None = ""
        while last is not None and not registry.wakeups.closed:
            with registry.database.read() as session:
                last, unnamed = _unnamed_after(session, column, last)
            collect(registry, unnamed)
    collect(registry, registry.blobs.files())
    registry.blobs.remove_litter()


def _unnamed_after(session: Session, column: Any, last: str) -> tuple[str | None, list[str]]:
    """Digests that no row names, of the next ones after ``last``; and where to go on, None behind the last one."""
    following = select(column).where(column > last).order_by(column)
    end = session.scalar(following.offset(SWEPT_AT_ONCE - 1).limit(1))
    if end is not None:
        following = following.where(column <= end)
    naming = [select(1).where(name == column, stored).exists() for name, stored in NAMING]
    return end, list(session.scalars(following.where(~or_(*naming))))


def _named(session: Session, digests: list[str]) -> set[str]:
    """The ``digests`` that a row names."""
    return {
        digest
        for column, stored in NAMING
        for digest in session.scalars(select(column).where(stored, column.in_(digests)))
    }


def _kept_from(federation: Federation) -> int:
    return federation.run.round if federation.run.state in ENDED else federation.run.round - 1


def _retire_rows(session: Session, id: str, bound: int) -> Iterable[str]:
    """Mark what the rounds before ``bound`` hold as removed; its digests. Retired rounds are not read again."""
    gone = queries.last_state(session, id, ~StateRow.stored)
    begin = gone.round if gone is not None else 0  # everything of the rounds before it is removed
    last = queries.last_state(session, id)
    old_states = [StateRow.federation_id == id, StateRow.round.between(begin, bound - 1), StateRow.stored]
    if last is not None:
        old_states.append(StateRow.id != last.id)
    old_phases = select(PhaseRow.id).where(PhaseRow.federation_id == id, PhaseRow.round.between(begin, bound - 1))
    old_tasks = TaskRow.phase_id.in_(old_phases)
    old_updates = (UpdateRow.task_id.in_(select(TaskRow.id).where(old_tasks)), UpdateRow.stored)
    yield from session.scalars(select(StateRow.sha256).where(*old_states))
    yield from session.scalars(select(UpdateRow.sha256).where(*old_updates))
    for digest in session.scalars(select(TaskRow.payload_sha256).where(old_tasks, TaskRow.payload_stored)):
        yield str(digest)
    # No object of these rows is at hand that would have to follow.
    blindly = {"synchronize_session": False}
    session.execute(update(StateRow).where(*old_states).values(stored=False), execution_options=blindly)
    session.execute(update(UpdateRow).where(*old_updates).values(stored=False), execution_options=blindly)
    session.execute(update(TaskRow).where(old_tasks).values(payload_stored=False), execution_options=blindly)
    with_keys = (PhaseRow.id.in_(old_phases), PhaseRow.noise_key.is_not(None))
    session.execute(update(PhaseRow).where(*with_keys).values(noise_key=None), execution_options=blindly)


def delete_federation(registry: Registry, id: str) -> None:
    """Delete a federation with all its data, also one whose method is absent. Raises NotFound, RegistryClosed."""
    with registry.exclusively():
        federation = registry.find_any(id)
        with registry.database.write() as session:
            _hide(session, federation)
            audit.note(session, "federation-deleted", federation)
        registry.forget(id)
    point("federation-hidden")
    try:
        _delete_rows(registry, id)
    except BaseException:
        registry.leftovers = True
        raise


def finish(registry: Registry) -> None:
    """Delete what is left over of federations whose deletion was cut short. Raises as ``delete_federation`` does."""
    registry.leftovers = False
    try:
        with registry.database.read() as session:
            ids = list(session.scalars(select(FederationRow.id).where(FederationRow.state == DELETING)))
        for id in ids:
            _delete_rows(registry, id)
    except BaseException:
        registry.leftovers = True
        raise


def _hide(session: Session, federation: Federation) -> None:
    """Free its name and its idempotency key; no spec can have the row's new name."""
    # By a statement: what the row holds may be what cannot be read.
    hidden = {"state": DELETING, "name": f"{DELETING} {federation.id}", "idempotency_key": None}
    session.execute(update(FederationRow).where(FederationRow.id == federation.id).values(**hidden))


def _delete_rows(registry: Registry, id: str) -> None:
    while True:
        if registry.wakeups.closed:
            raise RegistryClosed
        with registry.database.write() as session:
            any_rows, digests = _delete_some(session, id)
            if not any_rows:
                supplied = select(FederationRow.supplied_state).where(FederationRow.id == id)
                digests = {digest for digest in session.scalars(supplied) if digest is not None}
                session.execute(delete(FederationRow).where(FederationRow.id == id))
        point("federation-rows-deleted")
        collect(registry, digests)
        if not any_rows:
            registry.database.erase()
            return
        _let_others_in()


def _let_others_in() -> None:
    time.sleep(TURN_SECONDS)


def _delete_some(session: Session, id: str) -> tuple[bool, set[str]]:
    """Delete some rows; returns whether there were any, and the digests that they named."""
    query = select(TaskRow.id, TaskRow.payload_sha256).where(TaskRow.federation_id == id).limit(ROWS_AT_ONCE)
    tasks = {row.id: row.payload_sha256 for row in session.execute(query)}
    if tasks:
        sent = session.scalars(select(UpdateRow.sha256).where(UpdateRow.task_id.in_(tasks)))
        digests = {digest for digest in (*tasks.values(), *sent) if digest}
        session.execute(delete(TaskRow).where(TaskRow.id.in_(tasks)), execution_options={"synchronize_session": False})
        return True, digests
    for table in BEHIND_TASKS:
        keys = list(session.scalars(select(table.id).where(table.federation_id == id).limit(ROWS_AT_ONCE)))
        if keys:
            mine = table.id.in_(keys)
            digests = set(session.scalars(select(StateRow.sha256).where(mine))) if table is StateRow else set()
            session.execute(delete(table).where(mine), execution_options={"synchronize_session": False})
            return True, digests
    return False, set()
