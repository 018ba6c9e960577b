"""Writes each step of a run into the database, in the transaction of the event that caused it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Federation, OpenTask
from promptfed.coordinator.domain.round_machine import Machine
from promptfed.coordinator.domain.run_state import AskStatus, Run
from promptfed.coordinator.engine import audit
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.blobs import Held
from promptfed.coordinator.store.queries import Batch, Row, insert_phase
from promptfed.coordinator.store.tables import ClientRow, FederationRow, PhaseRow, TaskRow
from promptfed.shared.messages import ENDED, TaskKind
from promptfed.shared.privacy.noise import Noise, SecretNoise
from promptfed.shared.spec.weighting import shares

_COLUMNS = (PhaseRow.id, PhaseRow.round, PhaseRow.kind, PhaseRow.name, PhaseRow.opened_at, PhaseRow.deadline)
_STAGE = select(*_COLUMNS).where(
    PhaseRow.federation_id == bindparam("federation"),
    PhaseRow.round == bindparam("round"),
    PhaseRow.step == bindparam("step"),
)
_TASKS = select(TaskRow.client, TaskRow.id).where(TaskRow.phase_id == bindparam("phase")).order_by(TaskRow.number)


@dataclass
class Change:
    """One transaction's part on one federation: ``federation`` is how it stands if the transaction commits.

    ``batch`` is what the transaction writes at its end; ``flush`` before asking the database for what it may hold.

    ``wake`` are the clients whom the change concerns, ``everyone`` says that it concerns all. ``completed`` are the
    stages that it brings to an end: kind, and seconds since they opened.
    """

    session: Session
    federation: Federation
    batch: Batch = field(default_factory=Batch)
    noise: Noise = field(default_factory=SecretNoise)
    wake: set[str] = field(default_factory=set)
    everyone: bool = False
    recorded: list[run_state.Fact] = field(default_factory=list)
    emitted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    completed: list[tuple[str, float]] = field(default_factory=list)
    _machine: Machine | None = None
    _tasks: dict[str, OpenTask] = field(default_factory=dict)

    def send(self, event: run_state.Event) -> None:
        """Step the round machine and write down what follows.

        Raises:
            WrongMoment, NotEnoughTrainers: see ``Machine.advance``; nothing is written then.
        """
        before = self.federation.run
        if self._machine is None or self._machine.run is not before:
            self._machine = Machine(self.federation.rules, before)
        new_facts = self._machine.advance(event)
        run = self._machine.run
        self.federation = replace(self.federation, run=run)
        recorder = _Recorder(self, before.round, before.step)
        for fact in new_facts:
            recorder.write(fact)
        self.recorded.extend(new_facts)
        if _stored(run) != _stored(before):
            standing = {"state": run.state, "reason": run.reason, "round": run.round, "step": run.step}
            self.batch.federations[self.federation.id] |= standing | {"work": run.due_job, "joining": list(run.joining)}

    def emit(self, kind: str, /, **data: Any) -> None:
        """Add an event to the federation's stream."""
        self.batch.events.append({"federation_id": self.federation.id, "kind": kind, "data": data, "at": clock.now()})
        self.emitted.append((kind, data))

    def note(self, act: str, /, **detail: Any) -> None:
        """Write the act into the audit log, under whoever asked for it."""
        audit.add(self.session, self.batch, act, self.federation, **detail)

    def keep(self, held: Held) -> None:
        """Write down the small blobs of ``held`` and where its objects lie, beside the rows that name them."""
        self.batch.blobs.update(held.small)
        self.batch.objects.update(held.keys)

    def flush(self) -> None:
        """Write down what waits, so that the transaction's own queries find it."""
        self.batch.write(self.session)

    def remove_task(self, name: str) -> None:
        """The task of ``name`` is open no longer."""
        if self.federation.tasks is not self._tasks:
            self._tasks = dict(self.federation.tasks)  # once, however many are answered together
            self.federation = replace(self.federation, tasks=self._tasks)
        self._tasks.pop(name, None)

    def federation_row(self) -> FederationRow:
        """The federation's own row, which this transaction may change."""
        return self.session.get_one(FederationRow, self.federation.id)

    def client_row(self, name: str) -> ClientRow:
        """The row of the client called ``name``."""
        if self.batch.clients:
            self.flush()  # It may have enrolled in this very group.
        return queries.client(self.session, self.federation.id, name)


class Changes:
    """One transaction on any number of federations."""

    def __init__(self, session: Session, get: Callable[[str], Federation], noise: Noise | None = None):
        """``noise``: where the keys of phases come from. ``committed`` is called once all is on the disk."""
        self.committed: Callable[[], None] = lambda: None
        self._noise = noise or SecretNoise()
        self.batch = Batch()
        self.by_id: dict[str, Change] = {}
        self._session = session
        self._get = get

    def of(self, id: str) -> Change:
        """The part on this federation. Raises NotFound, MethodAbsent."""
        if id not in self.by_id:
            self.by_id[id] = Change(self._session, self._get(id), self.batch, self._noise)
        return self.by_id[id]

    def write(self) -> None:
        """Write down what waits."""
        self.batch.write(self._session)


def _stored(run: Run) -> tuple[object, ...]:
    """What of a run stands in its federation's own row."""
    return run.state, run.reason, run.round, run.step, run.due_job, run.joining


@dataclass(frozen=True)
class _StageRow:
    """What the facts about a stage need of its row."""

    id: int
    round: int
    kind: str
    name: str
    opened_at: str
    deadline: str


class _Recorder:
    """Writes the facts of one step, in order: a step may complete one stage and open the next."""

    def __init__(self, change: Change, round: int, step: int):
        self._change = change
        self._session = change.session
        self._position = (round, step)
        self._phase: _StageRow | None = None

    def write(self, fact: run_state.Fact) -> None:
        match fact:
            case run_state.Moved():
                self._moved(fact)
            case run_state.Opened():
                self._opened(fact)
            case run_state.Asked():
                self._asked(fact)
            case run_state.Extended(extended):
                self._set(extended=extended)
                if extended:
                    self._change.emit("phase-extended", **self._where())
            case run_state.DeadlineSet(seconds):
                self._set_deadline(seconds)
            case run_state.Settled(name, status):
                self._settled(name, status)
            case run_state.Closed():
                self._closed(fact)
            case run_state.AttemptFailed(attempt):
                self._attempt_failed(attempt)
            case run_state.Completed():
                self._completed()
            case run_state.Joined(names):
                self._joined(names)

    def _stage(self) -> _StageRow:
        if self._phase is None:
            here = {"federation": self._change.federation.id, "round": self._position[0], "step": self._position[1]}
            # The connection's statements are known to be compiled, and take a fraction of the time of the session's.
            self._phase = _StageRow(*self._session.connection().execute(_STAGE, here).one())
        return self._phase

    def _set(self, **columns: Any) -> None:
        """Change the stage's row."""
        self._change.batch.phases[self._stage().id] |= columns

    def _where(self) -> dict[str, Any]:
        stage = self._stage()
        return {"round": stage.round, "phase": stage.name, "kind": stage.kind}

    def _moved(self, fact: run_state.Moved) -> None:
        row = self._change.federation_row()
        if fact.state == "running" and row.started_at is None:
            row.started_at = clock.now()
        if fact.state in ENDED:
            row.ended_at = clock.now()
            self._change.federation = replace(self._change.federation, tasks={}, deadline=None)
        self._change.everyone = True
        self._change.emit("federation-state", state=fact.state, reason=fact.reason)

    def _opened(self, fact: run_state.Opened) -> None:
        now = clock.now()
        opened: Row = {"round": fact.round, "kind": fact.kind, "name": fact.name, "opened_at": now, "deadline": now}
        others: Row = {"federation_id": self._change.federation.id, "step": fact.step, "sample_size": fact.sample_size}
        others |= {"expected": fact.expected if fact.kind == "train" else None, "extended": False}
        self._phase = _StageRow(insert_phase(self._session, opened | others), **opened)
        self._position = (fact.round, fact.step)
        self._change.federation = replace(self._change.federation, tasks={})
        self._change.emit("phase-opened", **self._where(), asked=list(fact.names))
        self._add_tasks(fact.names, 0)

    def _asked(self, fact: run_state.Asked) -> None:
        self._change.flush()
        tasks = select(func.count()).where(TaskRow.phase_id == self._stage().id)
        self._add_tasks(fact.names, self._session.scalars(tasks).one())
        self._change.emit("clients-asked", **self._where(), asked=list(fact.names))

    def _add_tasks(self, names: tuple[str, ...], first: int) -> None:
        """Ask these clients; their tasks have numbers from ``first`` on."""
        stage, federation = self._stage(), self._change.federation
        tasks, now = dict(federation.tasks), clock.now()
        for number, name in enumerate(names, first):
            task = OpenTask(
                id=new_task_id(),
                client=name,
                kind=cast(TaskKind, stage.kind),
                round=stage.round,
                step=self._position[1],
                phase=stage.name,
                opened_at=now,
            )
            tasks[name] = task
            self._change.batch.tasks[task.id] = task_row(federation.id, stage.id, number, task, now)
        self._change.federation = replace(federation, tasks=tasks)

    def _set_deadline(self, seconds: float) -> None:
        deadline = clock.later(seconds)
        self._set(deadline=deadline)
        self._change.federation = replace(self._change.federation, deadline=deadline)
        self._change.wake.update(self._change.federation.tasks)

    def _settled(self, name: str, status: AskStatus) -> None:
        task = self._change.federation.tasks.get(name)
        where = {"round": task.round, "phase": task.phase, "kind": task.kind} if task is not None else self._where()
        task_id = task.id if task is not None else self._latest_task(name)
        self._change.batch.settle(task_id, status)
        self._change.remove_task(name)
        self._change.wake.add(name)
        self._change.emit("task-settled", **where, client=name, status=status)

    def _latest_task(self, name: str) -> str:
        self._change.flush()
        mine = (TaskRow.phase_id == self._stage().id, TaskRow.client == name)
        return self._session.scalars(select(TaskRow.id).where(*mine).order_by(TaskRow.number.desc()).limit(1)).one()

    def _closed(self, fact: run_state.Closed) -> None:
        stage = self._stage()
        self._set(closed_at=clock.now(), sample_size=fact.sample_size)
        if stage.kind == "train" and self._change.federation.spec.privacy.protects_clients:
            purpose = ("central", self._change.federation.name, *self._position)
            self._set(noise_key=self._change.noise.key(*purpose).hex())
        if self._change.batch.tasks:
            self._change.flush()
        tasks = {row.client: row.id for row in self._session.connection().execute(_TASKS, {"phase": stage.id})}
        federation = self._change.federation
        weights: dict[str, float] = {}
        if stage.kind in ("train", "mask"):
            weights = shares(
                {name: federation.clients[name].num_samples for name in fact.counted}, federation.spec.aggregation
            )
        self._change.batch.count({tasks[name]: weights.get(name) for name in fact.counted})
        self._change.federation = replace(federation, tasks={}, deadline=None)
        self._change.emit("phase-closed", **self._where(), counted=list(fact.counted))

    def _completed(self) -> None:
        stage, now = self._stage(), clock.now()
        self._set(completed_at=now)
        seconds = clock.seconds_between(stage.opened_at, now)
        self._change.completed.append((stage.kind, seconds or 0.0))
        self._change.emit("phase-completed", **self._where())
        self._phase = None

    def _attempt_failed(self, attempt: int) -> None:
        now = clock.now()
        self._set(closed_at=now, completed_at=now)
        self._change.federation = replace(self._change.federation, tasks={}, deadline=None)
        self._change.emit("attempt-failed", **self._where(), attempt=attempt)
        self._phase = None

    def _joined(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._change.client_row(name).joined = True
        self._change.emit("clients-joined", clients=list(names))


def new_task_id() -> str:
    """32 hexadecimal digits, 20 of them random. They begin with the time: a round's rows are neighbours in an index."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def task_row(federation: str, phase_id: int, number: int, task: OpenTask, opened_at: str) -> Row:
    """The row of a task that is asked now."""
    return {
        "id": task.id,
        "federation_id": federation,
        "phase_id": phase_id,
        "number": number,
        "client": task.client,
        "status": "open",
        "opened_at": opened_at,
        "payload_sha256": None,
        "payload_bytes": None,
        "payload_stored": False,
        "bytes_down": 0,
        "counted": False,
    }


def open_task(row: TaskRow, stage: PhaseRow) -> OpenTask:
    """A task's row as it is held in memory."""
    return OpenTask(
        id=row.id,
        client=row.client,
        kind=cast(TaskKind, stage.kind),
        round=stage.round,
        step=stage.step,
        phase=stage.name,
        payload_sha256=row.payload_sha256,
        payload_bytes=row.payload_bytes or 0,
        opened_at=row.opened_at,
    )
