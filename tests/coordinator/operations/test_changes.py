"""What a client has changed is judged, not what it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from promptfed.coordinator.aggregation.rows import change_norm, far_off
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import encode
from promptfed.testing.clients import ScriptedClient, content_digest, update_body
from tests.support.coordinators import InThread


def test_a_change_is_what_differs_from_the_payload() -> None:
    payload = {"a": torch.full((3, 4), 100.0), "b": torch.zeros(2)}
    update = {"a": torch.full((3, 4), 101.0), "new": torch.full((4,), 2.0)}
    assert change_norm(update, payload) == pytest.approx((12 * 1.0 + 4 * 4.0) ** 0.5)
    assert change_norm(dict(payload), payload) == 0
    assert change_norm({"b": torch.ones(3)}, payload) == pytest.approx(3**0.5), "of another shape: as it is"


def test_far_off_is_over_ten_times_the_median() -> None:
    assert far_off({"a": 1.0, "b": 1.1, "c": 11.5}) == {"c": pytest.approx(11.5 / 1.1)}
    assert far_off({"a": 1.0, "b": 1.1, "c": 10.9}) == {}
    assert far_off({"a": 1.0, "b": 1000.0}) == {}, "of two, nobody can say which"
    assert far_off({"a": 0.0, "b": 0.0, "c": 1.0}) == {}


def send(client: ScriptedClient, task: dict[str, Any], tensors: Tensors) -> int:
    body = update_body(tensors, task)
    path = f"{client.path}/tasks/{task['task_id']}/update"
    headers = client.headers | {"Content-Digest": content_digest(body)}
    return client.http.put(path, content=body, headers=headers).status_code


def started(
    coordinator: InThread, size: float, **changes: Any
) -> tuple[str, list[ScriptedClient], list[dict[str, Any]]]:
    """A federation of three that starts from a context of this size."""
    federation = coordinator.create(rounds=1, **changes)
    clients = coordinator.enrol(federation, "a", "b", "c")
    state = encode({"context": torch.full((4, 8), size)})
    put = coordinator.http.put(
        f"/v1/federations/{federation}/initial-state", content=state, headers=coordinator.operator
    )
    assert put.status_code == 200, put.text
    coordinator.post(f"{federation}/start")
    return federation, clients, coordinator.training(clients)


def test_what_was_given_counts_for_nobody(coordinator: InThread) -> None:
    """The prompts have a norm of 5,657; the limit is one of changes."""
    federation, clients, tasks = started(coordinator, 1000.0, admission={"max_update_norm": 10})
    for client, task in zip(clients[:2], tasks, strict=False):
        assert send(client, task, {"context": client.payload(task)["context"] + 1.0}) == 201
    far = {"context": clients[2].payload(tasks[2])["context"] + 2.0}
    assert send(clients[2], tasks[2], far) == 422
    refusal = coordinator.get(f"{federation}/clients")["clients"][2]["last_refusal"]
    assert (refusal["type"], "is 11.3137; 10 is allowed" in refusal["detail"]) == ("norm-too-large", True)


def test_a_change_far_over_the_others_is_told(coordinator: InThread) -> None:
    federation, clients, tasks = started(coordinator, 1.0)
    for client, task, step in zip(clients, tasks, (0.1, 0.2, 5.0), strict=True):
        assert send(client, task, {"context": client.payload(task)["context"] + step}) == 201
    for client in clients:
        client.evaluate(coordinator.task(client))
    coordinator.until(federation, state="finished")
    report = coordinator.get(f"{federation}/rounds/1")
    updates = {one["client"]: one for one in report["phases"][0]["updates"]}
    assert {name: one["far"] for name, one in updates.items()} == {
        "a": None,
        "b": None,
        "c": pytest.approx(25, rel=1e-4),
    }
    assert updates["c"]["change"] == pytest.approx(5 * 32**0.5, rel=1e-5)
    assert report["phases"][0]["measured"] == {"phase": {}, "clients": {}}


def test_without_a_limit_in_the_spec_the_method_s_is_taken(coordinator: InThread) -> None:
    """promptfl allows a root mean square of 10: a norm of 56.6 for the 32 numbers of this context."""
    federation, clients, tasks = started(coordinator, 1000.0)
    assert send(clients[0], tasks[0], {"context": clients[0].payload(tasks[0])["context"] + 9.9}) == 201
    assert send(clients[1], tasks[1], {"context": clients[1].payload(tasks[1])["context"] + 10.1}) == 422
    refusal = coordinator.get(f"{federation}/clients")["clients"][1]["last_refusal"]
    assert refusal["type"] == "norm-too-large"
    assert "the change's norm is 57.1341; 56.5685 is allowed (promptfl's limit for 32 numbers)" in refusal["detail"]
    assert "admission.max_update_norm" in refusal["detail"], "it says what to do"
