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

from promptfed.coordinator.engine import retention, scheduler
from promptfed.coordinator.store.tables import Base, BlobRow, FederationRow, PhaseRow, StateRow, TaskRow
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


def begun(coordinator: InThread, keep: str, rounds: int) -> tuple[str, list[ScriptedClient]]:
    """A federation in which ``rounds`` rounds are over, and the next one is open."""
    id = coordinator.create(rounds=90_000, retention=keep, evaluation={"every": 90_000})
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
@pytest.mark.parametrize("keep", ["all", "last_round"])
def test_added_rounds_are_like_rounds_that_were_played(coordinator_with: Callable[..., InThread], keep: str) -> None:
    first = coordinator_with()
    played, _ = begun(first, keep, 7)
    with first.registry.database.read() as session:
        expected, blobs = shape(session, played), len(first.registry.blobs.all())
    first.delete(played)
    id, clients = begun(first, keep, 3)
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


def costs_after(
    coordinator_with: Callable[..., InThread],
    keep: str,
    work: Callable[[InThread, str, list[ScriptedClient]], object],
) -> tuple[int, int]:
    """What ``work`` costs SQLite after a few rounds, and after 200 more."""
    coordinator = coordinator_with()
    id, clients = begun(coordinator, keep, 3)
    costs = []
    coordinator.stop()
    for rounds in (0, 200):
        add_past_rounds(tables_of(coordinator), id, rounds)
        coordinator = coordinator_with()
        for client in clients:
            client.http = coordinator.http
        settled(coordinator, id)
        with steps_counted(coordinator) as counted:
            work(coordinator, id, clients)
            coordinator.stop()  # what it still reads in the background belongs to the costs
        costs.append(counted[0])
    return costs[0], costs[1]


@pytest.mark.parametrize("keep", ["all", "last_round"])
def test_a_late_round_reads_no_more_than_an_early_one(coordinator_with: Callable[..., InThread], keep: str) -> None:
    def play(coordinator: InThread, id: str, clients: list[ScriptedClient]) -> None:
        answered(coordinator, id, clients)
        settled(coordinator, id)

    early, late = costs_after(coordinator_with, keep, play)
    assert late <= 1.1 * early


@pytest.mark.parametrize(
    "path", ["", "/rounds?after={last}", "/rounds?limit=2", "/rounds/{last}", "/metrics?limit=2", "/prompts"]
)
def test_a_page_reads_no_more_of_a_long_federation(coordinator_with: Callable[..., InThread], path: str) -> None:
    def ask(coordinator: InThread, id: str, _: object) -> None:
        last = coordinator.get(id)["round"] - 1
        address = f"/v1/federations/{id}{path.format(last=last)}"
        assert coordinator.http.get(address, headers=coordinator.operator).status_code == 200

    early, late = costs_after(coordinator_with, "all", ask)
    assert late <= 1.1 * early


def test_a_stream_can_begin_with_the_newest_events(coordinator_with: Callable[..., InThread]) -> None:
    coordinator = coordinator_with()
    id, _ = begun(coordinator, "all", 3)
    coordinator.post(f"{id}/cancel")  # the stream ends then

    def events(**options: Any) -> list[str]:
        address = f"/v1/federations/{id}/events"
        headers = coordinator.operator | options.pop("headers", {})
        lines = coordinator.http.get(address, headers=headers, params=options).text.splitlines()
        return [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]

    everything = events()
    assert events(newest=4) == everything[-4:]
    assert events(newest=500) == everything
    assert events(newest=1, headers={"Last-Event-ID": everything[2]}) == everything[3:]


@pytest.mark.both_databases
def test_a_start_removes_what_no_row_names_some_at_a_time(
    coordinator_with: Callable[..., InThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SWEPT_AT_ONCE", 2)
    first = coordinator_with()
    begun(first, "all", 3)
    named = first.registry.blobs.all()
    litter = [f"sha256:{digit * 64}" for digit in "0369cf"]
    with first.registry.database.write() as session:
        session.add_all([BlobRow(digest=digest, content=b"left behind") for digest in litter])
    first.stop()
    second = coordinator_with()
    wait_for("the removal", lambda: second.registry.blobs.all() == named)
