"""Connections of strangers: what never becomes a request is hung up on, and open files do not run out."""

from __future__ import annotations

import importlib.util
import logging
import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from promptfed.coordinator import server
from promptfed.coordinator.http import connection_limits
from promptfed.shared.service import http_connection, net
from promptfed.testing.clients import drive
from tests.support.coordinators import CoordinatorProcess, InThread, in_thread
from tests.support.waiting import PATIENCE


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


def connect(coordinator: InThread | CoordinatorProcess) -> socket.socket:
    host, port = coordinator.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def hung_up(connection: socket.socket) -> bool:
    """Whether the other side ends the connection without an answer."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: "]
)
def test_half_a_head_is_not_waited_for(coordinator: InThread, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 0.3)
    with connect(coordinator) as connection:
        connection.sendall(sent)
        assert hung_up(connection)


def test_half_a_second_head_is_not_waited_for_either_however_it_trickles(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 0.5)
    whole = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    with connect(coordinator) as connection:
        connection.sendall(whole + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        connection.sendall(whole + b"A: ")
        end = time.monotonic() + PATIENCE
        with pytest.raises(OSError):  # noqa: PT011 (a reset or a broken pipe, as it comes)
            while time.monotonic() < end:  # in which fewer bytes are sent than a head may have
                connection.sendall(b"x")
                time.sleep(0.02)


def test_without_uvloop_the_limits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvloop" else known(name))
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 0.3)
    with in_thread(tmp_path / "data") as coordinator:
        assert "uvloop is not installed: asyncio's own event loop serves" in caplog.text
        with connect(coordinator) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
            assert hung_up(connection)
        monkeypatch.setattr(http_connection, "HEAD_SECONDS", PATIENCE)
        assert coordinator.get("/healthz") == {"status": "ok"}


def test_the_rest_of_a_body_that_nobody_reads_is_not_waited_for(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "REST_SECONDS", 0.3)
    with connect(coordinator) as connection:
        connection.sendall(b"POST /v1/federations HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
        with pytest.raises(OSError):  # noqa: PT011
            for _ in range(900):
                connection.sendall(b" ")
                time.sleep(0.02)


def test_a_head_without_end_is_refused(coordinator: InThread) -> None:
    with connect(coordinator) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"x" * http_connection.HEAD_BYTES)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert hung_up(connection)


BOTH = b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    "more",
    [b"Host: y\r\n", b"Content-Length: 3\r\nContent-Length: 4\r\n", BOTH, b"Connection: upgrade\r\nUpgrade: h2c\r\n"],
)
def test_what_can_be_read_in_two_ways_is_refused(coordinator: InThread, more: bytes) -> None:
    with connect(coordinator) as connection:
        connection.sendall(b"POST /healthz HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n3\r\nabc\r\n0\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert hung_up(connection)


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://x/healthz HTTP/1.1\r\nHost: y\r\n",
        b"GET /healthz#a HTTP/1.1\r\nHost: x\r\n",
        b"GET /healthz HTTP/1.1\r\n",
        b"GET /healthz HTTP/2.0\r\nHost: x\r\n",
        b"GET /healthz HTTP/1.0\r\nTransfer-Encoding: chunked\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n",
    ],
)
def test_what_a_proxy_could_take_for_another_request_is_refused(coordinator: InThread, head: bytes) -> None:
    with connect(coordinator) as connection:
        connection.sendall(head + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert hung_up(connection)


@pytest.mark.parametrize("begun", [b"1;a=", b"0\r\nTrailer: ", b"0\r\nA: b\r\n"])
def test_extensions_of_chunks_and_trailers_without_end_are_hung_up_on(coordinator: InThread, begun: bytes) -> None:
    [client] = coordinator.enrol(coordinator.create(), "a")
    lines = [f"PUT {client.path}/tasks/x/evaluation HTTP/1.1", "Host: x", "Transfer-Encoding: chunked"]
    lines += [f"{name}: {value}" for name, value in client.headers.items()]
    more = b"A: b\r\n" * 500 if begun.endswith(b"\n") else b"x" * 3000
    with connect(coordinator) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + begun)
        with pytest.raises(OSError):  # noqa: PT011
            for _ in range(200):
                connection.sendall(more)
                time.sleep(0.01)


def test_small_chunks_may_be_many(coordinator: InThread) -> None:
    [client] = coordinator.enrol(coordinator.create(), "a")
    lines = [f"PUT {client.path}/tasks/x/evaluation HTTP/1.1", "Host: x", "Transfer-Encoding: chunked"]
    lines += [f"{name}: {value}" for name, value in client.headers.items()]
    with connect(coordinator) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + b"1;a=b\r\n \r\n" * 20_000 + b"0\r\nA: b\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 422 ")


def test_heads_ahead_of_an_answer_have_a_length_together(coordinator: InThread) -> None:
    [client] = coordinator.enrol(coordinator.create(), "a")
    lines = [f"GET {client.path}/task?wait=5 HTTP/1.1", "Host: x"]
    lines += [f"{name}: {value}" for name, value in client.headers.items()]
    with connect(coordinator) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        with pytest.raises(OSError):  # noqa: PT011
            connection.sendall((b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 15_000 + b"\r\n\r\n") * 12)
            assert connection.recv(4096), "it hangs up"
            raise AssertionError("it is answered")


def test_what_is_asked_ahead_of_an_answer_waits_for_it(coordinator: InThread) -> None:
    [client] = coordinator.enrol(coordinator.create(), "a")
    lines = [f"GET {client.path}/task?wait=0.3 HTTP/1.1", "Host: x"]
    lines += [f"{name}: {value}" for name, value in client.headers.items()]
    with connect(coordinator) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
        answers = b""
        while answers.count(b"HTTP/1.1 ") < 501:
            answers += connection.recv(65536)
    assert answers.startswith(b"HTTP/1.1 204 ")
    assert answers.count(b"HTTP/1.1 200 ") == 500


def test_a_long_poll_outlasts_the_time_for_a_head(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    [client] = coordinator.enrol(coordinator.create(), "a")  # on a connection whose first head is there
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 0.2)
    assert client.task(wait=0.6).status_code == 204
    assert client.task().status_code == 204, "on the same connection"


def test_one_connection_too_many_is_ended_and_those_before_go_on(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.get("/v1/federations")
    monkeypatch.setattr(connection_limits, "most_connections", lambda: 3)
    with ExitStack() as open_:
        for _ in range(2):
            open_.enter_context(connect(coordinator))
        assert hung_up(open_.enter_context(connect(coordinator)))
        coordinator.get("/v1/federations")


def test_strangers_cannot_use_up_the_open_files(tmp_path: Path) -> None:
    process = CoordinatorProcess(tmp_path / "data")
    try:
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard, "it takes what it may have"
        federation = process.create(rounds=2)
        clients = process.enrol(federation, "a", "b")
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (800, hard))
        with ExitStack() as open_:
            for _ in range(850):
                open_.enter_context(connect(process))
            process.post(f"{federation}/start")
            drive(clients)
            process.until(federation, state="finished")
        assert "out of system resource" not in process.log()
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("hard", "raised", "connected"),
    [(4096, 4096, 3696), (600, 600, 300), (resource.RLIM_INFINITY, net.ENOUGH_FILES, 65_136)],
)
def test_as_many_connections_as_the_system_has_files_for(
    monkeypatch: pytest.MonkeyPatch, hard: int, raised: int, connected: int
) -> None:
    limits = [(256, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    net.raise_open_files()
    assert limits[-1] == (raised, hard)
    assert net.most_connections() == connected


def test_the_start_warns_of_more_clients_than_open_files(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    federation = coordinator.create()
    coordinator.enrol(federation, "a", "b")
    coordinator.token(federation, uses=10)
    monkeypatch.setattr(server, "most_connections", lambda: 2000)
    server._warn_of_file_limit(coordinator.registry)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    monkeypatch.setattr(server, "most_connections", lambda: 11)
    server._warn_of_file_limit(coordinator.registry)
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "open files are enough for 11 clients; 2 have enrolled and" in record.getMessage()
    assert "ulimit -n" in record.getMessage()


def test_a_limit_that_cannot_be_raised_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, wanted: tuple[int, int]) -> None:
        raise ValueError(f"not allowed to raise the limit to {wanted}")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    net.raise_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
