"""What a round costs does not depend on how many rounds came before it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.orm import Session

from promptfed.coordinator.engine import scheduler
from promptfed.coordinator.store.tables import Base, FederationRow, PhaseRow, StateRow, TaskRow
from promptfed.testing.clients import ScriptedClient
from tests.support.coordinators import InThread
from tests.support.past_rounds import OF_TASKS, add_past_rounds, url_of
from tests.support.waiting import wait_for

CLIENTS = ("a", "b", "c")
STEPS = 10  # instructions of SQLite's machine between two counts


@pytest.fixture(autouse=True)
def retires_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round's tensors are removed as soon as they may be."""
    monkeypatch.setattr(scheduler, "RETIRE_SECONDS", 0.0)


def answered(coordinator: InThread, federation: str, clients: list[ScriptedClient], kind: str = "train") -> None:
    """Every client answers its open task; the tasks that follow are there when this returns."""
    for client in clients:
        task = coordinator.task(client)
        assert task["kind"] == kind
        client.answer(task).raise_for_status()


def begun(coordinator: InThread, retention: str, rounds: int) -> tuple[str, list[ScriptedClient]]:
    """A federation in which ``rounds`` rounds are over, and the next one is open."""
    id = coordinator.create(rounds=90_000, retention=retention, evaluation={"every": 90_000})
    clients = coordinator.enrol(id, *CLIENTS)
    coordinator.start(id)
    answered(coordinator, id, clients, "evaluate")
    for _ in range(rounds):
        answered(coordinator, id, clients)
    settled(coordinator, id)
    return id, clients


def settled(coordinator: InThread, id: str) -> None:
    """Wait until the open round's tasks have their payloads, and earlier rounds are retired."""
    registry = coordinator.registry

    def is_settled() -> bool:
        federation = registry.get(id)
        waits = [task for task in federation.tasks.values() if task.payload_sha256 is None]
        kept = federation.spec.retention == "all" or registry.retired.get(id) == federation.run.round - 1
        return federation.run.due_job is None and len(federation.tasks) == len(CLIENTS) and not waits and kept

    wait_for("the next round", is_settled)


def tables_of(coordinator: InThread) -> str:
    """The URL of its tables."""
    return url_of(coordinator.settings.data_dir, coordinator.settings.url())


def shape(session: Session, id: str) -> Counter[Any]:
    """Rows by table, by how many rounds ago it was, by the columns that have a value, and by flags."""
    last = session.get_one(FederationRow, id).round
    flags = ("kind", "step", "status", "counted", "stored", "payload_stored", "origin", "number")
    counted: Counter[Any] = Counter()

    def count(kind: type[Base], round: int, row: Any) -> None:
        values = {column.name: getattr(row, column.name) for column in kind.__table__.columns}
        told = tuple((name, values[name]) for name in flags if name in values)
        there = tuple(name for name, value in values.items() if value is not None)
        counted[kind.__tablename__, last - round, told, there] += 1

    for phase in session.scalars(select(PhaseRow).where(PhaseRow.federation_id == id)):
        count(PhaseRow, phase.round, phase)
        for task in session.scalars(select(TaskRow).where(TaskRow.phase_id == phase.id)):
            count(TaskRow, phase.round, task)
            for kind in OF_TASKS:
                row = session.get(kind, task.id)
                if row is not None:
                    count(kind, phase.round, row)
    for state in session.scalars(select(StateRow).where(StateRow.federation_id == id)):
        count(StateRow, state.round, state)
    return counted


@pytest.mark.both_databases
@pytest.mark.parametrize("retention", ["all", "last_round"])
def test_added_rounds_are_like_rounds_that_were_played(
    coordinator_with: Callable[..., InThread], retention: str
) -> None:
    first = coordinator_with()
    played, _ = begun(first, retention, 7)
    with first.registry.database.read() as session:
        expected, blobs = shape(session, played), len(first.registry.blobs.all())
    first.delete(played)
    id, clients = begun(first, retention, 3)
    first.stop()
    add_past_rounds(tables_of(first), id, 4)
    second = coordinator_with()
    settled(second, id)
    with second.registry.database.read() as session:
        assert shape(session, id) == expected
    assert len(second.registry.blobs.all()) == blobs
    assert second.get(id)["round"] == 8
    for client in clients:
        client.http = second.http
    answered(second, id, clients)
    settled(second, id)
    assert [report["round"] for report in second.get(f"{id}/rounds")["rounds"]] == list(range(10))


@contextmanager
def steps_counted(coordinator: InThread) -> Iterator[list[int]]:
    """A list whose first number grows by one with every ``STEPS`` instructions that SQLite carries out."""
    counted = [0]

    def tick() -> int:
        counted[0] += 1
        return 0

    def count(connection: sqlite3.Connection, *_: object) -> None:
        connection.set_progress_handler(tick, STEPS)

    backend = coordinator.registry.database.backend
    for engine in (backend.writer, backend.reader):
        event.listen(engine, "checkout", count)
    try:
        yield counted
    finally:
        for engine in (backend.writer, backend.reader):
            event.remove(engine, "checkout", count)


@pytest.mark.parametrize("retention", ["all", "last_round"])
def test_a_late_round_reads_no_more_than_an_early_one(
    coordinator_with: Callable[..., InThread], retention: str
) -> None:
    coordinator = coordinator_with()
    id, clients = begun(coordinator, retention, 3)
    costs = []
    for rounds in (0, 200):
        coordinator.stop()
        add_past_rounds(tables_of(coordinator), id, rounds)
        coordinator = coordinator_with()
        for client in clients:
            client.http = coordinator.http
        settled(coordinator, id)
        with steps_counted(coordinator) as counted:
            answered(coordinator, id, clients)
            settled(coordinator, id)
            costs.append(counted[0])
    assert costs[1] <= 1.1 * costs[0], costs
