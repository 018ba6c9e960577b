"""A token that has expired stays so, whatever becomes of the wall clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from promptfed.coordinator.domain import clock
from promptfed.coordinator.engine import scheduler
from promptfed.coordinator.http.callers import OperatorCaller
from promptfed.coordinator.store.opening import digest
from promptfed.testing.clients import bearer
from tests.support.coordinators import InThread
from tests.support.waiting import wait_for

Leap = Callable[[InThread, float], None]
SetClock = Callable[[float], None]
Beat = Callable[[InThread], None]
Make = Callable[..., InThread]


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


def test_marks_are_written_once(coordinator_with: Make, set_clock: SetClock, beat: Beat) -> None:
    coordinator = coordinator_with()
    federation = coordinator.create()
    coordinator.token(federation, hours=1)
    operator(coordinator, "anna", 1)
    set_clock(2)
    written: list[str] = []
    engine = coordinator.registry.database.backend.writer
    event.listen(engine, "before_cursor_execute", lambda *given: written.append(given[2].split()[1]))
    for _ in range(3):
        beat(coordinator)
    assert [table for table in written if table.endswith("_tokens")] == ["operator_tokens", "enrolment_tokens"]


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
