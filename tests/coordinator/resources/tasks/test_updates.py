"""Admission of updates through the public door: each refusal, their order, and that a refusal changes nothing."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from promptfed.shared.tensors.torch_tensors import encode
from promptfed.testing.clients import DEADLINE, trained, update_body
from tests.support.coordinators import InThread
from tests.support.open_phases import kind, launched, open_first_phase, stored_rows
from tests.support.waiting import start_and_join

GOOD = {"context": torch.ones(4, 8)}


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


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


def test_an_answer_of_the_wrong_kind_is_refused(coordinator: InThread) -> None:
    federation, (a, _) = launched(coordinator, "a", "b")
    task = coordinator.task(a)
    assert kind(a.send(task, update_body(GOOD, task))) == "wrong-task-kind"
    [_, _], [task, _] = (clients := [a, coordinator.client(federation, "b")]), coordinator.training(clients)
    assert kind(a.evaluate(task)) == "wrong-task-kind"


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


@pytest.mark.both_databases
def test_two_senders_of_one_task_are_answered_one_after_the_other(coordinator: InThread) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator)
    bodies = [update_body({"context": torch.full((4, 8), float(number))}, task) for number in range(2)] * 3
    found: list[int] = []
    threads = [threading.Thread(target=lambda it=body: found.append(a.send(task, it).status_code)) for body in bodies]
    start_and_join(threads)
    assert sorted(found) == [200, 200, 201, 409, 409, 409]
