"""Aggregation rules in a federation: the state is the rule's, the report says what became of each update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from promptfed.coordinator.aggregation import rules
from promptfed.coordinator.aggregation.rules import MOMENTUM, SQUARE, Rule, ServerOptimizer, weighted_mean
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.interface import ClientUpdate
from promptfed.shared.spec.sections import AggregationSpec, ServerOptimizerSpec
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Arrays, Tensors, method_part
from promptfed.shared.tensors.torch_tensors import decode, state_hash
from promptfed.testing.clients import CLASSES, ScriptedClient, drive, trained, update_body
from tests.support import literal_rules as literal
from tests.support.coordinators import InThread
from tests.support.open_phases import answer_next, launched, metrics, prompts

NAMES = [f"c{i}" for i in range(7)]


BAD = "c3"


def round_of(
    coordinator: InThread, bad: Callable[[Tensors], Tensors], **aggregation: Any
) -> tuple[str, dict[str, Tensors]]:
    """A finished federation of one round in which one of seven sent something bad; what each has sent."""
    asked = {"admission": {"max_update_norm": 1e9}, "participation": {"min_clients": 7}}
    federation, clients = launched(coordinator, *NAMES, rounds=1, aggregation=aggregation, **asked)
    sent = {}
    for client, task in zip(clients, coordinator.training(clients), strict=True):
        good = trained(client.payload(task), client.name, task)
        sent[client.name] = bad(good) if client.name == BAD else good
        assert client.send(task, update_body(sent[client.name], task)).status_code == 201
    answer_next(coordinator, clients)
    coordinator.until(federation, state="finished")
    return federation, sent


def state(coordinator: InThread, federation: str, round: str = "latest") -> torch.Tensor:
    return prompts(coordinator, federation, round)["context"]


def huge(good: Tensors) -> Tensors:
    return {name: tensor * 1e6 for name, tensor in good.items()}


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
    shown = metrics(coordinator, federation)
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
    capped = {"participation": {"min_clients": 4}, "aggregation": {"max_weight_share": 0.3}}
    federation = coordinator.create(rounds=1, class_names=CLASSES, **capped)
    clients = coordinator.enrol(federation, "a", "b", "c", num_samples=100)
    clients += coordinator.enrol(federation, "liar", num_samples=1 << 40)
    coordinator.post(f"{federation}/start")
    for client, task in zip(clients, coordinator.training(clients), strict=True):
        filled = {"context": torch.full((4, 8), 10.0 if client.name == "liar" else 1.0)}
        assert client.send(task, update_body(filled, task)).status_code == 201
    coordinator.until(federation, phase="evaluation", round=1)
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    weights = {one["client"]: one["weight"] for one in phase["counted"]}
    assert weights == pytest.approx({"a": 0.7 / 3, "b": 0.7 / 3, "c": 0.7 / 3, "liar": 0.3})
    assert torch.allclose(state(coordinator, federation), torch.full((4, 8), 0.7 + 3))
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    judged = {(one["verdict"], one["influence"], one["distance"]) for one in phase["updates"]}
    assert judged == {("counted", None, None)}, "the plain mean judges nothing"


def test_clients_need_not_know_the_rule(coordinator: InThread) -> None:
    """What they are sent is the same, so they cannot adapt to it either."""
    configs = []
    for number, rule in enumerate(("mean", "median")):
        _, clients = launched(coordinator, "a", "b", name=f"f{number}", aggregation={"rule": rule})
        configs.append(coordinator.training(clients)[0]["config"])
    assert configs[0] == configs[1]
    assert "aggregation" not in configs[0]


# The coordinator's own step: numbers by hand, Δ of whatever the rule makes, and moments that only the state has.


def server_spec(**given: Any) -> ServerOptimizerSpec:
    return ServerOptimizerSpec.model_validate(given)


def steps(given: ServerOptimizerSpec, deltas: list[list[float]]) -> Arrays:
    """The state after these changes of the mean, from x = 0."""
    method = make_method({"name": "promptfl", "m": 1})
    state: Arrays = {"context": np.zeros((1, 2), np.float32)}
    state |= rules.fresh_moments(given, rules.moment_tensors(given, method, 10), {"m": 1, "d_t": 2})
    for delta in deltas:
        mean = state["context"] + np.array([delta], np.float32)
        optimizer = ServerOptimizer(given, state)
        moved = optimizer.wrap(lambda updates, mean=mean: {"context": mean})([])
        state = state | moved | optimizer.moments
    return state


def literal_steps(kind: str, rate: float, b1: float, b2: float, tau: float, deltas: list[float]) -> tuple[float, ...]:
    """Algorithm 2 for one number."""
    x, m, v = 0.0, 0.0, tau**2
    for delta in deltas:
        m = b1 * m + (1 - b1) * delta
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "adam":
            v = b2 * v + (1 - b2) * delta**2
        else:
            sign = (v > delta**2) - (v < delta**2)
            v = v - (1 - b2) * delta**2 * sign
        x = x + rate * m / (v**0.5 + tau)
    return x, m, v


@pytest.mark.parametrize("kind", ["adagrad", "adam", "yogi"])
def test_many_steps_equal_the_algorithm(kind: str) -> None:
    draws = torch.Generator().manual_seed(1)
    many = (torch.randn(12, generator=draws) * 0.01).tolist()
    for tau, deltas in ((1e-3, many), (0.5, [0.5, 0.25, 2.0])):  # the latter's squares are at v, below and above it
        given = server_spec(optimizer=kind, beta1=0.5, tau=tau)
        state = steps(given, [[delta, 0.0] for delta in deltas])
        x, m, v = literal_steps(kind, 0.01, 0.5, 0.99, tau, deltas)
        for name, wanted in (("context", x), (MOMENTUM + "context", m), (SQUARE + "context", v)):
            assert float(state[name][0, 0]) == pytest.approx(wanted, rel=1e-5)


def test_without_momentum_it_is_the_plain_mean_bit_for_bit() -> None:
    draws = torch.Generator().manual_seed(2)
    begun = torch.randn(3, 50, generator=draws) * 0.02
    first, second = ({"context": begun + torch.randn(3, 50, generator=draws) * 1e-3} for _ in range(2))
    updates = [ClientUpdate("a", 0.3, first), ClientUpdate("b", 0.7, second)]
    given = server_spec(optimizer="momentum", momentum=0.0)
    optimizer = ServerOptimizer(given, {"context": begun, MOMENTUM + "context": torch.zeros(3, 50)})
    found = optimizer.wrap(weighted_mean)(updates)["context"]
    assert torch.equal(found, weighted_mean(updates)["context"])
    assert torch.allclose(optimizer.moments[MOMENTUM + "context"], found - begun, atol=1e-9)


def test_the_change_is_the_rules() -> None:
    """With a robust rule Δ is of what that rule makes, which already counts from the phase's start."""
    begun = torch.tensor([[1.0, 2.0]])
    values = {"a": 0.1, "b": 0.3, "c": 50.0}
    updates = [ClientUpdate(name, 1 / 3, {"context": begun + value}) for name, value in values.items()]
    state = {"context": begun, MOMENTUM + "context": torch.full((1, 2), 0.5)}
    rule = Rule(AggregationSpec(rule="median"), state)
    found = ServerOptimizer(server_spec(optimizer="momentum", learning_rate=0.5), state).wrap(rule)(updates)["context"]
    assert torch.allclose(found, begun + 0.5 * (0.9 * 0.5 + 0.3), atol=1e-6)
    assert set(rule.judged) == {"a", "b", "c"}


def test_defaults_and_what_each_takes() -> None:
    assert server_spec().model_dump(exclude_none=True) == {"optimizer": "none"}
    momentum = {"optimizer": "momentum", "learning_rate": 1.0, "momentum": 0.9}
    assert server_spec(optimizer="momentum").model_dump(exclude_none=True) == momentum
    adam = {"optimizer": "adam", "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    assert server_spec(optimizer="adam").model_dump(exclude_none=True) == adam
    assert server_spec(**server_spec(optimizer="adam").model_dump()) == server_spec(**adam)
    assert server_spec(optimizer="adagrad").beta1 == 0
    for given, said in (
        ({"optimizer": "none", "tau": 0.1}, "optimizer none has no tau"),
        ({"learning_rate": 0.1}, "optimizer none has no learning_rate"),
        ({"optimizer": "momentum", "beta2": 0.9}, "optimizer momentum has no beta2"),
        ({"optimizer": "adagrad", "beta2": 0.9}, "optimizer adagrad has no beta2"),
        ({"optimizer": "sgd"}, "'none', 'momentum'"),
    ):
        with pytest.raises(SpecError, match=said):
            resolve_spec({"name": "x", "method": {"name": "promptfl"}, "aggregation": {"server": given}})


@pytest.mark.parametrize("name", ["pfedpg", "plan", "fast_pt", "pfedmoap", "promptfl_amp", "coop", "zero_shot"])
def test_methods_that_take_no_mean_are_refused(name: str) -> None:
    why = r"the server optimizer adam (cannot take the mean's place|has nothing to work on)"
    with pytest.raises(SpecError, match=why):
        resolve_spec({"name": "x", "method": {"name": name}, "aggregation": {"server": {"optimizer": "adam"}}})


def test_a_federation_keeps_its_moments_and_shows_them_to_nobody(coordinator: InThread) -> None:
    """Hash and replay cover them; payloads do not hold them, nor do a newcomer or a round without them change them."""
    adam = {"server": {"optimizer": "adam"}}
    federation = coordinator.create(method={"name": "promptfl", "m": 2}, rounds=3, aggregation=adam)
    clients = coordinator.enrol(federation, "a", "b")
    seen: list[set[str]] = []

    def watched(client: ScriptedClient) -> ScriptedClient:
        read = client.payload
        client.payload = lambda task: [tensors := read(task), seen.append(set(tensors))][0]
        return client

    coordinator.post(f"{federation}/start")
    drive([watched(client) for client in clients])
    assert coordinator.get(federation)["state"] == "finished"
    shown = coordinator.http.get(f"/v1/federations/{federation}/prompts", headers=coordinator.operator)
    state, _ = decode(shown.content)
    assert set(state) == {"context", MOMENTUM + "context", SQUARE + "context"}
    assert set(method_part(state)) == {"context"}
    assert shown.headers["etag"].strip('"') == state_hash(state)
    assert float(state[MOMENTUM + "context"].abs().max()) > 0
    for round in range(4):
        again = coordinator.post(f"{federation}/rounds/{round}/replay", {}, status=200)
        assert all(one["same"] for one in again["states"])
    assert seen
    assert all(names == {"context"} for names in seen)
