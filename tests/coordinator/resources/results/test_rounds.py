"""Reports of many updates and rounds; what they cost does not grow with the rounds before."""

from __future__ import annotations

import csv
import io
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from promptfed.coordinator.engine import retention, scheduler
from promptfed.coordinator.resources.results import numbers, rounds
from promptfed.coordinator.resources.results import routes as results
from promptfed.coordinator.store.backend import DatabaseAway
from promptfed.coordinator.store.tables import BlobRow
from promptfed.shared.api.report_schemas import RoundPage, RoundReport
from promptfed.testing.clients import ScriptedClient
from tests.support.coordinators import InThread, Make, in_thread
from tests.support.many_rows import played
from tests.support.open_phases import enrolled
from tests.support.waiting import wait_for

ROUNDS, MANY = 3, 450


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


@pytest.fixture(autouse=True)
def long_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds of these federations are one page."""
    monkeypatch.setattr(rounds, "MOST_TASKS", 10_000)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InThread, str]]:
    """A coordinator and its federation of many clients, which tests only read."""
    with in_thread(tmp_path_factory.mktemp("many") / "data") as server:
        id = server.create()
        played(server.registry, id, ROUNDS, MANY)
        yield server, id


def test_rounds_and_metrics_are_what_the_rows_say(many: tuple[InThread, str]) -> None:
    coordinator, id = many
    path = f"/v1/federations/{id}"
    answer = coordinator.http.get(f"{path}/rounds", headers=coordinator.operator)
    assert answer.headers["content-type"] == "application/json"
    page = RoundPage.model_validate_json(answer.content)
    assert answer.content == page.model_dump_json().encode()
    assert [report.round for report in page.rounds] == [1, 2, 3]
    for report in page.rounds:
        alone = coordinator.http.get(f"{path}/rounds/{report.round}", headers=coordinator.operator)
        assert RoundReport.model_validate_json(alone.content) == report
        assert len(report.phases[0].updates) == len(report.phases[0].counted) == MANY
        assert len(report.evaluation.clients) == MANY
        mean = report.evaluation.by_split["trainer"]["test"]
        assert (mean["accuracy"], mean["ece"], mean["macro_f1"]) == (0.5, 0.125, 0.375)
    answer = coordinator.http.get(f"{path}/metrics", headers=coordinator.operator)
    counted = Counter(line["name"] for line in csv.DictReader(io.StringIO(answer.text)))
    assert counted["loss"] == ROUNDS * (MANY + 1)
    assert (counted["ece"], counted["trainer_ece"], counted["macro_f1"]) == (ROUNDS * MANY, ROUNDS, ROUNDS * MANY)


def test_pages_of_rounds_follow_each_other(many: tuple[InThread, str]) -> None:
    coordinator, federation = many
    first = coordinator.get(f"{federation}/rounds?limit=2")
    assert ([report["round"] for report in first["rounds"]], first["next"]) == ([1, 2], "2")
    second = coordinator.get(f"{federation}/rounds?limit=2&after=2")
    assert ([report["round"] for report in second["rounds"]], second["next"]) == ([3], None)
    assert coordinator.get(f"{federation}/rounds?after=3") == {"rounds": [], "next": None}


def test_a_page_ends_before_it_is_long(many: tuple[InThread, str], monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, federation = many
    monkeypatch.setattr(rounds, "MOST_TASKS", 4 * MANY)  # each client trains and evaluates
    first = coordinator.get(f"{federation}/rounds")
    assert ([report["round"] for report in first["rounds"]], first["next"]) == ([1, 2], "2")
    monkeypatch.setattr(rounds, "MOST_TASKS", 1)
    second = coordinator.get(f"{federation}/rounds?after=1")
    assert ([report["round"] for report in second["rounds"]], second["next"]) == ([2], "2"), "one round at least"


class Counting:
    """A database that counts its reading transactions, and the most that were open at once."""

    def __init__(self, coordinator: InThread):
        self._database = coordinator.registry.database
        self.begun = self.open = 0

    @contextmanager
    def read(self) -> Iterator[Session]:
        self.begun += 1
        self.open += 1
        with self._database.read() as session:
            yield session
        self.open -= 1


def test_a_round_is_read_in_its_turn_and_no_transaction_waits(many: tuple[InThread, str]) -> None:
    coordinator, federation = many
    known = coordinator.registry.get(federation)
    database = Counting(coordinator)
    rounds.page(database, known, [1, 2, 3], None)
    assert (database.begun, database.open) == (3, 0)
    database = Counting(coordinator)
    pieces = numbers.as_csv(database, known, [1, 2, 3])
    next(pieces)
    assert (database.begun, database.open) == (1, 0), "the first round"


def test_an_answer_that_cannot_be_finished_is_cut_off_and_one_that_cannot_begin_is_refused(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = coordinator.create()
    played(coordinator.registry, federation, ROUNDS, 2)
    read = rounds.round_report
    last = 3

    def fails(session: Session, known: object, number: int) -> RoundReport:
        if number == last:
            raise DatabaseAway("a test")
        return read(session, known, number)

    monkeypatch.setattr(numbers, "round_report", fails)
    monkeypatch.setattr(results, "WHOLE_CSV", 1)  # of a longer one nothing is known when it begins
    address = f"/v1/federations/{federation}/metrics"
    with pytest.raises(httpx.RemoteProtocolError):
        coordinator.http.get(address, headers=coordinator.operator)
    last = 1
    assert coordinator.http.get(address, headers=coordinator.operator).status_code == 503


# What a round costs does not depend on how many rounds came before it.

CLIENTS = ("a", "b", "c")

STEPS = 1  # instructions of SQLite's machine between two counts
ASIDE = 16  # instructions of a look in the background, which may fall into either


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
    id, clients = enrolled(coordinator, *CLIENTS, rounds=90_000, retention=keep, evaluation={"every": 90_000})
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


def again(coordinator: InThread, coordinator_with: Make, clients: list[ScriptedClient]) -> InThread:
    """Another coordinator on the same folder, for the same clients."""
    coordinator.stop()
    made = coordinator_with()
    for client in clients:
        client.http = made.http
    return made


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


Work = Callable[[InThread, str, list[ScriptedClient]], object]


def costs_after(coordinator_with: Make, keep: str, works: dict[str, Work]) -> Iterator[dict[str, int]]:
    """What each of ``works`` costs SQLite after a few rounds, and after 60 more."""
    coordinator = coordinator_with()
    id, clients = begun(coordinator, keep, 3)
    for more in (0, 60):
        for _ in range(more):
            answered(coordinator, id, clients)
        costs = {}
        for name, work in works.items():
            coordinator = again(coordinator, coordinator_with, clients)
            settled(coordinator, id)
            with steps_counted(coordinator) as counted:
                work(coordinator, id, clients)
                coordinator.stop()  # what it still reads in the background belongs to the costs
            costs[name] = counted[0]
        coordinator = again(coordinator, coordinator_with, clients)
        yield costs


def play(coordinator: InThread, id: str, clients: list[ScriptedClient]) -> None:
    answered(coordinator, id, clients)
    settled(coordinator, id)


def asking(path: str) -> Work:
    def ask(coordinator: InThread, id: str, _: object) -> None:
        last = coordinator.get(id)["round"] - 1
        address = f"/v1/federations/{id}{path.format(last=last)}"
        assert coordinator.http.get(address, headers=coordinator.operator).status_code == 200

    return ask


PAGES = {path: asking(path) for path in ("", "/rounds?after={last}", "/rounds?limit=2", "/rounds/{last}", "/prompts")}


@pytest.mark.extended
@pytest.mark.parametrize(("keep", "works"), [("all", PAGES | {"a round": play}), ("last_round", {"a round": play})])
def test_neither_a_late_round_nor_a_page_of_a_long_federation_reads_more(
    coordinator_with: Make, keep: str, works: dict[str, Work]
) -> None:
    early, late = costs_after(coordinator_with, keep, works)
    assert {name: (early[name], late[name]) for name in works if late[name] > 1.1 * early[name] + ASIDE} == {}


def test_a_stream_can_begin_with_the_newest_events(coordinator_with: Make) -> None:
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
def test_a_start_removes_litter(coordinator_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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
