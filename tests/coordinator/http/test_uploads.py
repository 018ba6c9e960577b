"""Bodies of tensors, within limits of size, number and time, and their digests."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import httpx
import pytest
import torch

from promptfed.testing.clients import content_digest, update_body
from tests.support.coordinators import InThread, Make
from tests.support.open_phases import kind, open_first_phase, stored_rows
from tests.support.waiting import PATIENCE, wait_for

GOOD = {"context": torch.ones(4, 8)}


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


def test_a_body_that_is_announced_as_far_too_large_is_not_waited_for(coordinator: InThread) -> None:
    federation, (a, _), (task, _) = open_first_phase(coordinator, admission={"max_bytes": 2_000_000})
    before = stored_rows(coordinator.registry, federation)
    address = httpx.URL(f"{coordinator.url}{a.path}/tasks/{task['task_id']}/update")
    lines = [f"PUT {address.path} HTTP/1.1", f"Host: {address.host}", "Content-Length: 900000000"]
    lines += [f"{name}: {value}" for name, value in {**a.headers, "Content-Digest": content_digest(b"")}.items()]
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as caller:
        caller.sendall("\r\n".join([*lines, "", "only this much"]).encode())
        answer = caller.makefile("rb").readline()
    assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert stored_rows(coordinator.registry, federation) == before


@pytest.mark.door
@pytest.mark.parametrize(
    ("header_", "expected"),
    [
        (None, "digest-missing"),
        ("md5=:AAAA:", "digest-missing"),
        ("sha-256=:short:", "digest-missing"),
        ("sha-256=:" + "A" * 43 + "=:", "digest-mismatch"),
    ],
)
def test_the_content_digest_is_needed_and_checked(coordinator: InThread, header_: str | None, expected: str) -> None:
    federation, (a, _), (task, _) = open_first_phase(coordinator)
    headers = a.headers | ({"Content-Digest": header_} if header_ else {})
    url = f"/v1/federations/{federation}/tasks/{task['task_id']}/update"
    response = coordinator.http.put(url, content=update_body(GOOD, task), headers=headers)
    assert (response.status_code, kind(response)) == (400, expected)
    assert a.send(task, update_body(GOOD, task)).status_code == 201


def test_a_digest_may_stand_among_others(coordinator: InThread) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator)
    body = update_body(GOOD, task)
    response = a.send(task, body, **{"Content-Digest": f"sha-512=:AAAA:, {content_digest(body)}"})
    assert response.status_code == 201


@pytest.mark.door
def test_only_so_many_uploads_at_once(coordinator_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptfed.coordinator.http.uploads.SMALL", 0)  # these stand for large ones
    coordinator = coordinator_with(max_uploads=1, upload_wait_seconds=0.2)
    federation, (a, b), (task_a, task_b) = open_first_phase(coordinator)
    go_on = threading.Event()

    def slowly() -> Any:
        yield body[:10]
        go_on.wait(PATIENCE)
        yield body[10:]

    body = update_body(GOOD, task_a)
    url = f"/v1/federations/{federation}/tasks/{task_a['task_id']}/update"
    results: list[int] = []
    headers = a.headers | {"Content-Digest": content_digest(body)}

    def upload() -> None:
        results.append(coordinator.http.put(url, content=slowly(), headers=headers).status_code)

    slow = threading.Thread(target=upload)
    slow.start()
    wait_for("the upload", lambda: coordinator.app.state.uploads._running)
    refused = b.send(task_b, update_body(GOOD, task_b))
    assert (refused.status_code, kind(refused), refused.headers["retry-after"]) == (503, "too-many-uploads", "2")
    go_on.set()
    slow.join()
    assert results == [201]
    assert b.send(task_b, update_body(GOOD, task_b)).status_code == 201


def test_more_uploads_wait_their_turn_within_a_bound(coordinator_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = coordinator_with(max_uploads=1, upload_wait_seconds=PATIENCE)
    federation, clients, tasks = open_first_phase(coordinator, "a", "b", "c")
    bodies = [update_body(GOOD, task) for task in tasks]
    monkeypatch.setattr("promptfed.coordinator.http.uploads.WAITING_BYTES", len(bodies[0]))
    monkeypatch.setattr("promptfed.coordinator.http.uploads.SMALL", 0)
    monkeypatch.setattr("promptfed.coordinator.http.uploads.BEHIND_SECONDS", PATIENCE)
    uploads = coordinator.app.state.uploads
    go_on = threading.Event()
    found: dict[str, int] = {}

    def slowly() -> Any:
        go_on.wait(PATIENCE)
        yield bodies[0]

    def first() -> None:
        url = f"/v1/federations/{federation}/tasks/{tasks[0]['task_id']}/update"
        length = {"Content-Length": str(len(bodies[0]))}
        headers = clients[0].headers | length | {"Content-Digest": content_digest(bodies[0])}
        found["a"] = coordinator.http.put(url, content=slowly(), headers=headers).status_code

    def second() -> None:
        found["b"] = clients[1].send(tasks[1], bodies[1]).status_code

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    wait_for("the first", lambda: uploads._running == 1)
    threads[1].start()
    wait_for("the second", lambda: uploads._waiting_bytes > 0)
    refused = clients[2].send(tasks[2], bodies[2])
    assert (refused.status_code, kind(refused)) == (503, "too-many-uploads"), "nobody else may wait"
    assert found == {}
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == {"a": 201, "b": 201}
    assert (uploads._running, uploads._waiting_bytes) == (0, 0)
    assert clients[2].send(tasks[2], bodies[2]).status_code == 201


def test_an_upload_that_takes_too_long_or_is_cut_off_leaves_nothing(coordinator_with: Make) -> None:
    patient = coordinator_with()
    federation, (a, _), (task, _) = open_first_phase(patient)
    patient.stop()
    coordinator = coordinator_with(upload_timeout_seconds=0.3)
    body = update_body(GOOD, task)

    def stalling() -> Any:
        yield body[:10]
        time.sleep(1.0)
        yield body[10:]

    url = f"/v1/federations/{federation}/tasks/{task['task_id']}/update"
    headers = a.headers | {"Content-Digest": content_digest(body)}
    response = coordinator.http.put(url, content=stalling(), headers=headers)
    assert (response.status_code, kind(response)) == (408, "upload-timeout")
    assert list(coordinator.registry.blobs.incoming.iterdir()) == []
    coordinator.stop()
    a.http = coordinator_with().http
    assert a.send(task, body).status_code == 201
