"""The coordinator as a process: how it starts, why it does not, and that it ends in order when it is told to."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator import server
from promptfed.coordinator.server import serve
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.backend import CannotOpen, DatabaseAway
from promptfed.shared.errors import BadInput
from promptfed.shared.service.addresses import bind
from promptfed.testing.clients import PATIENCE, bearer
from promptfed.testing.coordinator import OperatorCalls
from tests.support.waiting import wait_for


@pytest.fixture(autouse=True)
def machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("raise_open_files", "share_heaps"):
        monkeypatch.setattr(server, name, lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


class Served(OperatorCalls):
    """A server that was started in this process."""

    def __init__(self, settings: Settings, url: str):
        self.url, self.http = url, httpx.Client(base_url=url, timeout=60)
        self.operator = bearer((settings.data_dir / "operator.token").read_text().strip())


def during(settings: Settings, work: Callable[[Served], None]) -> int:
    """The exit code of a server that is worked with, and then told to end by ``work``."""
    assert settings.port_file is not None
    place, failed, over = settings.port_file, list[BaseException](), threading.Event()

    def run() -> None:
        try:
            wait_for("the server", place.exists, ended=lambda: "it has ended" if over.is_set() else None)
            served = Served(settings, place.read_text().strip())
            with served.http:
                work(served)
        except BaseException as error:
            failed.append(error)
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run)
    thread.start()
    code = serve(settings)
    over.set()
    thread.join(PATIENCE)
    assert failed == []
    return code


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_which_wakes_who_waits(
    tmp_path: Path, sent: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(data_dir=tmp_path / "data", port=0, port_file=tmp_path / "url", log_level="info")
    polls, streams = list[int](), list[bool]()

    def work(served: Served) -> None:
        federation = served.create()
        [client] = served.enrol(federation, "a")
        path = f"{served.url}/v1/federations/{federation}/events"

        def listen() -> None:
            with httpx.stream("GET", path, headers=served.operator, timeout=60) as response:
                streams.append("federation-created" in "".join(response.iter_text()))

        waiting = [threading.Thread(target=lambda: polls.append(client.task(wait=60).status_code))]
        waiting.append(threading.Thread(target=listen))
        for thread in waiting:
            thread.start()
        for gauge in ("promptfed_waiting_clients 1.0", "promptfed_event_streams 1.0"):
            wait_for(gauge, lambda gauge=gauge: gauge in served.http.get("/metrics").text, seconds=60)
        os.kill(os.getpid(), sent)
        for thread in waiting:
            thread.join(50)  # the poll's own end comes later

    assert during(settings, work) == 0
    assert (polls, streams) == ([204], [True]), "both ended in order"
    said = capsys.readouterr().err
    assert f"database at {settings.data_dir / 'coordinator.sqlite3'}" in said
    assert "the operator's page is http://127.0.0.1:" in said


def refused(settings: Settings, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a start that cannot be, and its one line on stderr."""
    capsys.readouterr()
    code = serve(settings)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("coordinator: ")]
    return code, "\n".join(line.removeprefix("coordinator: ") for line in said)


def test_what_cannot_be_used_is_one_line_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, no_file, run = tmp_path / "data", tmp_path / "none.pem", tmp_path / "run.yaml"
    run.write_text("name: eyes\nmethod: {name: promptfl, m: 4}\n")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("name: eyes\nmethod: {name: nonsense}\n")
    taken = bind("127.0.0.1", 0)
    taken.listen()
    monkeypatch.setattr(server.Server, "run", lambda self, sockets: None)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"bootstrap": wrong}, f"{wrong}: method.name"),
        ({"bootstrap": tmp_path / "none.yaml"}, "none.yaml"),
        ({"bootstrap": run, "enrolment_token_file": tmp_path / "none" / "t"}, "cannot write the enrolment token into"),
        ({"tls_cert": no_file, "tls_key": no_file}, f"--tls-cert {no_file} and --tls-key {no_file} cannot be used: "),
        ({"port": taken.getsockname()[1]}, f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}: "),
    ]
    for given, why in cases:
        code, line = refused(Settings(**({"data_dir": folder, "port": 0} | given)), capsys)
        assert (code, "\n" in line) == (2, False), given
        assert why in line
        assert not folder.exists()
    taken.close()
    server._check(Settings(bootstrap=run, enrolment_token_file=tmp_path / "token"))
    ca = Settings.model_construct(bootstrap=None, enrolment_token_file=None, tls_cert=None, tls_client_ca=no_file)
    with pytest.raises(OSError, match=r"--tls-client-ca .*none.pem cannot be used: "):
        server._check(ca)
    plain = Settings(data_dir=folder)
    for given, wanted in (
        ({}, (False, "", ssl.CERT_NONE, None)),
        (
            {"tls_client_ca": no_file, "forwarded_allow_ips": "10.0.0.1"},
            (True, "10.0.0.1", ssl.CERT_OPTIONAL, str(no_file)),
        ),
    ):
        told = server._config(plain.model_copy(update=given), FastAPI())
        assert (told.proxy_headers, told.forwarded_allow_ips, told.ssl_cert_reqs, told.ssl_ca_certs) == wanted
        assert (told.server_header, told.access_log, told.timeout_keep_alive) == (False, False, 75)


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (CannotOpen("another coordinator"), 2, "another coordinator"),
        (BadInput("no such thing"), 2, "no such thing"),
        (PermissionError(13, "Permission denied", "/x"), 2, "/x"),
        (DatabaseAway("no answer"), 3, "no answer; given up after 7 s"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_store_that_cannot_be_opened_is_one_line_and_a_code(
    error: BaseException, code: int, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: Settings) -> None:
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler, "a SIGTERM ends the wait too"
        raise error

    monkeypatch.setattr(server, "open_store", fail)
    found, line = refused(Settings(port=0, database_wait_seconds=7), capsys)
    assert (found, why in line, "\n" in line) == (code, True, False)


PLACE = SimpleNamespace(backend=SimpleNamespace(place="here"), is_full=lambda error: isinstance(error, OSError))
PLACE.cannot_be_read = lambda error: f"here cannot be used: {error}"


@pytest.mark.parametrize("when", ["at the start", "later"])
@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (DatabaseAway("no answer"), 3, "no answer"),
        (CannotOpen("of another version"), 2, "of another version"),
        (OSError(28, "No space"), 2, "the disk of here is full: make room, and start it again"),
        (SQLAlchemyError("garbage"), 2, "here cannot be used: garbage"),
    ],
)
def test_federations_that_cannot_be_taken_up_end_it(
    error: Exception,
    code: int,
    why: str,
    when: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @asynccontextmanager
    async def failing(app: FastAPI) -> AsyncIterator[None]:
        async def turns() -> None:
            raise error

        if when == "at the start":
            raise error
        app.state.registry = SimpleNamespace(federations={}, computing=False)
        app.state.failed = asyncio.create_task(turns())
        yield

    monkeypatch.setattr(server, "lifespan", failing)
    monkeypatch.setattr(server, "open_store", lambda settings: SimpleNamespace(database=PLACE))
    assert refused(Settings(port=0, data_dir=tmp_path), capsys) == (code, why)


def test_who_waits_for_its_turn_ends_at_a_failure_alone_and_says_it_as_it_is() -> None:
    one = server.Server(server._config(Settings(), FastAPI()), FastAPI(), lambda: None)

    async def ended(how: str) -> None:
        turns: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        {"cancelled": turns.cancel, "done": lambda: turns.set_result(None)}[how]()
        one._end(turns)

    for how in ("cancelled", "done"):
        asyncio.run(ended(how))
        assert (one.failure, one.should_exit) == (None, False)
    assert server._why(OSError(28, "No space"), None) == "[Errno 28] No space"
    one.handle_exit(signal.SIGTERM, None)  # before it serves: nobody waits yet
    assert (one.should_exit, one.force_exit) == (True, False)
    one.handle_exit(signal.SIGTERM, None)
    assert one.force_exit is False
    one.handle_exit(signal.SIGINT, None)
    assert one.force_exit is True, "a second Ctrl-C waits for nothing"


def test_every_socket_has_the_long_queue_before_it_is_said_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    async def startup(self: uvicorn.Server, sockets: Any = None) -> None:
        done.append("up")

    @asynccontextmanager
    async def nothing(app: FastAPI) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    monkeypatch.setattr(server, "lifespan", nothing)
    one = server.Server(server._config(Settings(), FastAPI()), FastAPI(), lambda: done.append("ready"))
    sockets: Any = [SimpleNamespace(listen=done.append), SimpleNamespace(listen=done.append)]
    asyncio.run(one.startup(sockets))
    asyncio.run(one.startup())
    assert done == ["up", server.QUEUE, server.QUEUE, "ready", "up", "ready"]


def test_an_end_waits_for_no_computing_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(server.os, "_exit", codes.append)
    for computing in (False, True):

        @asynccontextmanager
        async def computes(app: FastAPI, computing: bool = computing) -> AsyncIterator[None]:
            app.state.registry = SimpleNamespace(federations={}, computing=computing, stop_waiting=lambda: None)
            yield

        monkeypatch.setattr(server, "lifespan", computes)
        monkeypatch.setattr(server, "open_store", lambda settings: SimpleNamespace(database=PLACE))
        monkeypatch.setattr(server.Server, "main_loop", lambda self: asyncio.sleep(0))
        assert serve(Settings(port=0, data_dir=tmp_path)) == 0
        assert codes == [0] * computing


def test_too_few_open_files_are_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    soon, past = datetime.now(UTC) + timedelta(hours=1), datetime.now(UTC) - timedelta(hours=1)

    def token(uses: int, used: int, closed: bool = False, expires: datetime = soon) -> Any:
        return SimpleNamespace(uses=uses, used=used, closed=closed, expires=expires, expired=False)

    tokens = {"a": token(5, 2), "b": token(9, 0, closed=True), "c": token(9, 0, expires=past)}
    running = SimpleNamespace(run=SimpleNamespace(state="running"), tokens=tokens, clients={"a": 1, "b": 1})
    ended = SimpleNamespace(run=SimpleNamespace(state="finished"), tokens=tokens, clients={"a": 1})
    registry: Any = SimpleNamespace(federations={"x": running, "y": ended})
    for most, warned in ((5, False), (4, True)):
        monkeypatch.setattr(server, "most_connections", lambda most=most: most)
        server._warn_of_file_limit(registry)
        found = [line for line in caplog.messages if "enough for 4 clients; 2 have enrolled and 3 may" in line]
        assert len(found) == warned


def test_the_faster_event_loop_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for found, loop in ((object(), "uvloop"), (None, "asyncio")):
        monkeypatch.setattr(server.importlib.util, "find_spec", lambda name, found=found: found)
        assert server.event_loop() == loop
        assert len(caplog.messages) == (loop == "asyncio")
