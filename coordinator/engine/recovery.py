"""Reads federations back from the database, as they stood after the last committed step."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import datetime
from typing import cast

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import (
    AbsentMethod,
    Client,
    EnrolmentToken,
    Federation,
    federation_of,
    kept_method,
)
from promptfed.coordinator.domain.round_machine import ATTEMPTS, KINDS, MASK
from promptfed.coordinator.domain.run_state import AskStatus, DueJob, Member, Rules, Run, Stage
from promptfed.coordinator.engine.recorder import open_task
from promptfed.coordinator.problems import first_error
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.backend import one_line
from promptfed.coordinator.store.tables import DELETING, ClientRow, FederationRow, PhaseRow, TaskRow, TokenRow
from promptfed.shared.messages import ENDED, Domain, EnrolledProtection, FederationState, Role, TaskKind
from promptfed.shared.spec.spec import BackboneShape, FederationSpec

DAMAGE = (ValueError, TypeError, LookupError, AttributeError)
"""What reading a damaged row raises, or a row of another version."""


class _Standing(BaseModel):
    """What a federation's row says of its run. Values of another version, or damaged ones, are refused at the start."""

    model_config = ConfigDict(from_attributes=True)

    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    state: FederationState
    reason: str | None
    round: NonNegativeInt
    step: NonNegativeInt
    work: DueJob | None
    joining: list[str]
    budget_rounds: int | None
    shape: BackboneShape | None


def load_all(session: Session, now: float) -> dict[str, Federation]:
    """All federations by id. Deadlines are left at ``now``: ``Restarted`` sets them."""
    query = select(FederationRow.id, FederationRow.name).where(FederationRow.state != DELETING)
    rows = session.execute(query.order_by(FederationRow.created_at))
    return {id: _load_any(session, id, name, now) for id, name in rows}


def load_one(session: Session, id: str, now: float) -> Federation | None:
    """One federation; None if there is none with this id, or it is being deleted."""
    query = select(FederationRow.name).where(FederationRow.id == id, FederationRow.state != DELETING)
    name = session.scalar(query)
    return _load_any(session, id, name, now) if name is not None else None


def _load_any(session: Session, id: str, name: str, now: float) -> Federation:
    try:
        return load(session, session.get_one(FederationRow, id), now)
    except DAMAGE as error:
        # One that cannot be read keeps nobody from the others; its clients are told so, if they are known.
        federation = _unreadable(id, name, error)
        with contextlib.suppress(*DAMAGE):
            clients = list(session.scalars(queries.clients(id)))
            run = replace(federation.run, members=_members(clients))
            federation = replace(
                federation.with_clients(*map(client_of, clients)), run=run, tokens=_tokens(session, id)
            )
        return federation


def unreadable(federation: Federation, error: Exception) -> Federation:
    """``federation`` as listed after reading more of it raised ``error``."""
    listed = _unreadable(federation.id, federation.name, error)
    return replace(listed, clients=federation.clients, run=replace(listed.run, members=federation.run.members))


def load(session: Session, row: FederationRow, now: float) -> Federation:
    """One federation, its stage's deadline left at ``now``. Raises one of `DAMAGE` for damaged rows."""
    standing = _Standing.model_validate(row)
    spec = FederationSpec.model_validate(row.spec)
    federation = federation_of(row.id, spec, kept_method(spec))
    clients = list(session.scalars(queries.clients(row.id)))
    stage_row = None if row.state in ENDED else queries.phase_at(session, row.id, row.round, row.step)
    tasks = _latest_tasks(session, stage_row) if stage_row else {}
    open_ = [(task, stage_row) for task in tasks.values() if stage_row is not None]
    loaded = replace(
        federation.with_clients(*map(client_of, clients)),
        run=_run(session, row, clients, _stage(stage_row, tasks, now), federation),
        fingerprint=row.fingerprint,
        shape=standing.shape,
        supplied_state=row.supplied_state,
        tasks={task.client: open_task(task, phase) for task, phase in open_ if task.status == "open"},
        tokens=_tokens(session, row.id),
        deadline=stage_row.deadline if stage_row is not None and stage_row.closed_at is None else None,
    )
    return loaded.drawing_with(row.draw_secret).sampling_with(row.sampling_key, row.budget_rounds).recounted()


def _unreadable(id: str, name: str, error: Exception) -> Federation:
    """A federation as it is listed, only in memory: its rows stay unchanged for a version that can read them.

    Its id replaces a damaged name.
    """
    why = first_error(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
    spec: dict[str, object] = {"name": name, "method": {"name": "unreadable"}}
    try:
        readable = FederationSpec.model_validate(spec)
    except ValidationError:
        readable = FederationSpec.model_validate(spec | {"name": id})
    method = AbsentMethod(f"its stored spec or rows cannot be read: {one_line(why)[:500]}")
    return replace(federation_of(id, readable, method), run=Run(state="failed", reason=f"unreadable: {method.why}"))


def _tokens(session: Session, id: str) -> dict[str, EnrolmentToken]:
    tokens = session.scalars(select(TokenRow).where(TokenRow.federation_id == id))
    return {token.digest: token_of(token) for token in tokens}


def _members(clients: list[ClientRow]) -> dict[str, Member]:
    return {client.name: member_of(client) for client in clients}


def member_of(row: ClientRow) -> Member:
    """A client as the round machine knows it; one that has just enrolled has not joined."""
    return Member(cast(Role, row.role), row.active, bool(row.joined))


def token_of(row: TokenRow) -> EnrolmentToken:
    """A token's row as it is held in memory."""
    return EnrolmentToken(
        id=row.id,
        name=row.name,
        expires=clock.parse(row.expires_at),
        uses=row.uses,
        used=row.used,
        role=cast(Role | None, row.role),
        client=row.client,
        closed=row.closed,
        expired=row.expired_at is not None,
    )


def client_of(row: ClientRow) -> Client:
    """A client's row as it is held in memory."""
    return Client(
        id=row.id,
        name=row.name,
        role=cast(Role, row.role),
        secret_digest=row.secret_digest,
        num_samples=row.num_samples,
        class_names=tuple(row.class_names),
        domain=Domain.model_validate(row.domain) if row.domain else None,
        identity_key=row.identity_key,
        protection=EnrolledProtection.model_validate(row.protection) if row.protection else None,
    )


def _latest_tasks(session: Session, stage: PhaseRow) -> dict[str, TaskRow]:
    rows = session.scalars(select(TaskRow).where(TaskRow.phase_id == stage.id).order_by(TaskRow.number))
    return {task.client: task for task in rows}


def _stage(row: PhaseRow | None, tasks: dict[str, TaskRow], now: float) -> Stage | None:
    if row is None:
        return None
    return Stage(
        kind=cast(TaskKind, row.kind),
        name=row.name,
        asks={name: cast(AskStatus, task.status) for name, task in tasks.items()},
        sample_size=row.sample_size,
        deadline=now,
        extended=row.extended,
        closed=row.closed_at is not None,
    )


def _run(
    session: Session, row: FederationRow, clients: list[ClientRow], stage: Stage | None, federation: Federation
) -> Run:
    rules = federation.rules
    first = queries.phase_at(session, row.id, row.round, 0)
    has_closed = first is not None and first.kind == "train" and first.closed_at is not None
    run = Run(
        state=cast(FederationState, row.state),
        reason=row.reason,
        round=row.round,
        step=row.step,
        members=_members(clients),
        stage=stage,
        due_job=cast(DueJob | None, row.work),
        joining=tuple(row.joining),
        answered_first=queries.counted_clients(session, row.id, row.round, 0) if has_closed else (),
        sample_size=first.sample_size if first is not None and has_closed else 0,
    )
    return run if rules.secure is None else _with_sets(session, row, rules, run)


def _with_sets(session: Session, row: FederationRow, rules: Rules, run: Run) -> Run:
    """The run with who sent keys for the latest attempt of a secure sum, and who answered its step before this one."""
    # Of the round's first phase, the attempt that came furthest last says whose vectors were taken.
    for attempt in range(ATTEMPTS):
        taken = queries.counted_clients(session, row.id, row.round, MASK + len(KINDS) * attempt)
        run = replace(run, answered_first=taken or run.answered_first)
    plan = rules.plan(row.round, row.step)
    step = plan.secure if plan is not None else None
    if step is None:
        return run
    cohort: tuple[str, ...] = ()
    for first in range(step.first, step.first - len(KINDS) * step.attempt, -len(KINDS)):
        cohort = cohort or queries.counted_clients(session, row.id, row.round, first)
    before = row.step if row.work == "aggregate" else row.step - 1
    previous = queries.counted_clients(session, row.id, row.round, before) if step.index else ()
    return replace(run, cohort=cohort, previous=previous)
