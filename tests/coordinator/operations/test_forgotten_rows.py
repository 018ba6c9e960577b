"""A withdrawn client's context reaches nobody any more, and leaves the state with its updates, as a replay shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode
from tests.support.coordinators import InThread
from tests.support.kill_campaign import MethodClient


def state_of(coordinator: InThread, federation: str) -> Tensors:
    shown = coordinator.http.get(f"/v1/federations/{federation}/prompts", headers=coordinator.operator)
    return decode(shown.content)[0]


def tasks(coordinator: InThread, clients: list[MethodClient], kind: str) -> list[dict[str, Any]]:
    """The open task of each client, once the coordinator has come so far."""
    found = [coordinator.task(client) for client in clients]
    assert {task["kind"] for task in found} == {kind}
    return found


def answered(coordinator: InThread, clients: list[MethodClient], kind: str) -> list[Tensors]:
    """The payloads of the open stage, which all have answered."""
    open_tasks = tasks(coordinator, clients, kind)
    payloads = [client.payload(task) for client, task in zip(clients, open_tasks, strict=True)]
    for client, task in zip(clients, open_tasks, strict=True):
        assert client.answer(task).status_code in (200, 201)
    return payloads


@pytest.mark.parametrize("method", ["pfedmoap", "promptfl_amp"])
def test_who_is_withdrawn_and_deleted_leaves_the_state(coordinator: InThread, method: str) -> None:
    federation = coordinator.create(method={"name": method, "m": 4}, rounds=3)
    token = coordinator.token(federation)
    clients = [MethodClient(coordinator.http, federation, name) for name in ("a", "b", "c")]
    for client in clients:
        assert client.enrol(token).status_code == 201
    staying = clients[:2]
    coordinator.post(f"{federation}/start")
    answered(coordinator, clients, "evaluate")
    answered(coordinator, clients, "train")
    tasks(coordinator, clients, "evaluate")
    before = state_of(coordinator, federation)
    assert before["answered"].tolist() == [1, 1, 1]
    gone = before["client_contexts"][2]
    coordinator.delete(f"{federation}/clients/c")
    answered(coordinator, staying, "evaluate")
    for payload in answered(coordinator, staying, "train"):
        rows = torch.cat([tensor.reshape(-1, *gone.shape) for tensor in payload.values()])
        assert not any(torch.equal(row, gone) for row in rows), "a withdrawn client's context goes to nobody"
        if method == "promptfl_amp":
            both = before["client_contexts"][:2]
            assert bool((rows >= both.amin(0) - 1e-6).all() and (rows <= both.amax(0) + 1e-6).all())
    tasks(coordinator, staying, "evaluate")
    coordinator.delete(f"{federation}/clients/c/updates")
    after = state_of(coordinator, federation)
    assert after["answered"].tolist() == [2, 2, 0]
    assert not after["client_contexts"][2].any()
    coordinator.delete(f"{federation}/clients/c/updates")
    answered(coordinator, staying, "evaluate")
    answered(coordinator, staying, "train")
    answered(coordinator, staying, "evaluate")
    coordinator.until(federation, state="finished")
    assert state_of(coordinator, federation)["answered"].tolist() == [3, 3, 0]
    states = coordinator.post(f"{federation}/rounds/2/replay", {}, status=200)["states"]
    states += coordinator.post(f"{federation}/rounds/3/replay", {}, status=200)["states"]
    assert [(one["origin"], one["same"]) for one in states] == [("train", True), ("forget", True), ("train", True)]
