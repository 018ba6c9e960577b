"""FaST-PT at the coordinator: whom it takes and when it says no, late domains, and the last phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

from promptfed.shared.methods import METHODS
from promptfed.shared.methods.core.interface import Phase
from promptfed.shared.methods.fast_pt.domains import domain_key
from promptfed.shared.tensors import Tensors
from promptfed.testing.clients import DEADLINE, ScriptedClient, update_body
from tests.support.coordinators import InThread
from tests.support.open_phases import answer_all, answer_next, metrics, prompts, refusal
from tests.support.two_phase import TwoPhase

UP = ("global_prompt", "classifier_weight", "classifier_bias")


WORDS = {"a": "a sketch of a {}", "b": "a neon sign of a {}", "c": "a chalk drawing of a {}"}


STYLE = {"a": "sketch", "b": "neon", "c": "chalk"}


def domain(name: str, description: str | None = None) -> dict[str, str]:
    return {"name": STYLE.get(name, name), "description": description or WORDS[name]}


def federation_of(coordinator: InThread, **changes: Any) -> str:
    method = {"name": "fast_pt", "m": 4} | changes.pop("method", {})
    return coordinator.create(method=method, **changes)


def enrol(coordinator: InThread, federation: str, *names: str) -> list[ScriptedClient]:
    return [client for name in names for client in coordinator.enrol(federation, name, domain=domain(name))]


def keys(*names: str) -> list[int]:
    return [domain_key(WORDS[name]) for name in names]


def trained(tensors: Tensors, by: float) -> Tensors:
    return {name: tensors[name] + by for name in UP}


def answer(client: ScriptedClient, task: dict[str, Any], by: float = 1.0) -> httpx.Response:
    """A training task: every tensor grows by ``by``; a domain prompt is full of it."""
    if task["phase"] == "domain_prompts":
        return client.send(task, update_body({"domain_prompt": torch.full((4, 8), by)}, task))
    return client.send(task, update_body(trained(client.payload(task), by), task))


def test_clients_without_a_domain_of_their_own_are_refused_at_enrolment(coordinator: InThread) -> None:
    federation = federation_of(coordinator)
    token = coordinator.token(federation)
    text = "fast_pt needs each trainer's domain with its description"
    assert refusal(coordinator.client(federation, "a").enrol(token)) == (422, "domain-missing", text)
    enrol(coordinator, federation, "a")
    again = coordinator.client(federation, "b").enrol(token, domain=domain("b", "A sketch of a {}."))
    assert refusal(again)[:2] == (409, "unfit-client")
    assert "'a' describes its domain as 'A sketch of a {}.' too" in refusal(again)[2]
    assert "method.merge_domains" in refusal(again)[2]
    nothing = coordinator.client(federation, "b").enrol(token, domain=domain("b", "{}"))
    assert "says nothing" in refusal(nothing)[2]
    coordinator.enrol(federation, "unseen", role="evaluator", domain=domain("a"))
    coordinator.enrol(federation, "unknown", role="evaluator")
    assert coordinator.get(federation)["clients"] == {"trainers": 1, "evaluators": 2, "withdrawn": 0}


def test_one_domain_does_not_start(coordinator: InThread) -> None:
    federation = federation_of(coordinator, method={"merge_domains": True})
    enrol(coordinator, federation, "a")
    coordinator.enrol(federation, "twin", domain=domain("a"))
    response = coordinator.http.post(f"/v1/federations/{federation}/start", headers=coordinator.operator)
    told = "all trainers are of one domain, 'a sketch of a {}': fast_pt needs a trainer of another domain"
    assert refusal(response) == (409, "cannot-start", told)
    enrol(coordinator, federation, "b")
    coordinator.post(f"{federation}/start")
    assert prompts(coordinator, federation)["domains"].tolist() == keys("b", "a")


# Rounds of two phases with payloads per client: what PLAN and pFedPG need of the coordinator.


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)


def two_phase_federation(coordinator: InThread, *names: str, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    federation = coordinator.create(method={"name": "two_phase", "m": 4}, **changes)
    raw = coordinator.get(federation)["spec"]["method"]
    assert raw == {"name": "two_phase", "label_space": "federation", "m": 4}
    clients = coordinator.enrol(federation, *names)
    coordinator.post(f"{federation}/start")
    return federation, clients


def test_phase_two_gets_what_phase_one_brought(coordinator: InThread, leap: Callable[[InThread, float], None]) -> None:
    federation, clients = two_phase_federation(coordinator, "a", "b", "c", rounds=1, participation={"quorum": 0.6})
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
    after = prompts(coordinator, federation)
    assert torch.equal(after["aggregator"], torch.ones(8))
    report = coordinator.get(f"{federation}/rounds/1")
    assert [phase["phase"] for phase in report["phases"]] == ["prompts", "aggregators"]
    assert report["state_hash"] == report["phases"][1]["state_hash"] != report["phases"][0]["state_hash"]


def test_what_the_method_measures_stands_in_the_report(coordinator: InThread) -> None:
    federation, clients = two_phase_federation(coordinator, "a", "b", rounds=1)
    answer_all(clients, coordinator.training(clients))
    answer_next(coordinator, clients)
    coordinator.task(clients[0])
    rows = prompts(coordinator, federation)["descriptors"]
    wanted = {name: float(row[0]) for name, row in zip("ab", rows, strict=True)}
    first, second = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert first["measured"] == {"phase": {}, "clients": {}}
    assert second["measured"]["phase"] == {"prompts": 2.0}
    assert {name: found["first"] for name, found in second["measured"]["clients"].items()} == pytest.approx(wanted)
    rows = metrics(coordinator, federation)
    found = {row["client"]: row["value"] for row in rows if row["phase"] == "aggregators" and row["name"] == "first"}
    assert found == pytest.approx(wanted)
    assert [row["value"] for row in rows if row["name"] == "prompts"] == [2.0]


def test_a_method_that_breaks_fails_its_federation(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TwoPhase, state: Tensors, *_: object) -> Tensors:
        return state | {"prompt": torch.full((4, 8), torch.nan)}

    federation, clients = two_phase_federation(coordinator, "a", "b")
    tasks = coordinator.training(clients)
    monkeypatch.setattr(TwoPhase, "aggregate", broken)
    answer_all(clients, tasks)
    found = coordinator.until(federation, state="failed")
    assert "NaN" in found["reason"]
    assert clients[0].task().status_code == 410


def test_a_payload_that_breaks_fails_the_federation(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TwoPhase, state: Tensors, phase: Phase | None, *_: object) -> Tensors:
        raise ValueError("no payload today")

    monkeypatch.setattr(TwoPhase, "payload", broken)
    federation, _ = two_phase_federation(coordinator, "a", "b")
    assert coordinator.until(federation, state="failed")["reason"] == "ValueError: no payload today"
