"""Aggregation rules in a federation: the state is the rule's, the report says what became of each update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.testing.clients import CLASSES, ScriptedClient, spec, trained, update_body
from tests.support import literal_rules as literal
from tests.support.coordinators import InThread

NAMES = [f"c{i}" for i in range(7)]
BAD = "c3"


def round_of(
    coordinator: InThread, bad: Callable[[Tensors], Tensors], **aggregation: Any
) -> tuple[str, dict[str, Tensors]]:
    """A finished federation of one round in which one of seven sent something bad; what each has sent."""
    federation = coordinator.create(
        rounds=1, admission={"max_update_norm": 1e9}, aggregation=aggregation, participation={"min_clients": 7}
    )
    clients = coordinator.enrol(federation, *NAMES)
    coordinator.post(f"{federation}/start")
    sent = {}
    for client, task in zip(clients, coordinator.training(clients), strict=True):
        good = trained(client.payload(task), client.name, task)
        sent[client.name] = bad(good) if client.name == BAD else good
        assert client.send(task, update_body(sent[client.name], task)).status_code == 201
    for client in clients:
        assert client.evaluate(coordinator.task(client)).status_code == 201
    coordinator.until(federation, state="finished")
    return federation, sent


def state(coordinator: InThread, federation: str, round: str = "latest") -> torch.Tensor:
    headers = coordinator.operator | {"Accept": "application/octet-stream"}
    url = f"/v1/federations/{federation}/prompts"
    return decode(coordinator.http.get(url, params={"round": round}, headers=headers).content)[0]["context"]


def huge(good: Tensors) -> Tensors:
    return {name: tensor * 1e6 for name, tensor in good.items()}


@pytest.mark.both_databases
def test_krum_rejects_the_bad_update_and_says_so(coordinator: InThread) -> None:
    federation, sent = round_of(coordinator, huge, rule="multi_krum", tolerate=0.2)
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    updates = {one["client"]: one for one in phase["updates"]}
    rejected = {name for name, one in updates.items() if one["verdict"] == "rejected"}
    assert BAD in rejected
    assert len(rejected) == 3, "7 - f - 2 = 4 are averaged"
    assert all(updates[name]["influence"] == (0 if name in rejected else pytest.approx(0.25)) for name in NAMES)
    assert max(NAMES, key=lambda name: updates[name]["distance"]) == BAD
    assert [one["client"] for one in phase["counted"]] == NAMES, "all were there when the phase closed"
    vectors = [sent[name]["context"].reshape(-1).tolist() for name in NAMES]
    wanted = torch.tensor(literal.multi_krum(vectors, 1)).reshape(4, 8)
    assert torch.allclose(state(coordinator, federation), wanted, atol=1e-5)
    shown = coordinator.get(f"{federation}/metrics")["metrics"]
    influence = {one["client"]: one["value"] for one in shown if one["name"] == "influence"}
    assert influence == {name: updates[name]["influence"] for name in NAMES}


def test_clipping_starts_from_the_state_that_clients_began_with(coordinator: InThread) -> None:
    federation, sent = round_of(coordinator, huge, clip_norm="median")
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert [one["verdict"] for one in phase["updates"]].count("clipped") == 3
    begun = state(coordinator, federation, "0").double()
    moved = {name: sent[name]["context"].double() - begun for name in NAMES}
    limit = float(torch.stack([one.norm() for one in moved.values()]).median())
    by_hand = begun + sum(one * min(1.0, limit / float(one.norm())) for one in moved.values()) / 7
    assert torch.allclose(state(coordinator, federation).double(), by_hand, atol=1e-5)


def test_an_inflated_number_of_samples_weighs_no_more_than_the_cap(coordinator: InThread) -> None:
    """The cheapest poisoning: a client that says it has all the data."""
    federation = coordinator.create(
        rounds=1, participation={"min_clients": 4}, aggregation={"max_weight_share": 0.3}, class_names=CLASSES
    )
    clients = [
        *coordinator.enrol(federation, "a", "b", "c", num_samples=100),
        *coordinator.enrol(federation, "liar", num_samples=1 << 40),
    ]
    coordinator.post(f"{federation}/start")
    for client, task in zip(clients, coordinator.training(clients), strict=True):
        filled = {"context": torch.full((4, 8), 10.0 if client.name == "liar" else 1.0)}
        assert client.send(task, update_body(filled, task)).status_code == 201
    coordinator.until(federation, phase="evaluation", round=1)
    weights = {
        one["client"]: one["weight"] for one in coordinator.get(f"{federation}/rounds/1")["phases"][0]["counted"]
    }
    assert weights == pytest.approx({"a": 0.7 / 3, "b": 0.7 / 3, "c": 0.7 / 3, "liar": 0.3})
    assert torch.allclose(state(coordinator, federation), torch.full((4, 8), 0.7 + 3))
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    judged = {(one["verdict"], one["influence"], one["distance"]) for one in phase["updates"]}
    assert judged == {("counted", None, None)}, "the plain mean judges nothing"


def test_a_rule_that_cannot_be_is_refused_at_creation(coordinator: InThread) -> None:
    for method, aggregation, path, says in (
        ("promptfl", {"rule": "krum"}, "aggregation", "needs at least 5 updates"),
        ("pfedpg", {"rule": "median"}, "aggregation", "pfedpg does not combine its updates by a mean"),
        ("promptfl", {"rule": "median", "tolerate": 0.1}, "aggregation.tolerate", "takes none"),
    ):
        raw = spec() | {"method": {"name": method}, "aggregation": aggregation}
        answer = coordinator.post("/v1/federations", raw, status=422)
        assert answer["type"].endswith("/invalid-spec")
        assert [(one["path"], says in one["detail"]) for one in answer["errors"]] == [(path, True)]


def test_clients_need_not_know_the_rule(coordinator: InThread) -> None:
    """What they are sent is the same, so they cannot adapt to it either."""
    configs = []
    for number, rule in enumerate(("mean", "geometric_median")):
        federation = coordinator.create(name=f"f{number}", aggregation={"rule": rule})
        clients: list[ScriptedClient] = coordinator.enrol(federation, "a", "b")
        coordinator.post(f"{federation}/start")
        configs.append(coordinator.training(clients)[0]["config"])
    assert configs[0] == configs[1]
    assert "aggregation" not in configs[0]
