"""Admission of updates through the public door: each refusal, their order, and that a refusal changes nothing."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

from promptfed.shared.privacy.accounting import Event, epsilon_of, training_event
from promptfed.shared.tensors.torch_tensors import encode
from promptfed.testing.clients import DEADLINE, content_digest, trained, update_body
from tests.support.coordinators import InThread, Make
from tests.support.open_phases import kind, launched, open_first_phase, stored_rows
from tests.support.waiting import PATIENCE, start_and_join, wait_for

GOOD = {"context": torch.ones(4, 8)}


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


@pytest.mark.door
@pytest.mark.both_databases
def test_an_update_is_stored_once_and_answered_alike_for_ever(coordinator: InThread) -> None:
    federation, (a, b), (task_a, task_b) = open_first_phase(coordinator, rounds=1)
    body = update_body(trained(a.payload(task_a), "a", task_a), task_a)
    first = a.send(task_a, body)
    assert (first.status_code, first.json()["status"]) == (201, "accepted")
    assert a.send(task_a, body).status_code == 200
    other = a.send(task_a, update_body(GOOD, task_a))
    assert (other.status_code, kind(other)) == (409, "already-answered")
    assert b.answer(task_b).status_code == 201
    coordinator.task(a)
    again = a.send(task_a, body)
    assert (again.status_code, again.json()) == (200, first.json()), "also after the phase was closed"
    assert kind(a.send(task_a, update_body(GOOD, task_a))) == "already-answered"
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert phase["counted"][0]["sha256"] == first.json()["sha256"]


def test_an_update_for_a_closed_phase(coordinator: InThread, leap: Callable[[InThread, float], None]) -> None:
    federation, (a, b), (task_a, task_b) = open_first_phase(coordinator, participation={"quorum": 0.5}, rounds=1)
    a.answer(task_a)
    leap(coordinator, DEADLINE)
    coordinator.until(federation, phase="evaluation")
    late = b.answer(task_b)
    assert (late.status_code, kind(late)) == (409, "phase-closed")
    assert (late.json()["round"], late.json()["phase"]) == (1, "evaluation")
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert ([one["client"] for one in phase["counted"]], phase["expired"]) == (["a"], ["b"])


def bad_updates(task: dict[str, Any]) -> dict[str, tuple[bytes, int, str]]:
    """Bodies that must be refused, each with its status and kind."""
    good = update_body(GOOD, task)

    def with_metadata(**given: str) -> bytes:
        (length,) = struct.unpack("<Q", good[:8])
        text = json.dumps(json.loads(good[8 : 8 + length]) | {"__metadata__": given}).encode()
        return struct.pack("<Q", len(text)) + text + good[8 + length :]

    long, other = {"context": torch.full((4, 8), 3.0)}, "sha256:" + "0" * 64
    about = {"task_id": task["task_id"], "payload_sha256": task["payload"]["sha256"], "metrics": {}}
    infinite = torch.ones(4, 8)
    infinite[1, 2] = torch.inf
    return {
        "empty": (b"", 415, "not-safetensors"),
        "garbage": (b"\x80\x04garbage" * 20, 415, "not-safetensors"),
        "truncated": (good[:-1], 415, "not-safetensors"),
        "longer": (good + b"\0", 415, "not-safetensors"),
        "header over 1 MB": (with_metadata(promptfed="x" * 1_000_001), 422, "header-too-large"),
        "no metadata": (encode(GOOD), 422, "bad-metadata"),
        "metadata is no JSON": (with_metadata(promptfed="{"), 422, "bad-metadata"),
        "another metadata key": (with_metadata(promptfed="{}", x="y"), 422, "bad-metadata"),
        "unknown metadata": (encode(GOOD, about | {"weight": 5}), 422, "bad-metadata"),
        "no payload digest": (encode(GOOD, {"task_id": task["task_id"], "metrics": {}}), 422, "bad-metadata"),
        "metrics of text": (encode(GOOD, about | {"metrics": {"loss": "low"}}), 422, "bad-metadata"),
        "extra tensor": (update_body(GOOD | {"more": torch.ones(1)}, task), 422, "unknown-tensor"),
        "missing tensor": (update_body({}, task), 422, "missing-tensor"),
        "shape": (update_body({"context": torch.ones(8, 4)}, task), 422, "wrong-shape"),
        "dtype": (update_body({"context": torch.ones(4, 8, dtype=torch.float16)}, task), 422, "wrong-dtype"),
        "shape before dtype": (update_body({"context": torch.ones(8, 4).half()}, task), 422, "wrong-shape"),
        "NaN": (update_body({"context": torch.full((4, 8), torch.nan)}, task), 422, "not-finite"),
        "infinity": (update_body({"context": infinite}, task), 422, "not-finite"),
        "norm": (update_body(long, task), 422, "norm-too-large"),
        "another task": (update_body(GOOD, task, task_id="0" * 32), 422, "wrong-task"),
        "another payload": (update_body(GOOD, task, payload_sha256=other), 422, "wrong-payload"),
        "norm before payload": (update_body(long, task, payload_sha256=other), 422, "norm-too-large"),
        "too large": (b"\0" * 2_000_001, 413, "too-large"),
    }


@pytest.mark.door
@pytest.mark.both_databases
def test_bad_updates_are_refused_each_with_its_own_kind_and_change_nothing(coordinator: InThread) -> None:
    limits = {"max_update_norm": 10.0, "max_bytes": 2_000_000}
    federation, (a, _), (task, _) = open_first_phase(coordinator, admission=limits)
    before = stored_rows(coordinator.registry, federation)
    bad = bad_updates(task)
    for name, (body, status, expected) in bad.items():
        response = a.send(task, body)
        assert (response.status_code, kind(response)) == (status, expected), (name, response.text)
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["status"] == status
    assert stored_rows(coordinator.registry, federation) == before
    assert list(coordinator.registry.blobs.incoming.iterdir()) == []
    view = coordinator.get(f"{federation}/clients")["clients"][0]
    assert (view["name"], view["refusals"]) == ("a", len(bad))
    assert (view["last_refusal"]["type"], view["last_refusal"]["status"]) == ("too-large", 413)
    assert a.send(task, update_body(GOOD, task)).status_code == 201, "the task is still open"


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
def test_an_answer_of_the_wrong_kind_is_refused(coordinator: InThread) -> None:
    federation, (a, _) = launched(coordinator, "a", "b")
    task = coordinator.task(a)
    assert kind(a.send(task, update_body(GOOD, task))) == "wrong-task-kind"
    [_, _], [task, _] = (clients := [a, coordinator.client(federation, "b")]), coordinator.training(clients)
    assert kind(a.evaluate(task)) == "wrong-task-kind"


@pytest.mark.both_databases
def test_an_evaluation_is_stored_once(coordinator: InThread) -> None:
    federation, (a, _) = launched(coordinator, "a", "b")
    task = coordinator.task(a)
    assert [a.evaluate(task).status_code, a.evaluate(task).status_code] == [201, 200]
    assert kind(a.evaluate(task, accuracy=0.9)) == "already-answered"
    url = f"/v1/federations/{federation}/tasks/{task['task_id']}/evaluation"
    for accuracy in (1.5, -0.1, "NaN"):
        body = {"splits": {"test": {"accuracy": accuracy, "num_samples": 3}}}
        response = coordinator.http.put(url, json=body, headers=a.headers)
        assert (response.status_code, kind(response)) == (422, "invalid-request")


@pytest.mark.both_databases
def test_a_reported_failure_is_not_waited_for(coordinator: InThread) -> None:
    federation, (a, b), (task_a, task_b) = open_first_phase(coordinator, participation={"quorum": 0.5}, rounds=1)
    assert [a.fail(task_a).status_code, a.fail(task_a).status_code] == [200, 200]
    assert kind(a.send(task_a, update_body(GOOD, task_a))) == "phase-closed"
    b.answer(task_b)
    assert kind(b.fail(task_b)) == "already-answered"
    coordinator.until(federation, phase="evaluation")
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert phase["failed"] == [{"client": "a", "type": "out-of-memory", "detail": "no room"}]


def test_a_withdrawn_client_is_refused_and_its_task_cancelled(coordinator: InThread) -> None:
    federation, (a, b, c), tasks = open_first_phase(coordinator, "a", "b", "c", rounds=1)
    a.answer(tasks[0])
    c.answer(tasks[2])
    ids = {one["name"]: one["client_id"] for one in coordinator.get(f"{federation}/clients")["clients"]}
    coordinator.delete(f"{federation}/clients/{ids['c']}?discard=true")
    coordinator.delete(f"{federation}/clients/{ids['b']}")
    for response in (b.task(), b.send(tasks[1], b""), b.evaluate(tasks[1]), c.task()):
        assert (response.status_code, kind(response)) == (403, "withdrawn")
    coordinator.until(federation, phase="evaluation")  # min_clients gates the start alone: a is all that are left
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    verdicts = {one["client"]: one["verdict"] for one in phase["updates"]}
    assert verdicts == {"a": "counted", "c": "discarded"}
    assert phase["withdrawn"] == ["b", "c"]


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


@pytest.mark.both_databases
def test_two_senders_of_one_task_are_answered_one_after_the_other(coordinator: InThread) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator)
    bodies = [update_body({"context": torch.full((4, 8), float(number))}, task) for number in range(2)] * 3
    found: list[int] = []
    threads = [threading.Thread(target=lambda it=body: found.append(a.send(task, it).status_code)) for body in bodies]
    start_and_join(threads)
    assert sorted(found) == [200, 200, 201, 409, 409, 409]


SAMPLE = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}


@pytest.mark.door
def test_updates_of_a_protected_federation_cost_what_the_terms_give(coordinator: InThread) -> None:
    federation, (a, _), (task, _) = open_first_phase(coordinator, privacy=SAMPLE, training={"epochs": 1})
    assert task["config"]["privacy"]["noise_multiplier"] == 1.0
    count = coordinator.get(f"{federation}/clients")["clients"][0]["num_samples"]
    right = training_event(count, 32, 1, 1.0).as_json()
    about = {"task_id": task["task_id"], "payload_sha256": task["payload"]["sha256"], "metrics": {}}
    spent = {"epsilon": 3.5, "delta": 1e-3, "noise": "secret"}
    bad = {
        "privacy-missing": about,
        "privacy-mismatch": about | {"privacy": spent | {"events": [right | {"z": 0.5}]}},
        "bad-metadata": about | {"privacy": spent | {"events": []}},
    }
    for expected, metadata in bad.items():
        refused = a.send(task, encode(GOOD, metadata))
        assert (refused.status_code, kind(refused)) == (422, expected), refused.text
    for wrong in (right | {"count": right["count"] + 1}, right | {"q": right["q"] / 2}):
        refused = a.send(task, encode(GOOD, about | {"privacy": spent | {"events": [wrong]}}))
        assert kind(refused) == "privacy-mismatch"
    alone = epsilon_of([Event(**right)], 1e-3)
    for false in ({"epsilon": 0.98 * alone}, {"epsilon": 0}, {"delta": 0.5}, {"delta": 1e-11}):
        refused = a.send(task, encode(GOOD, about | {"privacy": spent | false | {"events": [right]}}))
        assert kind(refused) == "privacy-mismatch", "a ledger holds what this update costs, at a small δ"
    for beyond in ({"epsilon": 1001}, {"epsilon": 1e308}, {"epsilon_replace_one": 1e10}):
        refused = a.send(task, encode(GOOD, about | {"privacy": spent | beyond | {"events": [right]}}))
        assert kind(refused) == "bad-metadata"
    assert a.send(task, encode(GOOD, about | {"privacy": spent | {"events": [right]}})).status_code == 201


@pytest.mark.door
def test_an_unprotected_federation_takes_no_update_that_says_what_it_cost(coordinator: InThread) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator)
    assert "privacy" not in task["config"]
    about = {"task_id": task["task_id"], "payload_sha256": task["payload"]["sha256"], "metrics": {}}
    event = {"mechanism": "gaussian", "q": 1.0, "z": 1.0, "count": 1}
    spent = {"epsilon": 1.5, "delta": 1e-3, "noise": "secret", "events": [event]}
    assert kind(a.send(task, encode(GOOD, about | {"privacy": spent}))) == "privacy-mismatch"
