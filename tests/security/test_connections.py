"""Connections of strangers: what never becomes a request is hung up on, and open files do not run out."""

from __future__ import annotations

import importlib.util
import json
import logging
import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.coordinator import server
from promptfed.coordinator.http import connections, throttle
from promptfed.shared.messages import EnrolRequest
from promptfed.shared.service import http_connection, open_files
from promptfed.testing.clients import (
    CLASSES,
    ScriptedClient,
    bearer,
    content_digest,
    drive,
    enrolment,
    secret_of,
    update_body,
)
from tests.support.coordinators import CoordinatorProcess, InThread, Make, in_thread
from tests.support.open_phases import enrolled, kind, open_first_phase
from tests.support.waiting import PATIENCE, wait_for


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


def test_half_a_second_head_that_trickles_is_given_up(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert coordinator.get("/healthz") == coordinator.get("/readyz") == {"status": "ok"}


def test_an_unread_body_is_not_waited_for(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "REST_SECONDS", 0.3)
    with connect(coordinator) as connection:
        connection.sendall(b"POST /v1/federations HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
        with pytest.raises(OSError):  # noqa: PT011
            for _ in range(900):
                connection.sendall(b" ")
                time.sleep(0.02)


def head(client: ScriptedClient, line: str, *more: str) -> bytes:
    """The first line and the headers of a client's request."""
    lines = [line, "Host: x", *more, *(f"{name}: {value}" for name, value in client.headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize("begun", [b"1;a=", b"0\r\nTrailer: ", b"0\r\nA: b\r\n"])
def test_extensions_of_chunks_and_trailers_without_end_are_hung_up_on(coordinator: InThread, begun: bytes) -> None:
    [client] = coordinator.enrol(coordinator.create(), "a")
    begin = head(client, f"PUT {client.path}/tasks/x/evaluation HTTP/1.1", "Transfer-Encoding: chunked")
    more = b"A: b\r\n" * 500 if begun.endswith(b"\n") else b"x" * 3000
    with connect(coordinator) as connection:
        connection.sendall(begin + begun)
        with pytest.raises(OSError):  # noqa: PT011
            for _ in range(200):
                connection.sendall(more)
                time.sleep(0.01)


def test_small_chunks_may_be_many(coordinator: InThread) -> None:
    [client] = coordinator.enrol(coordinator.create(), "a")
    begin = head(client, f"PUT {client.path}/tasks/x/evaluation HTTP/1.1", "Transfer-Encoding: chunked")
    with connect(coordinator) as connection:
        connection.sendall(begin + b"1;a=b\r\n \r\n" * 20_000 + b"0\r\nA: b\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 422 ")


def test_heads_ahead_of_an_answer_have_a_length_together(coordinator: InThread) -> None:
    [client] = coordinator.enrol(coordinator.create(), "a")
    begin = head(client, f"GET {client.path}/task?wait=5 HTTP/1.1")
    with connect(coordinator) as connection:
        connection.sendall(begin)
        with pytest.raises(OSError):  # noqa: PT011
            connection.sendall((b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 15_000 + b"\r\n\r\n") * 12)
            assert connection.recv(4096), "it hangs up"
            raise AssertionError("it is answered")


def test_what_is_asked_ahead_of_an_answer_waits_for_it(coordinator: InThread) -> None:
    [client] = coordinator.enrol(coordinator.create(), "a")
    begin = head(client, f"GET {client.path}/task?wait=0.3 HTTP/1.1")
    with connect(coordinator) as connection:
        connection.sendall(begin + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
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


def test_one_connection_too_many_ends_no_other(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator.get("/v1/federations")
    monkeypatch.setattr(connections, "most_connections", lambda: 3)
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
        federation, clients = enrolled(process, "a", "b", rounds=2)
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
    [(4096, 4096, 3696), (600, 600, 300), (resource.RLIM_INFINITY, open_files.ENOUGH_FILES, 65_136)],
)
def test_as_many_connections_as_files(monkeypatch: pytest.MonkeyPatch, hard: int, raised: int, connected: int) -> None:
    limits = [(256, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    open_files.raise_open_files()
    assert limits[-1] == (raised, hard)
    assert open_files.most_connections() == connected


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
    open_files.raise_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


# Bodies of JSON: a stranger's is not read, a slow one is not waited for, and no text in one breaks an answer.

ANNOUNCED = 30 << 20

HALF_A_PAIR = b"\\ud800"


def answer_to_a_beginning(coordinator: InThread, path: str, headers: dict[str, str], verb: str = "POST") -> str:
    """What comes back when of a long JSON body only the first bytes are sent."""
    host, port = coordinator.url.removeprefix("http://").split(":")
    given = headers | {"Host": host, "Content-Type": "application/json", "Content-Length": str(ANNOUNCED)}
    head = "\r\n".join([f"{verb} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())])
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n[[],")
        answer = b""
        while not answer.endswith(b"}"):
            more = connection.recv(4096)
            assert more, answer
            answer += more
        return answer.decode()


@pytest.mark.parametrize("token", [None, "nobody's", "\xff", "Basic"])
def test_a_stranger_s_body_is_not_waited_for(coordinator: InThread, token: str | None) -> None:
    federation = coordinator.create()
    headers = {} if token is None else {"Authorization": token if token == "Basic" else f"Bearer {token}"}
    for path in ("/v1/federations", f"/v1/federations/{federation}/clients", f"/v1/federations/{federation}/start"):
        answer = answer_to_a_beginning(coordinator, path, headers)
        assert answer.startswith("HTTP/1.1 401 "), answer


def test_no_right_guess_shows_after_too_many(coordinator_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "GUESSES", 1)
    coordinator = coordinator_with(auth_failures_per_minute=1)
    federation = coordinator.create()
    token = coordinator.token(federation)
    path = f"/v1/federations/{federation}/clients"
    assert answer_to_a_beginning(coordinator, path, bearer("wrong")).startswith("HTTP/1.1 401 ")
    for guess in ("wrong again", token):
        assert answer_to_a_beginning(coordinator, path, bearer(guess)).startswith("HTTP/1.1 429 "), guess


def test_a_body_that_does_not_arrive_is_given_up(coordinator_with: Make) -> None:
    patient = coordinator_with()
    federation, (a, _), (task, _) = open_first_phase(patient)
    path, token = f"/v1/federations/{federation}", patient.token(federation)
    patient.stop()
    coordinator = coordinator_with(upload_timeout_seconds=0.3)
    for verb, url, headers in (
        ("POST", f"{path}/clients", bearer(token)),
        ("POST", f"{path}/tasks/{task['task_id']}/failure", a.headers),
        ("POST", "/v1/federations", coordinator.operator),
    ):
        answer = answer_to_a_beginning(coordinator, url, headers, verb)
        assert answer.startswith("HTTP/1.1 408 "), answer
        assert "/upload-timeout" in answer
    coordinator.stop()
    a.http = coordinator_with().http
    assert a.answer(task).status_code == 201


def test_one_client_s_slow_uploads_keep_nobody_else_out(
    coordinator_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("promptfed.coordinator.http.uploads.SMALL", 0)  # these stand for large ones
    monkeypatch.setattr("promptfed.coordinator.http.uploads.BEHIND_SECONDS", PATIENCE)
    coordinator = coordinator_with(max_uploads=8, upload_wait_seconds=2 * PATIENCE, upload_timeout_seconds=2 * PATIENCE)
    federation, (a, b), (task_a, task_b) = open_first_phase(coordinator)
    uploads = coordinator.app.state.uploads
    body = update_body({"context": torch.ones(4, 8)}, task_a)
    url = f"/v1/federations/{federation}/tasks/{task_a['task_id']}/update"
    head = {**a.headers, "Host": "x", "Content-Digest": content_digest(body), "Content-Length": str(len(body))}
    lines = "\r\n".join([f"PUT {url} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())])
    host, port = coordinator.url.removeprefix("http://").split(":")
    with ExitStack() as open_:
        slow = [open_.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE)) for _ in range(8)]
        for connection in slow:
            connection.sendall(lines.encode() + b"\r\n\r\n" + body[:5])
        wait_for("all bodies", lambda: sum(places.bodies for places in uploads._by_client.values()) == 8)
        assert uploads._running == 2, "a quarter of the places"
        refused = a.send(task_a, body)
        assert (refused.status_code, kind(refused)) == (503, "too-many-uploads"), "and not everybody's waiting room"
        assert b.answer(task_b).status_code == 201, "it does not wait for the others, who do not end by themselves"
        for connection in slow:
            connection.sendall(body[5:])
        answers = sorted(connection.recv(12) for connection in slow)
    assert answers == [b"HTTP/1.1 200"] * 7 + [b"HTTP/1.1 201"], "twins wait for each other and are answered"
    wait_for("the end", lambda: (uploads._running, uploads._waiting_bytes, uploads._by_client) == (0, 0, {}))


def test_a_long_poll_may_outlast_the_time_for_a_body(coordinator_with: Make) -> None:
    patient = coordinator_with()
    [client] = patient.enrol(patient.create(), "a")
    patient.stop()
    client.http = coordinator_with(upload_timeout_seconds=0.2).http
    assert client.task(wait=0.6).status_code == 204


@pytest.mark.both_databases
def test_text_that_is_no_unicode_and_numbers_that_are_none_are_refused(coordinator: InThread) -> None:
    federation, (a, _), (task, _) = open_first_phase(coordinator)
    path, operator = f"/v1/federations/{federation}", coordinator.operator
    evaluation = b'{"splits": {"' + HALF_A_PAIR + b'": {"accuracy": 1, "num_samples": 1}}}'
    failure = b'{"type": "x", "detail": "y", "' + HALF_A_PAIR + b'": 1}'
    for verb, url, headers, content in (
        ("POST", "/v1/federations", operator, b'{"name": "' + HALF_A_PAIR + b'"}'),
        ("POST", "/v1/federations", operator, b'{"name": "x", "method": {"name": "promptfl", "m": NaN}}'),
        ("POST", "/v1/federations", operator, b'{"name": "x", "method": {"name": "promptfl"}, "seed": 1e400}'),
        ("POST", "/v1/federations", operator, b'{"' + HALF_A_PAIR + b'": 1}'),
        ("POST", f"{path}/enrolment-tokens", operator, b'{"' + HALF_A_PAIR + b'": 1}'),
        ("PUT", f"{path}/tasks/{task['task_id']}/evaluation", a.headers, evaluation),
        ("POST", f"{path}/tasks/{task['task_id']}/failure", a.headers, failure),
    ):
        sent = headers | {"Content-Type": "application/json"}
        refused = coordinator.http.request(verb, url, content=content, headers=sent)
        assert (refused.status_code, kind(refused)) in ((422, "invalid-spec"), (422, "invalid-request")), content
        assert refused.json()["errors"]
    assert len(coordinator.get(f"{federation}/clients")["clients"]) == 2
    assert a.answer(task).status_code == 201


@pytest.mark.both_databases
def test_any_text_may_be_the_page_before(coordinator: InThread) -> None:
    coordinator.enrol(coordinator.create(name="eyes"), "a")
    for after in ("%C2%B2", "%00", "%ED%A0%80", "x" * 100, "9" * 100, "-1"):
        for path in ("/v1/federations", "/v1/federations/eyes/clients", "/v1/federations/eyes/rounds"):
            answer = coordinator.http.get(f"{path}?after={after}", headers=coordinator.operator)
            assert answer.status_code in (200, 422), (after, answer.text)


@pytest.mark.both_databases
def test_any_text_may_be_an_id(coordinator: InThread) -> None:
    federation, (a, _), _ = open_first_phase(coordinator)
    path = f"/v1/federations/{federation}"
    for text in ("%00", "%ED%A0%80", "%2e%2e", "x" * 100):
        for url, headers in (
            (f"/v1/federations/{text}", coordinator.operator),
            (f"{path}/rounds/{text}", coordinator.operator),
            (f"{path}/tasks/{text}/payload", a.headers),
        ):
            assert coordinator.http.get(url, headers=headers).status_code in (404, 422), url
        url = f"{path}/clients/{text}"
        assert coordinator.http.delete(url, headers=coordinator.operator).status_code == 404, url


def test_sizes_that_no_backbone_has_are_refused(coordinator: InThread) -> None:
    federation = coordinator.create()
    client, token = coordinator.client(federation, "a"), coordinator.token(federation)
    good = {"d_t": 8, "d_e": 8, "d_v": 8}
    sizes = {"d_t": 10**12, "d_e": 100_000, "d_v": 32_769, "text_layers": 10**6, "context_length": 1 << 40}
    for name, size in sizes.items():
        refused = client.enrol(token, backbone_shape=good | {name: size})
        assert (refused.status_code, kind(refused)) == (422, "invalid-request"), size
        assert name in refused.json()["detail"]
    assert client.enrol(token, backbone_shape=good).status_code == 201


def test_many_class_names_are_looked_through_once() -> None:
    names = [f"class {number}" for number in range(100_000)]
    body: dict[str, Any] = enrolment("a", class_names=[*names[1:], names[1]])
    begin = time.process_time()
    with pytest.raises(ValueError, match="lists a class twice: class 1"):
        EnrolRequest.model_validate_json(json.dumps(body))
    assert time.process_time() - begin < 30, "every name compared with every other takes minutes"
    assert EnrolRequest(**enrolment("a")).class_names == CLASSES
    assert EnrolRequest(**enrolment("a")).secret == secret_of("a")


@pytest.mark.parametrize(
    ("body", "told"), [(b"[" * 100_000 + b"]" * 100_000, "nested too deeply"), (b'"\xff"', "no UTF-8")]
)
def test_json_that_no_reader_takes_is_a_problem_that_says_why(coordinator: InThread, body: bytes, told: str) -> None:
    sent = coordinator.operator | {"Content-Type": "application/json"}
    refused = coordinator.http.post("/v1/federations", content=body, headers=sent)
    assert (refused.status_code, kind(refused)) == (400, "unreadable-body")
    assert told in refused.json()["detail"]
