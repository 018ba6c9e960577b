"""Answers to clients' tasks: whether one can be accepted still, and how it is entered in its transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from promptfed.coordinator import problems
from promptfed.coordinator.aggregation.secure_sums import Attempt
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Client, Federation, OpenTask
from promptfed.coordinator.engine.recorder import Change, open_task
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.blobs import Held
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import EvaluationRow, ExchangeRow, TaskRow, UpdateRow
from promptfed.shared.messages import ENDED
from promptfed.shared.service.fault_points import point

STORED = {
    "train": ("updates", "update-entered"),
    "evaluate": ("evaluations", "evaluation-entered"),
    None: ("exchanges", "exchange-before-commit"),
}
"""By an answer's kind: the rows of a `Batch` that it is one of, and the fault point behind it."""


@dataclass(frozen=True)
class AskedTask(OpenTask):
    """A client's task, open or over. ``accepted``: the digest of its accepted answer."""

    status: str = "open"
    payload_stored: bool = True
    accepted: str | None = None


def asked_task(session: Session | Database, federation: Federation, client: Client, task_id: str) -> AskedTask:
    """The client's task. Raises NotFound if this client has no such task."""
    task = federation.tasks.get(client.name)
    if task is not None and task.id == task_id:
        return AskedTask(**vars(task))
    if isinstance(session, Database):
        with session.read() as reading:
            return asked_task(reading, federation, client, task_id)
    query = queries.tasks_with_phases(federation.id).where(TaskRow.id == task_id, TaskRow.client == client.name)
    row_and_phase = session.execute(query).one_or_none()
    if row_and_phase is None:
        raise problems.NotFound(f"this client has no task {task_id[:100]!r}")
    row, phase = row_and_phase
    accepted = select(func.coalesce(UpdateRow.sent, UpdateRow.sha256)).where(UpdateRow.task_id == row.id)
    if federation.spec.secure_aggregation is not None:
        accepted = select(ExchangeRow.digest).where(ExchangeRow.task_id == row.id)
    if phase.kind == "evaluate":
        accepted = select(EvaluationRow.digest).where(EvaluationRow.task_id == row.id)
    return AskedTask(
        **vars(open_task(row, phase)),
        status=row.status,
        payload_stored=row.payload_stored,
        accepted=session.scalar(accepted),
    )


@dataclass(frozen=True)
class Answer:
    """An examined answer to a client's task, which the committer enters.

    Attributes:
        kind: as for `decided`.
        row: its columns in the table of its kind.
        held: the blobs that the row names.
        attempt: at a secure sum, of which it is a step.
    """

    federation: str
    client: Client
    task_id: str
    digest: str
    kind: str | None
    row: dict[str, Any]
    held: Held | None = None
    attempt: Attempt | None = None

    def enter(self, change: Change) -> bool:
        """Store it and step the round machine; returns whether it is new.

        The task is checked again: its phase may have closed, or the same request may have been stored meanwhile.
        """
        task = task_in(change, self.client, self.task_id)
        if decided(change.federation, task, self.kind, self.digest):
            return False
        table, entered = STORED[self.kind]
        if self.held is not None:
            change.keep(self.held)
        getattr(change.batch, table).append({"task_id": task.id, "received_at": clock.now(), **self.row})
        stage, last = change.federation.run.stage, False
        if task.kind == "unmask" and self.attempt is not None and stage is not None:
            last = self.attempt.can_open([*stage.having("answered"), self.client.name])  # the sum is known with it
        event = run_state.AnsweredLast if last else run_state.Answered
        change.send(event(self.client.name, clock.monotonic()))
        point(entered)
        return True


def task_in(change: Change, client: Client, task_id: str) -> AskedTask:
    """The client's task as it stands within the change. Raises NotFound."""
    task = change.federation.tasks.get(client.name)
    if task is None or task.id != task_id:
        change.flush()  # Its answer may be in the same group.
    return asked_task(change.session, change.federation, client, task_id)


def decided(federation: Federation, task: AskedTask, kind: str | None, digest: str | None) -> bool:
    """Whether exactly this answer was accepted before. Refuses an answer that cannot be accepted any more.

    ``kind`` None: an answer to a step of a secure sum, whose tasks accept no other answers.
    """
    exchanged = federation.spec.secure_aggregation is not None and task.kind != "evaluate"
    if exchanged != (kind is None) or (kind is not None and task.kind != kind):
        expected = "an update" if task.kind == "train" else "an evaluation"
        if exchanged:
            expected = f"the exchange of step {task.kind}: its federation takes no update in the clear"
        raise problems.WrongTaskKind(f"this task wants {expected}")
    if task.accepted is not None and task.accepted == digest:
        return True
    if task.accepted is not None:
        raise problems.AlreadyAnswered(f"this task was answered with {task.accepted}; that answer stands")
    expect_open(federation, task)
    return False


def expect_open(federation: Federation, task: AskedTask) -> None:
    """Raises PhaseClosed."""
    if task.status == "open" and federation.run.state not in ENDED:
        return
    where = f"round {federation.run.round}" + (f", {federation.phase}" if federation.phase else "")
    text = f"the phase of round {task.round} is over ({task.status}); {federation.name} is in {where}"
    raise problems.PhaseClosed(text, round=federation.run.round, phase=federation.phase, state=federation.run.state)
