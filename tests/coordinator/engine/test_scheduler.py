"""No wait is without end: deadlines, extensions, missed quorums and restarts, with a clock that leaps."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy.exc import OperationalError

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.domain import clock
from promptfed.coordinator.engine import jobs, scheduler
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.callers import OperatorCaller
from promptfed.coordinator.store.tokens import digest
from promptfed.shared import machine
from promptfed.testing.clients import DEADLINE, bearer, drive
from tests.support.coordinators import InThread, Make, in_thread
from tests.support.open_phases import answer_all, answer_next, enrolled, launched
from tests.support.waiting import PATIENCE, wait_for

Leap = Callable[[InThread, float], None]


def test_clients_that_vanish_cost_two_deadlines_then_the_operator_is_asked(coordinator: InThread, leap: Leap) -> None:
    federation, (a, b) = launched(coordinator, "a", "b", rounds=1)
    tasks = coordinator.training([a, b])
    a.answer(tasks[0])
    leap(coordinator, DEADLINE)
    wait_for("an extension", lambda: coordinator.get(federation)["stage"]["extended"])
    found = coordinator.get(federation)
    assert (found["state"], found["answered"]) == ("running", ["a"])
    assert DEADLINE / 2 < found["stage"]["seconds_left"] <= DEADLINE
    leap(coordinator, DEADLINE)
    found = coordinator.until(federation, state="paused")
    assert (found["reason"], found["phase"]) == ("quorum_missed", "train")
    assert a.task().status_code == 204
    assert b.answer(tasks[1]).status_code == 201, "it comes back while the operator thinks"
    coordinator.post(f"{federation}/resume")
    drive([a, b])
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert [one["client"] for one in phase["counted"]] == ["a", "b"]


def test_a_missed_quorum_may_end_it(coordinator: InThread, leap: Leap) -> None:
    federation, clients = launched(coordinator, "a", "b", participation={"on_missed_quorum": "fail"})
    tasks = coordinator.training(clients)
    for client, task in zip(clients, tasks, strict=True):
        client.fail(task)
    found = coordinator.until(federation, state="failed")
    assert found["reason"] == "quorum_missed", "nobody is left to wait for: no deadline passes"
    assert clients[0].task().status_code == 410


def test_an_evaluation_waits_no_longer_than_its_deadline(coordinator: InThread, leap: Leap) -> None:
    federation, clients = enrolled(coordinator, "a", "b", rounds=1)
    silent = coordinator.enrol(federation, "z", role="evaluator", num_samples=0)[0]
    coordinator.post(f"{federation}/start")
    missed = coordinator.task(silent)
    answer_next(coordinator, clients)
    leap(coordinator, DEADLINE)
    coordinator.until(federation, phase="train")
    late = silent.evaluate(missed)
    assert (late.status_code, late.json()["type"].rsplit("/")[-1]) == (409, "phase-closed")
    drive([*clients, silent])
    first, last = coordinator.get(f"{federation}/rounds")["rounds"]
    assert (first["evaluation"]["expired"], sorted(first["evaluation"]["clients"])) == (["z"], ["a", "b"])
    assert sorted(last["evaluation"]["clients"]) == ["a", "b", "z"]


def test_a_restart_keeps_tasks_and_begins_a_deadline(coordinator_with: Make, leap: Leap) -> None:
    first = coordinator_with()
    federation, clients = launched(first, "a", "b")
    tasks = first.training(clients)
    clients[0].answer(tasks[0])
    leap(first, 0.8 * DEADLINE)
    before = first.get(federation)
    first.stop()
    second = coordinator_with()
    leap(second, 0)
    after = second.get(federation)
    kept = ("state", "round", "phase", "asked", "answered", "state_hash", "backbone", "clients")
    assert {key: before[key] for key in kept} == {key: after[key] for key in kept}
    assert after["stage"]["seconds_left"] > DEADLINE / 2
    a, b = (second.client(federation, name) for name in "ab")
    task = second.task(b)
    assert (task["task_id"], task["payload"]) == (tasks[1]["task_id"], tasks[1]["payload"])
    b.payload(task)
    assert a.send(tasks[0], clients[0].sent[tasks[0]["task_id"]]).status_code == 200
    drive([a, b])


def test_a_store_that_fails_for_a_while_is_tried_again(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptfed.coordinator.engine.scheduler.RETRY_SECONDS", 0.05)
    federation, clients = launched(coordinator, "a", "b", rounds=1)
    tasks = coordinator.training(clients)
    failures = [OSError(28, "No space left on device"), OperationalError("INSERT", {}, Exception("disk is full"))]
    aggregate = jobs.aggregate

    def failing(registry: Registry, id: str) -> None:
        if failures:
            raise failures.pop()
        aggregate(registry, id)

    monkeypatch.setattr(jobs, "aggregate", failing)
    answer_all(clients, tasks)
    drive(clients)
    assert failures == []
    assert coordinator.get(federation)["state"] == "finished"


def test_what_outlives_a_stop_is_lost(coordinator_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    go_on, begun = threading.Event(), threading.Event()
    monkeypatch.setattr("promptfed.coordinator.engine.scheduler.STOP_SECONDS", 0.1)
    original = global_state.check_state

    def slow(*arguments: Any) -> None:
        if begun_for_real[0]:
            begun.set()
            go_on.wait(PATIENCE)
        original(*arguments)

    begun_for_real = [False]
    monkeypatch.setattr(global_state, "check_state", slow)
    first = coordinator_with()
    federation, clients = launched(first, "a", "b", rounds=1)
    tasks = first.training(clients)
    begun_for_real[0] = True
    answer_all(clients, tasks)
    assert begun.wait(PATIENCE)
    first.stop()
    assert first.registry.computing
    begun_for_real[0] = False
    second = coordinator_with()
    go_on.set()
    drive([second.client(federation, name) for name in "ab"])
    report = second.get(f"{federation}/rounds/1")
    assert report["state_hash"] == report["phases"][0]["state_hash"]
    assert first.registry.federations[federation].run.due_job == "aggregate", "what was left has committed nothing"


# A token that has expired stays so, whatever becomes of the wall clock.


SetClock = Callable[[float], None]


Beat = Callable[[InThread], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Sets the wall clock to so many hours after the true time."""

    def to(hours: float) -> None:
        monkeypatch.setattr(clock, "utc", lambda: datetime.now(UTC) + timedelta(hours=hours))

    return to


@pytest.fixture
def beat(monkeypatch: pytest.MonkeyPatch, leap: Leap) -> Beat:
    """Waits for a beat of the scheduler that began after the call."""
    done: list[None] = []
    real = scheduler.Scheduler._beat

    def counted(self: scheduler.Scheduler) -> None:
        real(self)
        done.append(None)

    monkeypatch.setattr(scheduler.Scheduler, "_beat", counted)

    def wait_for_one(coordinator: InThread) -> None:
        wanted = len(done) + 2  # the first of them may have begun before the call

        def came() -> bool:
            leap(coordinator, scheduler.FLUSH_SECONDS + 1)
            return len(done) >= wanted

        wait_for("a beat", came)

    return wait_for_one


def operator(coordinator: InThread, name: str, hours: float) -> str:
    asked = {"name": name, "role": "viewer", "hours": hours}
    return str(coordinator.post("/v1/operators", asked, status=201)["token"])


def answers(coordinator: InThread, federation: str, enrolment: str, operators: str) -> list[int]:
    """The status of a call with each of the two tokens. A refusal must say that the token has expired."""
    paths = {f"/v1/federations/{federation}/enrolment": enrolment, "/v1/federations": operators}
    found = [coordinator.http.get(path, headers=bearer(token)) for path, token in paths.items()]
    refused = [one.json()["type"].rsplit("/", 1)[-1] for one in found if one.status_code != 200]
    assert set(refused) <= {"token-expired"}
    return [one.status_code for one in found]


@pytest.mark.both_databases
def test_a_clock_that_is_set_back_revives_no_token(coordinator_with: Make, set_clock: SetClock, beat: Beat) -> None:
    first = coordinator_with()
    federation = first.create()
    short = first.token(federation, hours=1), operator(first, "anna", 1)
    long = first.token(federation, hours=100), operator(first, "otto", 100)
    assert answers(first, federation, *short) == answers(first, federation, *long) == [200, 200]
    set_clock(2)
    beat(first)
    assert answers(first, federation, *short) == [401, 401]
    set_clock(0)
    assert answers(first, federation, *short) == [401, 401]
    listed = [*first.get(f"{federation}/enrolment-tokens")["tokens"], *first.get("/v1/operators")["operators"]]
    assert sum(token["expired_at"] is not None for token in listed) == 2, "lists say which two have expired"
    assert OperatorCaller("anna", "viewer", token=digest(short[1])).seconds_left(first.registry) == 0, "ends streams"
    assert answers(first, federation, *long) == [200, 200]
    minted = first.token(federation, hours=1), operator(first, "anna", 1)
    first.stop()
    again = coordinator_with()
    beat(again)
    assert answers(again, federation, *short) == [401, 401], "also after a restart"
    assert answers(again, federation, *long) == [200, 200]
    assert answers(again, federation, *minted) == [200, 200], "a clock that was ahead does not harm later tokens"


def test_tokens_that_expired_between_two_runs_are_marked_at_the_start(
    coordinator_with: Make, set_clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = coordinator_with()
    federation = first.create()
    tokens = first.token(federation, hours=1), operator(first, "anna", 1)
    first.stop()
    monkeypatch.setattr(scheduler, "FLUSH_SECONDS", 1e6)  # no beat after that of the start
    set_clock(2)
    second = coordinator_with()
    registry = second.registry

    def marked() -> bool:
        enrolment, operators = registry.get(federation).tokens, registry.operators
        return enrolment[digest(tokens[0])].expired and operators[digest(tokens[1])].expired

    wait_for("the marks", marked)
    set_clock(0)
    assert answers(second, federation, *tokens) == [401, 401]


def test_a_new_token_is_written_where_the_one_in_the_file_has_once_expired(
    coordinator_with: Make, set_clock: SetClock, beat: Beat, tmp_path: Path
) -> None:
    spec, file = tmp_path / "spec.yaml", tmp_path / "enrolment.token"
    spec.write_text("name: eyes\nmethod: {name: promptfl}\n")
    options = {"bootstrap": spec, "enrolment_token_file": file, "token_hours": 1}
    first = coordinator_with(**options)
    before = file.read_text()
    set_clock(2)
    beat(first)
    first.stop()
    set_clock(0)
    second = coordinator_with(**options)
    assert file.read_text() != before
    assert second.client("eyes", "a").enrol(file.read_text().strip()).status_code == 201


# The C library's heaps: two for all threads, unless its own variable says otherwise; what is free goes back.


# Threads that hold memory at the same time, as many as there are requests under way; glibc then tells its heaps.


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's allocator: run with glibc")
def test_free_memory_between_what_is_in_use_goes_back() -> None:
    """100 MB in pieces, of which each hundredth stays: glibc by itself would keep all that lies before the last."""
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    pieces = [bytearray(2_000) for _ in range(50_000)]
    kept = pieces[::100]
    del pieces
    machine.give_back()
    assert process.memory_info().rss - before < 20e6
    assert sum(len(piece) for piece in kept) == 1_000_000


@pytest.mark.extended
def test_the_coordinator_gives_it_back_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = threading.Event()
    monkeypatch.setattr(scheduler, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(scheduler, "give_back", given.set)
    with in_thread(tmp_path):
        assert given.wait(PATIENCE)
