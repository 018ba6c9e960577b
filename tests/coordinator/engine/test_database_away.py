"""A database that goes away in the middle: 503 until it is back, and the run ends where an undisturbed one ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from psycopg import OperationalError

from promptfed.coordinator.__main__ import main
from promptfed.coordinator.engine.json_logs import JsonFormatter
from promptfed.coordinator.store import fault_points
from promptfed.coordinator.store.database import Database, PostgreSQL
from promptfed.coordinator.store.tables import EventRow
from promptfed.shared.methods import METHODS
from promptfed.testing.clients import DEADLINE, drive
from tests.support.coordinators import InThread, in_thread
from tests.support.open_phases import kind, open_first_phase
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.resending import ResendingApi, ResendingRefused
from tests.support.two_phase import TwoPhase
from tests.support.waiting import PATIENCE
from tests.support.whole_federation import run

ROUNDS = 3
FAULTS = (
    "start-before-commit",
    "payloads-before-commit",
    "evaluation-entered",
    "group-before-commit",
    "update-checked",
    "update-entered",
    "group-stepped",
    "blob-row-written",
    "group-committed",
    "phase-closed",
    "aggregate-computed",
    "state-before-commit",
    "state-committed",
)
NAME = "promptfed coordinator"
WRITER = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptfed.coordinator.engine.scheduler.RETRY_SECONDS", 0.05)
    monkeypatch.setattr("promptfed.coordinator.engine.scheduler.FLUSH_SECONDS", 0.2)


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.schema()


@pytest.fixture
def on_postgres(url: str, tmp_path: Path) -> Iterator[InThread]:
    with in_thread(tmp_path / "data", database_url=url) as server:
        yield server


def on_every_fault(monkeypatch: pytest.MonkeyPatch, happen: Callable[[str], None]) -> list[str]:
    """Call ``happen`` at each fault point in turn; the list of those still to come."""
    left = list(FAULTS)

    def reached(*_: object) -> None:
        name = left.pop(0)
        fault_points.arm("")
        happen(name)
        fault_points.arm(f"{left[0]}:1" if left else "")

    monkeypatch.setattr(fault_points, "os", SimpleNamespace(kill=reached, getpid=os.getpid))
    monkeypatch.setattr(fault_points, "_reached", Counter())
    monkeypatch.setattr(fault_points, "_armed", f"{left[0]}:1")
    return left


def test_lost_at_every_named_instant_it_ends_where_an_undisturbed_run_ends(
    on_postgres: InThread, postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At two of the instants the server crashes and is started again, at the others it ends the connections."""
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)
    with in_thread(tmp_path / "undisturbed") as server:
        expected = run(server, "two_phase", ROUNDS)
    assert expected["state"] == "finished"

    def happen(name: str) -> None:
        if name in ("group-stepped", "aggregate-computed"):
            postgres.stop()
            postgres.start()
        else:
            postgres.execute(
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{NAME}'"
            )

    left = on_every_fault(monkeypatch, happen)
    away = ResendingRefused(on_postgres.http, 503, "store-away", PATIENCE, retry_after="2")
    api = ResendingApi(away, on_postgres.operator)
    assert run(api, "two_phase", ROUNDS) == expected
    assert left == [], "every point was reached"
    assert api.resent > 0


def test_while_it_is_away_everything_says_so_and_then_goes_on(on_postgres: InThread, postgres: PostgresServer) -> None:
    federation, (a, b), (task, other) = open_first_phase(on_postgres, rounds=1)
    a.answer(task)
    story: list[str] = []
    path = f"/v1/federations/{federation}/events"

    def listen() -> None:
        with on_postgres.http.stream("GET", path, headers=on_postgres.operator) as response:
            story.extend(line for line in response.iter_lines() if line.startswith("id: "))

    waiting: list[httpx.Response] = []
    threads = [threading.Thread(target=listen), threading.Thread(target=lambda: waiting.append(a.task(wait=60)))]
    for thread in threads:
        thread.start()
    measures = on_postgres.registry.metrics
    until(lambda: measures.waiting._value.get() == measures.streams._value.get() == 1)
    postgres.stop()
    try:
        until(lambda: on_postgres.http.get("/readyz").status_code == 503)
        assert kind(on_postgres.http.get("/readyz")) == "not-ready"
        assert on_postgres.http.get("/healthz").status_code == 200
        for response in (
            b.send(other, b"x"),
            b.task(),
            b.evaluate(other),
            b.fail(other),
            on_postgres.http.get(f"/v1/federations/{federation}", headers=on_postgres.operator),
            on_postgres.http.post(f"/v1/federations/{federation}/cancel", headers=on_postgres.operator),
        ):
            assert (response.status_code, kind(response)) == (503, "store-away")
            assert response.headers["Retry-After"] == "2"
    finally:
        again = time.monotonic()
        postgres.start()
    until(lambda: on_postgres.http.get("/readyz").status_code == 200)
    assert on_postgres.get(federation)["answered"] == ["a"], "nothing is lost"
    left = on_postgres.get(federation)["stage"]["seconds_left"]
    assert left > DEADLINE - (time.monotonic() - again), "the time without a database does not count"
    drive([b, a])
    for thread in threads:
        thread.join(PATIENCE)
    assert waiting[0].status_code in (200, 410)
    with on_postgres.registry.database.read() as session:
        assert story == [f"id: {row.id}" for row in session.query(EventRow).order_by(EventRow.id)]


def until(true: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_commit_whose_answer_is_lost_counts_once(on_postgres: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, (a, b), (task, other) = open_first_phase(on_postgres, rounds=1)
    dialect = on_postgres.registry.database.backend.writer.dialect
    commit = dialect.do_commit
    losses = 1

    def lose(connection: Any) -> None:
        nonlocal losses
        commit(connection)
        # The driver looks after the connection now and then, in a thread of another kind.
        if losses and threading.current_thread().name == "committer":
            losses -= 1
            connection.driver_connection.close()
            raise OperationalError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(dialect, "do_commit", lose)
        response = a.answer(task)
        assert (response.status_code, kind(response)) == (503, "store-away")
    until(lambda: not on_postgres.registry.away)
    assert on_postgres.get(federation)["answered"] == ["a"]
    assert a.answer(task).status_code == 200
    assert b.answer(other).status_code == 201
    drive([a, b])
    assert [one["client"] for one in on_postgres.get(f"{federation}/rounds/1")["phases"][0]["counted"]] == ["a", "b"]


def test_nothing_is_written_without_the_lock(
    on_postgres: InThread, postgres: PostgresServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another takes over before the first one notices; its folder is the first one's, as on a disk without locks."""
    monkeypatch.setattr("promptfed.coordinator.engine.scheduler.FLUSH_SECONDS", 3600.0)
    federation = on_postgres.create()
    (tmp_path / "data" / "lock").rename(tmp_path / "lock")
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM ({WRITER}) AS held")
    with in_thread(tmp_path / "data", database_url=url) as second:
        path = f"/v1/federations/{federation}"
        for _ in range(2):
            response = on_postgres.http.post(f"{path}/cancel", headers=on_postgres.operator)
            assert (response.status_code, kind(response)) == (503, "store-away")
        assert on_postgres.http.get("/readyz").status_code == 503
        assert second.get(federation)["state"] == "enrolling"
        second.delete(federation)
        second.create(name="meanwhile")
    until(lambda: on_postgres.http.get("/readyz").status_code == 200)
    assert [one["name"] for one in on_postgres.get("/v1/federations")["federations"]] == ["meanwhile"]


def test_a_lost_lock_is_noticed_without_a_request(
    on_postgres: InThread, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    before = postgres.execute(WRITER)
    caplog.set_level(logging.INFO, "promptfed.coordinator")
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM ({WRITER}) AS held")
    until(lambda: "the database is back" in caplog.text)
    assert "is away: terminating connection due to administrator command" in caplog.text
    assert len(postgres.execute(WRITER)) == 1
    assert postgres.execute(WRITER) != before


def test_a_server_that_hangs_is_given_up_and_taken_again(
    on_postgres: InThread, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, (a, b), (task, other) = open_first_phase(on_postgres, rounds=1)
    [(pid,)] = postgres.execute(WRITER)
    with monkeypatch.context() as patch:
        patch.setattr("promptfed.coordinator.engine.scheduler.HANG_SECONDS", 0.5)
        os.kill(int(str(pid)), signal.SIGSTOP)
        try:
            response = a.answer(task)
            assert (response.status_code, kind(response)) == (503, "store-away")
        finally:
            os.kill(int(str(pid)), signal.SIGCONT)
    until(lambda: not on_postgres.registry.away)
    assert a.answer(task).status_code in (200, 201)
    b.answer(other)
    drive([a, b])
    assert on_postgres.get(federation)["state"] == "finished"


@pytest.mark.parametrize("waits", ["what is written at the end", "a sign of life that is asked for"])
def test_a_server_that_hangs_does_not_hold_up_the_end(
    waits: str, on_postgres: InThread, postgres: PostgresServer
) -> None:
    open_first_phase(on_postgres)
    [(pid,)] = postgres.execute(WRITER)
    os.kill(int(str(pid)), signal.SIGSTOP)
    try:
        if waits == "a sign of life that is asked for":
            until(on_postgres.registry.database._turn.locked)
            on_postgres.registry.last_seen._seen.clear()
            on_postgres.registry.last_seen._bytes.clear()
        on_postgres.stop()  # who waited for the server would wait for ever
    finally:
        os.kill(int(str(pid)), signal.SIGCONT)


def test_no_log_holds_the_password(
    on_postgres: InThread, postgres: PostgresServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    postgres.stop()
    try:
        until(lambda: on_postgres.http.get("/readyz").status_code == 503)
        assert on_postgres.http.get("/v1/federations", headers=on_postgres.operator).status_code == 503
    finally:
        postgres.start()
    until(lambda: on_postgres.http.get("/readyz").status_code == 200)
    told = "\n".join(JsonFormatter().format(record) for record in caplog.records)
    assert "is away" in told
    assert "the database is back" in told
    assert not any(one in told for one in (PASSWORD, "s3cret", url))


def test_sigterm_ends_the_wait_for_a_database(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = Database(PostgreSQL(url))
    holder.connect(wait_seconds=0)
    monkeypatch.setattr("promptfed.coordinator.store.database.TRY_AGAIN_SECONDS", 30)
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(seconds)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr("promptfed.coordinator.store.database.time.sleep", interrupted)
        assert main(["--data-dir", str(tmp_path), "--port", "0", "--database-url", url]) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    [line] = capsys.readouterr().err.splitlines()
    assert "waiting 30 s for the database" in json.loads(line)["message"]
    holder.close()
