"""The coordinator on PostgreSQL: one at a time, with its own data folder, and said in one line where that cannot be."""

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
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from promptfed.coordinator.__main__ import main
from promptfed.coordinator.engine.log_lines import JsonFormatter
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.backend import CannotOpen, DatabaseAway, InUse
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.opening import Store, open_store
from promptfed.coordinator.store.postgres import PostgreSQL
from promptfed.coordinator.store.tables import EventRow, FederationRow, TokenRow
from promptfed.shared.methods import METHODS
from promptfed.shared.service import fault_points
from promptfed.testing.clients import DEADLINE, drive
from tests.support.coordinators import InThread, in_thread
from tests.support.open_phases import completed, enrolled, kind, open_first_phase
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.resending import ResendingApi, ResendingRefused
from tests.support.two_phase import TwoPhase
from tests.support.waiting import PATIENCE, start_and_join, wait_for
from tests.support.whole_federation import run


def opened(folder: Path, url: str, wait: float = PATIENCE) -> Store:
    return open_store(Settings(data_dir=folder, database_url=SecretStr(url), database_wait_seconds=wait))


def test_one_coordinator_at_a_time(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.database()
    first = opened(tmp_path / "one", url)
    with pytest.raises(InUse, match=r"another coordinator works on the database at 127.0.0.1:\d+/db\d+"):
        opened(tmp_path / "two", url, wait=0)
    with pytest.raises(InUse, match="another coordinator works on"):
        opened(tmp_path / "one", postgres.database(), wait=0)
    first.close()
    opened(tmp_path / "one", url).close()


def test_another_schema_is_another_database(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.database()
    name = url.rsplit("/", 1)[1]
    postgres.execute("CREATE SCHEMA other", name)
    first = opened(tmp_path / "one", url)
    second = opened(tmp_path / "two", f"{url}?options=-csearch_path%3Dother")
    tables = "SELECT schemaname FROM pg_tables WHERE tablename = 'federations' ORDER BY 1"
    assert postgres.execute(tables, name) == [("other",), ("public",)]
    first.close()
    second.close()


def test_the_lock_of_one_that_ends_is_waited_for(postgres: PostgresServer) -> None:
    url = postgres.schema()
    first, second = Database(PostgreSQL(url)), Database(PostgreSQL(url))
    first.connect(wait_seconds=0)
    with pytest.raises(InUse):
        second.connect(wait_seconds=0)
    ended = threading.Event()

    def end() -> None:
        ended.set()
        first.close()

    ending = threading.Timer(0.3, end)
    ending.start()
    second.connect(wait_seconds=PATIENCE)
    assert ended.is_set()
    ending.join()
    second.close()


@pytest.mark.usefixtures("blobs_are_files")
def test_a_folder_and_another_s_database_are_refused(postgres: PostgresServer, tmp_path: Path) -> None:
    with in_thread(tmp_path / "one") as server:
        federation, _ = completed(server, "a", "b", rounds=1)
        blobs = sorted(server.registry.blobs.all())
    used, unused = postgres.schema(), postgres.schema()
    with in_thread(tmp_path / "two", database_url=used) as server:
        server.create()
    for folder, url in (("one", unused), ("one", used), ("two", unused), ("three", used)):
        with pytest.raises(CannotOpen, match="do not belong together"):
            opened(tmp_path / folder, url)
    with in_thread(tmp_path / "one") as server:
        assert sorted(server.registry.blobs.all()) == blobs != [], "no sweep has taken them away"
        assert server.get(federation)["state"] == "finished"
    with in_thread(tmp_path / "two", database_url=used) as server:
        assert server.get("eyes")["state"] == "enrolling"


def test_a_folder_from_before_it_had_a_name_is_taken_over(tmp_path: Path) -> None:
    with in_thread(tmp_path) as server:
        server.create()
        with server.registry.database.write() as session:
            session.execute(text("DELETE FROM store"))
    (tmp_path / "store.id").unlink()
    with in_thread(tmp_path) as server:
        assert server.get("eyes")["state"] == "enrolling"


def test_durability_is_asked_for_where_the_database_would_not_give_it(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.database()
    name = url.rsplit("/", 1)[1]
    for setting, expected in (("off", "on"), ("remote_apply", "remote_apply")):
        postgres.execute(f"ALTER DATABASE {name} SET synchronous_commit = {setting}")
        store = opened(tmp_path / "data", url)
        with store.database.write() as session:
            assert session.execute(text("SHOW synchronous_commit")).scalar() == expected
        store.close()


def test_readers_see_one_commit_and_cannot_write(postgres: PostgresServer, tmp_path: Path) -> None:
    store = opened(tmp_path / "data", postgres.schema())
    count = text("SELECT count(*) FROM store")
    with store.database.read() as reader:
        assert reader.execute(count).scalar() == 1
        with store.database.write() as writer:
            writer.execute(text("INSERT INTO store VALUES ('another')"))
        assert reader.execute(count).scalar() == 1
    with store.database.read() as reader:
        assert reader.execute(count).scalar() == 2
    with pytest.raises(DatabaseAway, match="read-only transaction"), store.database.read() as reader:
        reader.execute(text("DELETE FROM store"))
    store.close()


def test_event_numbers_grow_with_the_commits_and_large_numbers_fit(postgres: PostgresServer, tmp_path: Path) -> None:
    """The stream goes on after the last number seen: a smaller one that commits later would be lost."""
    with in_thread(tmp_path, database_url=postgres.schema()) as server:
        federation = server.create()
        server.enrol(federation, "a", num_samples=1 << 40)
        with pytest.raises(IntegrityError), server.registry.change(federation) as change:
            change.emit("never-committed")
            change.session.add(TokenRow(digest="x", federation_id="nobody", created_at="", expires_at=""))
        threads = [threading.Thread(target=server.token, args=(federation,)) for _ in range(4)]
        threads += [threading.Thread(target=server.enrol, args=(federation, name)) for name in "bcd"]
        start_and_join(threads)
        with server.registry.database.read() as session:
            rows = list(session.query(EventRow).order_by(EventRow.id))
            row = session.get_one(FederationRow, federation)
            assert row.name == "eyes"
        kinds = Counter(row.kind for row in rows)
        assert kinds == {"federation-created": 1, "token-minted": 8, "client-enrolled": 4}
        assert sorted(row.data["client"] for row in rows if row.kind == "client-enrolled") == list("abcd")


REFUSED = {
    "an encoding that cannot hold every name": ("SQL_ASCII", "has encoding SQL_ASCII: create it with ENCODING 'UTF8'"),
    "tables of a later version": ("later", "was made by another version"),
    "an account that may not make tables": ("rights", "permission denied"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_database_that_will_not_do_is_refused_in_one_line(
    case: str, postgres: PostgresServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, told = REFUSED[case]
    url = postgres.database()
    name = url.rsplit("/", 1)[1]
    if kind == "SQL_ASCII":
        postgres.execute(f"DROP DATABASE {name}")
        postgres.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc TEMPLATE template0")
    elif kind == "later":
        postgres.execute("CREATE TABLE alembic_version (version_num varchar(32) NOT NULL)", name)
        postgres.execute("INSERT INTO alembic_version VALUES ('9999')", name)
    else:
        postgres.execute("REVOKE CREATE ON SCHEMA public FROM public", name)
        postgres.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'p'")
        url = url.replace(url.split("//")[1].split("@")[0], f"{name}:p")
    file = tmp_path / "url"
    file.write_text(url + "\n")
    assert main(["--data-dir", str(tmp_path / "data"), "--port", "0", "--database-url-file", str(file)]) == 2
    assert told in last_line(capsys)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line for people; all others are the log's."""
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, lines
    assert PASSWORD not in lines[0]
    assert lines[0].startswith("coordinator: ")
    return lines[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("@127.0.0.1:", "@127.0.0.2:"), "Connection refused"),
        (("s3cret", "wrong"), "password authentication failed"),
        (("/postgres?", "/nobody?"), "does not exist"),
    ],
)
def test_a_database_that_is_away_at_the_start_is_waited_for_and_given_up(
    change: tuple[str, str], told: str, postgres: PostgresServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres.schema().replace(*change)
    start = time.monotonic()
    options = ["--port", "0", "--database-url", url, "--database-wait-seconds", "0.2"]
    assert main(["--data-dir", str(tmp_path), "--log-level", "debug", *options]) == 3
    assert time.monotonic() - start < 25, "the time that was asked for, and not the usual 30 s"
    line = last_line(capsys)
    assert told in line
    assert line.endswith("given up after 0.2 s")


def test_a_database_that_comes_in_time_is_taken(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.schema()
    postgres.stop()
    coming = threading.Timer(0.5, postgres.start)
    coming.start()
    try:
        with in_thread(tmp_path, database_url=url, database_wait_seconds=PATIENCE) as server:
            assert server.http.get("/readyz").status_code == 200
    finally:
        coming.join()


@pytest.mark.door
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--database-url", "mysql://u:hidden@h/n"], "must be postgresql+psycopg://"),
        (["--database-url", "postgresql+psycopg://u:hidden@h:port/n"], "cannot be read"),
        (["--database-url", "postgresql://u:hidden@h/n", "--database-url-file", "x"], "give one of them"),
        (["--database-url-file", "/nowhere/url"], "/nowhere/url cannot be read: there is no such file"),
        (["--database-url-file", "/dev/null"], "/dev/null is empty"),
        (["--database-wait-seconds", "-1"], "--database-wait-seconds"),
    ],
)
def test_a_database_that_is_not_named_well_is_said_without_the_password(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data-dir", str(tmp_path), "--port", "0", *options]) == 2
    output = capsys.readouterr().err
    assert told in output
    assert "hidden" not in output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.door
def test_the_url_of_a_variable_or_a_file_is_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = "postgresql+psycopg://u:hidden@h/n"
    monkeypatch.setenv("PROMPTFED_COORDINATOR_DATABASE_URL", url)
    assert Settings().url() == url
    assert "hidden" not in repr(Settings())
    monkeypatch.delenv("PROMPTFED_COORDINATOR_DATABASE_URL")
    (tmp_path / "url").write_text(f"{url}\n")
    monkeypatch.setenv("PROMPTFED_COORDINATOR_DATABASE_URL_FILE", str(tmp_path / "url"))
    assert Settings().url() == url


@pytest.mark.door
@pytest.mark.parametrize("variable", ["URL", "URL_FILE"])
def test_an_option_counts_before_the_variables(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[str | None] = []
    monkeypatch.setattr("promptfed.coordinator.server.serve", lambda settings: served.append(settings.url()) or 0)
    (tmp_path / "url").write_text("postgresql://a@h/n")
    monkeypatch.setenv(f"PROMPTFED_COORDINATOR_DATABASE_{variable}", {"URL": "postgresql://b@h/n"}.get(variable, "/no"))
    assert main(["--database-url="]) == main(["--database-url-file", str(tmp_path / "url")]) == 0
    monkeypatch.setenv(f"PROMPTFED_COORDINATOR_DATABASE_{variable}", "")
    assert main([]) == 0
    assert served == [None, "postgresql://a@h/n", None]


@pytest.mark.both_databases
def test_names_are_ordered_by_code_point(coordinator: InThread) -> None:
    federation, clients = enrolled(coordinator, "b", "A", "a-1", "B", "a1", participation={"min_clients": 4})
    names = [one["name"] for one in coordinator.get(f"{federation}/clients?limit=2&after=A")["clients"]]
    assert names == ["B", "a-1"]
    coordinator.post(f"{federation}/start")
    drive(clients)
    phase = coordinator.get(f"{federation}/rounds/1")["phases"][0]
    assert [one["client"] for one in phase["updates"]] == sorted(client.name for client in clients)


@pytest.mark.both_databases
def test_text_that_a_database_cannot_hold_is_refused_or_kept(coordinator: InThread) -> None:
    federation = coordinator.create(participation={"min_clients": 1})
    token: dict[str, Any] = {"token": coordinator.token(federation)}
    refused = coordinator.client(federation, "a").enrol(token["token"], device="gpu\0")
    assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "body.device")
    refused = coordinator.client(federation, "a").enrol(token["token"], class_names=["nul \0", "snow ☃"])
    assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "body.class_names.0")
    [client] = coordinator.enrol(federation, "a", class_names=["snow ☃", "𝛼"])
    coordinator.post(f"{federation}/start")
    task = coordinator.task(client)
    body = {"type": "broken\0", "detail": "𝛼 \0 ☃"}
    path = f"{client.path}/tasks/{task['task_id']}/failure"
    assert client.http.post(path, json=body, headers=client.headers).status_code == 200
    report = coordinator.get(f"{federation}/rounds/0")["evaluation"]["failed"]
    assert report == [{"client": "a", **body}]


# A database that goes away in the middle: 503 until it is back, and the run ends where an undisturbed one ends.

ROUNDS = 3

FAULTS = ("start-before-commit", "payloads-before-commit", "evaluation-entered", "group-before-commit")
FAULTS += ("update-checked", "update-entered", "group-stepped", "blob-row-written", "group-committed")
FAULTS += ("phase-closed", "aggregate-computed", "state-before-commit", "state-committed")

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
            postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name='{NAME}'")

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
    wait_for("both waits", lambda: measures.waiting._value.get() == measures.streams._value.get() == 1)
    postgres.stop()
    try:
        wait_for("the loss", lambda: on_postgres.http.get("/readyz").status_code == 503)
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
    wait_for("the return", lambda: on_postgres.http.get("/readyz").status_code == 200)
    assert on_postgres.get(federation)["answered"] == ["a"], "nothing is lost"
    left = on_postgres.get(federation)["stage"]["seconds_left"]
    assert left > DEADLINE - (time.monotonic() - again), "the time without a database does not count"
    drive([b, a])
    for thread in threads:
        thread.join(PATIENCE)
    assert waiting[0].status_code in (200, 410)
    with on_postgres.registry.database.read() as session:
        assert story == [f"id: {row.id}" for row in session.query(EventRow).order_by(EventRow.id)]


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
    wait_for("the return", lambda: not on_postgres.registry.away)
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
    wait_for("the return", lambda: on_postgres.http.get("/readyz").status_code == 200)
    assert [one["name"] for one in on_postgres.get("/v1/federations")["federations"]] == ["meanwhile"]


def test_a_lost_lock_is_noticed_without_a_request(
    on_postgres: InThread, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    before = postgres.execute(WRITER)
    caplog.set_level(logging.INFO, "promptfed.coordinator")
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM ({WRITER}) AS held")
    wait_for("the return", lambda: "the database is back" in caplog.text)
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
    wait_for("the return", lambda: not on_postgres.registry.away)
    assert a.answer(task).status_code in (200, 201)
    b.answer(other)
    drive([a, b])
    assert on_postgres.get(federation)["state"] == "finished"


@pytest.mark.parametrize("waits", ["what is written at the end", "a sign of life that is asked for"])
def test_a_server_that_hangs_delays_no_end(waits: str, on_postgres: InThread, postgres: PostgresServer) -> None:
    open_first_phase(on_postgres)
    [(pid,)] = postgres.execute(WRITER)
    os.kill(int(str(pid)), signal.SIGSTOP)
    try:
        if waits == "a sign of life that is asked for":
            wait_for("the turn", on_postgres.registry.database._turn.locked)
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
        wait_for("the loss", lambda: on_postgres.http.get("/readyz").status_code == 503)
        assert on_postgres.http.get("/v1/federations", headers=on_postgres.operator).status_code == 503
    finally:
        postgres.start()
    wait_for("the return", lambda: on_postgres.http.get("/readyz").status_code == 200)
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
