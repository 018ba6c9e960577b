"""Deleting a federation: one transaction hides it, then its rows are deleted in small transactions.

Other transactions run in between. The request is answered when all rows are deleted. After a kill, a full disk or a
lost database the rest is deleted later: the row in ``federations``, which is deleted last, marks it.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import audit, retention
from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.tables import (
    DELETING,
    ClientRow,
    EventRow,
    FederationRow,
    PhaseRow,
    StateRow,
    TaskRow,
    UpdateRow,
)

AT_ONCE = 500  # rows of one transaction, and with a task go its update and its evaluation
BEHIND_TASKS: tuple[Any, ...] = (StateRow, EventRow, ClientRow, PhaseRow)


def delete_federation(registry: Registry, id: str) -> None:
    """Delete a federation with all its data, also one whose method is absent. Raises NotFound, RegistryClosed."""
    with registry.exclusively():
        federation = registry.find_any(id)
        with registry.write(id) as session:
            _hide(session, federation)
            audit.note(session, "federation-deleted", federation)
        registry.forget(id)
        if registry.leases is not None:
            registry.leases.removed(id)
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
            if registry.leases is not None and id not in registry.leases.held:
                continue  # Another coordinator's.
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
        with registry.write(id) as session:
            any_rows, digests = _delete_some(session, id)
            if not any_rows:
                digests = retention.digests_of(session, id)
                session.execute(delete(FederationRow).where(FederationRow.id == id))
        point("federation-rows-deleted")
        retention.collect(registry, digests)
        if not any_rows:
            registry.database.erase()
            if registry.leases is not None:
                registry.leases.let_go(id)
            return
        _let_others_in()


def _let_others_in() -> None:
    time.sleep(retention.TURN_SECONDS)


def _delete_some(session: Session, id: str) -> tuple[bool, set[str]]:
    """Delete some rows; returns whether there were any, and the digests that they named."""
    query = select(TaskRow.id, TaskRow.payload_sha256).where(TaskRow.federation_id == id).limit(AT_ONCE)
    tasks = {row.id: row.payload_sha256 for row in session.execute(query)}
    if tasks:
        sent = session.scalars(select(UpdateRow.sha256).where(UpdateRow.task_id.in_(tasks)))
        digests = {digest for digest in (*tasks.values(), *sent) if digest}
        session.execute(delete(TaskRow).where(TaskRow.id.in_(tasks)), execution_options={"synchronize_session": False})
        return True, digests
    for table in BEHIND_TASKS:
        keys = list(session.scalars(select(table.id).where(table.federation_id == id).limit(AT_ONCE)))
        if keys:
            mine = table.id.in_(keys)
            digests = set(session.scalars(select(StateRow.sha256).where(mine))) if table is StateRow else set()
            session.execute(delete(table).where(mine), execution_options={"synchronize_session": False})
            return True, digests
    return False, set()
