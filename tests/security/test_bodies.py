"""Bodies of JSON: a stranger's is not read, a slow one is not waited for, and no text in one breaks an answer."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from promptfed.coordinator.http import callers
from promptfed.shared.messages import EnrolRequest
from promptfed.testing.clients import CLASSES, bearer, content_digest, enrolment, secret_of, update_body
from tests.support.coordinators import InThread
from tests.support.open_phases import kind, open_first_phase
from tests.support.waiting import PATIENCE, wait_for

ANNOUNCED = 30 << 20
HALF_A_PAIR = b"\\ud800"


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


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


def test_whoever_has_guessed_too_often_cannot_tell_a_right_guess_by_its_body(
    coordinator_with: Callable[..., InThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "GUESSES", 1)
    coordinator = coordinator_with(auth_failures_per_minute=1)
    federation = coordinator.create()
    token = coordinator.token(federation)
    path = f"/v1/federations/{federation}/clients"
    assert answer_to_a_beginning(coordinator, path, bearer("wrong")).startswith("HTTP/1.1 401 ")
    for guess in ("wrong again", token):
        assert answer_to_a_beginning(coordinator, path, bearer(guess)).startswith("HTTP/1.1 429 "), guess


def test_a_body_that_does_not_arrive_is_given_up(coordinator_with: Callable[..., InThread]) -> None:
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


def test_one_client_s_slow_uploads_keep_nobody_else_out(coordinator_with: Callable[..., InThread]) -> None:
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


def test_a_long_poll_may_outlast_the_time_for_a_body(coordinator_with: Callable[..., InThread]) -> None:
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


@pytest.mark.parametrize("after", ["%C2%B2", "%00", "%ED%A0%80", "x" * 100, "9" * 100, "-1"])
@pytest.mark.both_databases
def test_any_text_may_be_the_page_before(coordinator: InThread, after: str) -> None:
    coordinator.enrol(coordinator.create(name="eyes"), "a")
    for path in ("/v1/federations", "/v1/federations/eyes/clients", "/v1/federations/eyes/rounds"):
        answer = coordinator.http.get(f"{path}?after={after}", headers=coordinator.operator)
        assert answer.status_code in (200, 422), answer.text


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
    for size in (
        {"d_t": 10**12},
        {"d_e": 100_000},
        {"d_v": 32_769},
        {"text_layers": 10**6},
        {"context_length": 1 << 40},
    ):
        refused = client.enrol(token, backbone_shape=good | size)
        assert (refused.status_code, kind(refused)) == (422, "invalid-request"), size
        assert next(iter(size)) in refused.json()["detail"]
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
