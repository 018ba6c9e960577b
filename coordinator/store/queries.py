"""Queries that several parts of the coordinator share. ``id`` is a federation's."""

from __future__ import annotations

from statistics import fmean
from typing import Any, TypeVar

from sqlalchemy import Select, bindparam, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from promptfed.coordinator.store.tables import (
    Base,
    ClientRow,
    EvaluationRow,
    PhaseRow,
    StateRow,
    TaskRow,
)
from promptfed.shared.spec.selection import SelectionSpec

T = TypeVar("T", bound=Base)


def page(
    session: Session, query: Select[T], column: InstrumentedAttribute[str], limit: int, after: str | None
) -> tuple[list[T], str | None]:
    """At most ``limit`` rows in order of ``column``, from behind ``after``; the last one's value if more follow."""
    if after is not None:
        query = query.where(column > after)
    rows = list(session.scalars(query.order_by(column).limit(limit + 1)))
    following = getattr(rows[limit - 1], column.key) if len(rows) > limit else None
    return rows[:limit], following


def clients(id: str) -> Select[ClientRow]:
    """The clients."""
    return select(ClientRow).where(ClientRow.federation_id == id)


def client(session: Session, id: str, name: str) -> ClientRow:
    """The client with this name."""
    return session.scalars(clients(id).where(ClientRow.name == name)).one()


def states(id: str) -> Select[StateRow]:
    """The states, in the order in which they were committed."""
    return select(StateRow).where(StateRow.federation_id == id).order_by(StateRow.id)


def last_state(session: Session, id: str, *where: Any) -> StateRow | None:
    """The state that was committed last, of those that fulfil the conditions."""
    query = select(StateRow).where(StateRow.federation_id == id, *where)
    # Rounds only go forward. By id alone a database would read all states: the index has the round.
    return session.scalars(query.order_by(StateRow.round.desc(), StateRow.id.desc()).limit(1)).one_or_none()


LAST_STATE = (
    select(StateRow.sha256)
    .where(StateRow.federation_id == bindparam("id"))
    .order_by(StateRow.round.desc(), StateRow.id.desc())
    .limit(1)
)
"""The digest of the state that was committed last, of the federation ``id``."""


def phase_at(session: Session, id: str, round: int, step: int) -> PhaseRow | None:
    """The phase at ``step`` of ``round``, if it has begun."""
    here = (PhaseRow.federation_id == id, PhaseRow.round == round, PhaseRow.step == step)
    return session.scalars(select(PhaseRow).where(*here)).one_or_none()


def tasks_with_phases(id: str) -> Select[TaskRow, PhaseRow]:
    """The tasks, each with its phase."""
    joined = select(TaskRow, PhaseRow).join(PhaseRow, PhaseRow.id == TaskRow.phase_id)
    return joined.where(TaskRow.federation_id == id, PhaseRow.federation_id == id)


def counted_clients(session: Session, id: str, round: int, step: int) -> tuple[str, ...]:
    """The clients whose answers to the closed phase at ``step`` of ``round`` count, in order of name."""
    here = (PhaseRow.round == round, PhaseRow.step == step, TaskRow.counted)
    query = tasks_with_phases(id).with_only_columns(TaskRow.client).where(*here)
    return tuple(session.scalars(query.order_by(TaskRow.client)))


def means_by_round(session: Session, id: str, phase: str, selection: SelectionSpec) -> dict[int, float]:
    """By round, the mean of the clients' figures in the evaluations called ``phase`` that a selection looks at."""
    told: dict[int, list[float]] = {}
    answered = (PhaseRow.kind == "evaluate", PhaseRow.name == phase, TaskRow.status == "answered")
    query = tasks_with_phases(id).join(EvaluationRow, EvaluationRow.task_id == TaskRow.id).where(*answered)
    columns = query.with_only_columns(PhaseRow.round, EvaluationRow.body)
    for round, body in session.execute(columns.order_by(PhaseRow.round, TaskRow.client)):
        value = body["splits"].get(selection.split, {}).get(selection.metric)
        if value is not None:
            told.setdefault(round, []).append(value)
    return {round: fmean(values) for round, values in told.items()}
