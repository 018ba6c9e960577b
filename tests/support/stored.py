"""What a coordinator has stored: rows by table, and blobs."""

from __future__ import annotations

from sqlalchemy import func, select

from promptfed.coordinator.store.tables import AuditRow, Base, OperatorRow, StoreRow
from tests.support.coordinators import InThread
from tests.support.waiting import wait_for

KEPT = {table.__tablename__ for table in (AuditRow, OperatorRow, StoreRow)}


def rows(coordinator: InThread) -> dict[str, int]:
    """How many rows there are in each table that is not empty, but for what outlives federations."""
    with coordinator.registry.database.read() as session:
        counts = {
            name: session.scalar(select(func.count()).select_from(table)) or 0
            for name, table in Base.metadata.tables.items()
            if name not in KEPT
        }
    return {name: count for name, count in counts.items() if count}


def wait_until_empty(coordinator: InThread) -> None:
    """Until no federation has left anything."""
    wait_for("no row and no blob", lambda: not rows(coordinator) and not coordinator.registry.blobs.all())
