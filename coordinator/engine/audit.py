"""The audit log: who has done what from where, each entry chained by hash to the one before; operators' tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.store.queries import Batch
from promptfed.coordinator.store.tables import AuditRow, OperatorRow
from promptfed.shared.api.api_schemas import FIRST_LINK, AuditEntry, OperatorRole

LAST = select(AuditRow.number, AuditRow.hash).order_by(AuditRow.number.desc()).limit(1)


@dataclass(frozen=True)
class Actor:
    """Who acts: an operator by name and role, an enrolment token, a client, or the coordinator itself."""

    name: str
    role: str = ""
    address: str = ""


ITSELF = Actor("the coordinator")
actor: ContextVar[Actor] = ContextVar("actor", default=ITSELF)


@contextmanager
def acting(who: Actor) -> Iterator[None]:
    """A block in which ``who`` is the actor."""
    before = actor.set(who)
    try:
        yield
    finally:
        actor.reset(before)


def note(session: Session, act: str, federation: Federation | None = None, **detail: Any) -> None:
    """Add an entry in the transaction that carries the act out."""
    batch = Batch()
    add(session, batch, act, federation, **detail)
    batch.write(session)


def add(session: Session, batch: Batch, act: str, federation: Federation | None = None, **detail: Any) -> None:
    """Write an entry in a transaction that writes ``batch`` at its end; it follows those that wait there."""
    who = actor.get()
    if batch.audit:
        number, previous = batch.audit[-1]["number"], batch.audit[-1]["hash"]
    else:
        last = session.connection().execute(LAST).one_or_none()
        number, previous = (last[0], last[1]) if last is not None else (0, FIRST_LINK)
    entry = AuditEntry(
        number=number + 1,
        at=clock.now(),
        actor=who.name,
        role=who.role,
        address=who.address,
        act=act,
        federation=federation.id if federation is not None else None,
        federation_name=federation.name if federation is not None else None,
        detail=detail,
        previous=previous,
        hash="",
    )
    batch.audit.append(entry.model_copy(update={"hash": entry.computed_hash()}).model_dump())


def entries(session: Session, after: int, limit: int) -> Iterator[AuditEntry]:
    """At most ``limit`` entries after the one with the number ``after``."""
    query = select(AuditRow).where(AuditRow.number > after).order_by(AuditRow.number).limit(limit)
    for row in session.scalars(query):
        yield AuditEntry.model_validate(row, from_attributes=True)


@dataclass(frozen=True)
class Operator:
    """An operator's token: whose it is, the role, until when.

    ``expired``: it was seen to have expired, whatever the clock says now.
    """

    id: str
    name: str
    role: OperatorRole
    expires: datetime
    expired: bool = False


def operator_of(row: OperatorRow) -> Operator:
    """A token's row as it is held in memory."""
    expires = clock.parse(row.expires_at)
    return Operator(row.id, row.name, cast(OperatorRole, row.role), expires, row.expired_at is not None)
