"""Rounds of two phases with payloads per client: what PLAN and pFedPG need of the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from promptfed.shared.methods import METHODS
from promptfed.shared.methods.core.interface import Phase
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.testing.clients import DEADLINE, ScriptedClient, update_body
from tests.support.coordinators import InThread
from tests.support.two_phase import TwoPhase


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)


def federation_of(coordinator: InThread, *names: str, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    federation = coordinator.create(method={"name": "two_phase"}, **changes)
    raw = coordinator.get(federation)["spec"]["method"]
    assert raw == {"name": "two_phase", "label_space": "federation", "m": 4}
    clients = coordinator.enrol(federation, *names)
    coordinator.post(f"{federation}/start")
    return federation, clients


def state(coordinator: InThread, federation: str) -> Tensors:
    response = coordinator.http.get(f"/v1/federations/{federation}/prompts", headers=coordinator.operator)
    return decode(response.content)[0]


def test_each_client_gets_its_own_payload_and_no_other_s(coordinator: InThread) -> None:
    federation, clients = federation_of(coordinator, "b", "a")
    tasks = coordinator.training(clients)
    first = state(coordinator, federation)
    for client, task, row in zip(clients, tasks, (1, 0), strict=True):
        own = client.payload(task)
        assert list(own) == ["prompt"]
        assert torch.equal(own["prompt"], first["prompt"] + first["descriptors"][row].sum())
        assert client.payload(task)["prompt"].equal(own["prompt"])
    assert tasks[0]["payload"]["sha256"] != tasks[1]["payload"]["sha256"]
    assert clients[0].http.get(tasks[1]["payload"]["url"], headers=clients[0].headers).status_code == 404
    swapped = update_body({"prompt": torch.ones(4, 8)}, tasks[0], payload_sha256=tasks[1]["payload"]["sha256"])
    assert clients[0].send(tasks[0], swapped).json()["type"].endswith("/wrong-payload")


@pytest.mark.both_databases
def test_the_second_phase_brings_down_what_the_first_brought_up(
    coordinator: InThread, leap: Callable[[InThread, float], None]
) -> None:
    federation, clients = federation_of(coordinator, "a", "b", "c", rounds=1, participation={"quorum": 0.6})
    tasks = coordinator.training(clients)
    sent = {client.name: torch.full((4, 8), float(number)) for number, client in enumerate(clients, 1)}
    for client, task in list(zip(clients, tasks, strict=True))[:2]:
        assert client.send(task, update_body({"prompt": sent[client.name]}, task)).status_code == 201
    leap(coordinator, DEADLINE)
    second = [coordinator.task(client) for client in clients[:2]]
    assert [task["phase"] for task in second] == ["aggregators", "aggregators"]
    assert clients[2].task().status_code == 204, "it did not answer the first phase"
    down = clients[0].payload(second[0])
    assert torch.equal(down["answers"], torch.stack([sent["a"], sent["b"]]))
    for client, task in zip(clients[:2], second, strict=True):
        wrong = client.send(task, update_body({"prompt": sent[client.name]}, task))
        assert wrong.json()["type"].endswith("/unknown-tensor")
        assert client.send(task, update_body({"aggregator": torch.ones(8)}, task)).status_code == 201
    coordinator.task(clients[0])
    after = state(coordinator, federation)
    assert torch.equal(after["aggregator"], torch.ones(8))
    report = coordinator.get(f"{federation}/rounds/1")
    assert [phase["phase"] for phase in report["phases"]] == ["prompts", "aggregators"]
    assert report["state_hash"] == report["phases"][1]["state_hash"] != report["phases"][0]["state_hash"]


@pytest.mark.both_databases
def test_what_the_method_measures_stands_in_the_report(coordinator: InThread) -> None:
    federation, clients = federation_of(coordinator, "a", "b", rounds=1)
    for client, task in zip(clients, coordinator.training(clients), strict=True):
        client.answer(task)
    for client in clients:
        client.answer(coordinator.task(client))
    coordinator.task(clients[0])
    wanted = {
        name: float(row[0]) for name, row in zip("ab", state(coordinator, federation)["descriptors"], strict=True)
    }
    first, second = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert first["measured"] == {"phase": {}, "clients": {}}
    assert second["measured"]["phase"] == {"prompts": 2.0}
    assert {name: found["first"] for name, found in second["measured"]["clients"].items()} == pytest.approx(wanted)
    rows = coordinator.get(f"{federation}/metrics")["metrics"]
    found = {row["client"]: row["value"] for row in rows if row["phase"] == "aggregators" and row["name"] == "first"}
    assert found == pytest.approx(wanted)
    assert [row["value"] for row in rows if row["name"] == "prompts"] == [2.0]


def test_a_newcomer_gets_its_row_where_its_name_stands(coordinator: InThread) -> None:
    federation, clients = federation_of(coordinator, "a", "c", rounds=2)
    tasks = coordinator.training(clients)
    [late] = coordinator.enrol(federation, "b")
    everybody = [*clients, late]
    for client, task in zip(clients, tasks, strict=True):
        client.answer(task)
    for client in clients:
        client.answer(coordinator.task(client))
    before = state(coordinator, federation)
    for client in clients:
        client.answer(coordinator.task(client))
    tasks = [coordinator.task(client) for client in everybody]
    after = state(coordinator, federation)
    assert after["descriptors"].shape == (3, 2)
    assert torch.equal(after["descriptors"][[0, 2]], before["descriptors"])
    assert torch.equal(after["descriptors"][1], before["descriptors"].mean(dim=0))
    own = late.payload(tasks[2])["prompt"]
    assert torch.equal(own, after["prompt"] + after["descriptors"][1].sum())


def test_a_method_that_breaks_fails_the_federation_with_its_reason(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: TwoPhase, state: Tensors, *_: object) -> Tensors:
        return state | {"prompt": torch.full((4, 8), torch.nan)}

    federation, clients = federation_of(coordinator, "a", "b")
    tasks = coordinator.training(clients)
    monkeypatch.setattr(TwoPhase, "aggregate", broken)
    for client, task in zip(clients, tasks, strict=True):
        client.answer(task)
    found = coordinator.until(federation, state="failed")
    assert "NaN" in found["reason"]
    assert clients[0].task().status_code == 410


def test_a_payload_that_breaks_fails_the_federation(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TwoPhase, state: Tensors, phase: Phase | None, *_: object) -> Tensors:
        raise ValueError("no payload today")

    monkeypatch.setattr(TwoPhase, "payload", broken)
    federation, _ = federation_of(coordinator, "a", "b")
    assert coordinator.until(federation, state="failed")["reason"] == "ValueError: no payload today"
