"""FaST-PT at the coordinator: whom it takes and when it says no, late domains, and the last phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import torch

from promptfed.shared.methods.fast_pt.domains import domain_key
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode
from promptfed.testing.clients import DEADLINE, ScriptedClient, update_body
from tests.support.coordinators import InThread
from tests.support.waiting import PATIENCE

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


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    return response.status_code, response.json()["type"].rsplit("/", 1)[-1], response.json()["detail"]


def state(coordinator: InThread, federation: str) -> Tensors:
    response = coordinator.http.get(f"/v1/federations/{federation}/prompts", headers=coordinator.operator)
    return decode(response.content)[0]


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
    assert refusal(response) == (
        409,
        "cannot-start",
        "all trainers are of one domain, 'a sketch of a {}': fast_pt needs a trainer of another domain",
    )
    enrol(coordinator, federation, "b")
    coordinator.post(f"{federation}/start")
    assert state(coordinator, federation)["domains"].tolist() == keys("b", "a")


def test_merged_clients_make_one_prompt_of_their_domain(coordinator: InThread) -> None:
    federation = federation_of(coordinator, method={"merge_domains": True}, rounds=1)
    clients = enrol(coordinator, federation, "a", "b")
    clients += coordinator.enrol(federation, "twin", domain=domain("a"), num_samples=30)
    coordinator.post(f"{federation}/start")
    for client, task in zip(clients, coordinator.training(clients), strict=True):
        assert answer(client, task).status_code == 201
    for by, client in enumerate(clients):
        assert answer(client, coordinator.task(client), float(by)).status_code == 201
    coordinator.task(clients[0])
    found = state(coordinator, federation)
    assert found["listed_domains"].tolist() == keys("b", "a")
    assert torch.equal(found["domain_prompts"][0], torch.ones(4, 8))
    assert torch.allclose(found["domain_prompts"][1], torch.full((4, 8), (10 * 0.0 + 30 * 2.0) / 40))


def test_a_late_domain_gets_its_row_when_a_round_opens(coordinator: InThread) -> None:
    federation = federation_of(coordinator, rounds=2)
    clients = enrol(coordinator, federation, "a", "b")
    coordinator.post(f"{federation}/start")
    tasks = coordinator.training(clients)
    [late] = enrol(coordinator, federation, "c")
    for client, task in zip(clients, tasks, strict=True):
        assert client.payload(task)["classifier_weight"].shape == (2, 8)
        assert answer(client, task).status_code == 201
    for client in clients:
        client.evaluate(coordinator.task(client))
    everybody = [*clients, late]
    tasks = [coordinator.task(client) for client in everybody]
    assert [peer["name"] for peer in tasks[0]["config"]["peers"]] == ["a", "b", "c"]
    down = late.payload(tasks[2])
    assert down["domains"].tolist() == keys("b", "a", "c"), "appended, though chalk comes first by name"
    assert down["classifier_weight"].tolist() == [[1.0] * 8, [1.0] * 8, [0.0] * 8]
    assert down["classifier_bias"].tolist() == [1.0, 1.0, 0.0]
    for client, task in zip(everybody, tasks, strict=True):
        assert answer(client, task).status_code == 201
    for by, client in enumerate(everybody):
        assert answer(client, coordinator.task(client), float(by)).status_code == 201
    task = coordinator.task(late)
    assert task["kind"] == "evaluate"
    final = late.payload(task)
    assert final["listed_domains"].tolist() == keys("b", "a", "c")
    assert final["domain_prompts"][:, 0, 0].tolist() == [1.0, 0.0, 2.0]


def test_a_domain_waits_for_the_next_round_while_a_phase_is_extended(
    coordinator: InThread, leap: Callable[[InThread, float], None]
) -> None:
    federation = federation_of(coordinator, rounds=2)
    clients = enrol(coordinator, federation, "a", "b")
    coordinator.post(f"{federation}/start")
    tasks = coordinator.training(clients)
    assert answer(clients[0], tasks[0]).status_code == 201
    [late] = enrol(coordinator, federation, "c")
    leap(coordinator, DEADLINE)
    end = time.monotonic() + PATIENCE
    while not coordinator.get(federation)["stage"]["extended"]:
        assert time.monotonic() < end, "the phase is not extended"
    assert coordinator.get(federation)["asked"] == ["a", "b"]
    assert answer(clients[1], tasks[1]).status_code == 201, "its classifier has the rows that it was given"
    for client in clients:
        client.evaluate(coordinator.task(client))
    assert late.payload(coordinator.task(late))["domains"].tolist() == keys("b", "a", "c")
    assert coordinator.get(federation)["state"] == "running"


def test_every_trainer_is_asked_for_its_prompt_and_a_silent_one_is_left_out(
    coordinator: InThread, leap: Callable[[InThread, float], None]
) -> None:
    federation = federation_of(coordinator, rounds=1, participation={"fraction": 0.6, "quorum": 0.5})
    clients = enrol(coordinator, federation, "a", "b", "c")
    coordinator.post(f"{federation}/start")
    for client in clients:
        client.evaluate(coordinator.task(client))
    coordinator.until(federation, phase="global")
    asked = coordinator.get(federation)["asked"]
    assert len(asked) == 2
    for client in clients:
        if client.name in asked:
            assert answer(client, coordinator.task(client)).status_code == 201
    coordinator.until(federation, phase="domain_prompts")
    assert coordinator.get(federation)["asked"] == ["a", "b", "c"], "those who were not sampled have one too"
    for client in clients[:2]:
        task = coordinator.task(client)
        assert set(client.payload(task)) == {"global_prompt"}
        assert answer(client, task).status_code == 201
    leap(coordinator, DEADLINE)
    task = coordinator.task(clients[0])
    final = clients[0].payload(task)
    assert final["listed_domains"].tolist() == keys("b", "a")
    assert final["domains"].tolist() == keys("c", "b", "a")


def test_a_start_of_words_gets_its_rows_at_the_start(coordinator: InThread) -> None:
    federation = federation_of(coordinator, method={"context_init": "a photo of a"})
    none: Tensors = {
        "global_prompt": torch.ones(4, 8),
        "classifier_weight": torch.zeros(0, 8),
        "classifier_bias": torch.zeros(0),
        "domains": torch.zeros(0, dtype=torch.int64),
        "domain_prompts": torch.zeros(0, 4, 8),
        "listed_domains": torch.zeros(0, dtype=torch.int64),
    }
    path = f"/v1/federations/{federation}/initial-state"
    assert coordinator.http.put(path, content=encode(none), headers=coordinator.operator).is_success
    clients = enrol(coordinator, federation, "a", "b")
    coordinator.post(f"{federation}/start")
    down = clients[0].payload(coordinator.task(clients[0]))
    assert torch.equal(down["global_prompt"], torch.ones(4, 8))
    assert down["domains"].tolist() == keys("b", "a")
    assert torch.equal(down["classifier_weight"], torch.zeros(2, 8))


def test_a_supplied_state_that_is_none_is_refused(coordinator: InThread) -> None:
    federation = federation_of(coordinator)
    enrol(coordinator, federation, "a", "b")
    path = f"/v1/federations/{federation}/initial-state"

    def put(tensors: Tensors) -> tuple[int, str]:
        return refusal(coordinator.http.put(path, content=encode(tensors), headers=coordinator.operator))[:2]

    whole: Tensors = {
        "global_prompt": torch.ones(4, 8),
        "classifier_weight": torch.zeros(2, 8),
        "classifier_bias": torch.zeros(2),
        "domains": torch.tensor(keys("a", "c")),
        "domain_prompts": torch.zeros(1, 4, 8),
        "listed_domains": torch.tensor(keys("a")),
    }
    assert put({"global_prompt": torch.ones(4, 8)}) == (422, "missing-tensor")
    assert put(whole | {"classifier_weight": torch.zeros(8)}) == (422, "wrong-shape")
    assert put(whole | {"classifier_bias": torch.zeros(3)}) == (422, "wrong-shape")
    assert put(whole | {"classifier_weight": torch.zeros(2, 7)}) == (422, "wrong-shape")
    assert put(whole | {"domains": torch.zeros(2)}) == (422, "wrong-dtype")
    assert coordinator.http.put(path, content=encode(whole), headers=coordinator.operator).is_success
