"""The coordinator's own step: numbers by hand, Δ of whatever the rule makes, and moments that only the state has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from promptfed.coordinator.aggregation.rules import (
    MOMENTUM,
    SQUARE,
    Rule,
    ServerOptimizer,
    fresh_moments,
    moment_tensors,
)
from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.interface import ClientUpdate
from promptfed.shared.spec.sections import AggregationSpec, ServerOptimizerSpec
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Arrays, method_part
from promptfed.shared.tensors.torch_tensors import decode, state_hash
from promptfed.testing.clients import ScriptedClient, drive
from tests.support.coordinators import InThread, in_thread


def spec(**given: Any) -> ServerOptimizerSpec:
    return ServerOptimizerSpec.model_validate(given)


def steps(given: ServerOptimizerSpec, deltas: list[list[float]]) -> Arrays:
    """The state after these changes of the mean, from x = 0."""
    method = make_method({"name": "promptfl", "m": 1})
    state: Arrays = {"context": np.zeros((1, 2), np.float32)}
    state |= fresh_moments(given, moment_tensors(given, method, 10), {"m": 1, "d_t": 2})
    for delta in deltas:
        mean = state["context"] + np.array([delta], np.float32)
        optimizer = ServerOptimizer(given, state)
        moved = optimizer.wrap(lambda updates, mean=mean: {"context": mean})([])
        state = state | moved | optimizer.moments
    return state


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"optimizer": "adagrad", "learning_rate": 0.1}, [0.169217446, -0.099501250]),
        ({"optimizer": "adam", "learning_rate": 0.1}, [0.215986339, -0.181150190]),
        ({"optimizer": "yogi", "learning_rate": 0.1}, [0.215684502, -0.180737352]),
        ({"optimizer": "momentum"}, [0.29, -0.38]),
    ],
    ids=str,
)
def test_two_steps_by_hand(given: dict[str, Any], wanted: list[float]) -> None:
    found = steps(spec(**given), [[0.1, -0.2], [0.1, 0.0]])["context"][0]
    assert found.tolist() == [pytest.approx(wanted[0], abs=1e-7), pytest.approx(wanted[1], abs=1e-7)]


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
    deltas = (torch.randn(12, generator=draws) * 0.01).tolist()
    state = steps(spec(optimizer=kind, beta1=0.5), [[delta, 0.0] for delta in deltas])
    x, m, v = literal_steps(kind, 0.01, 0.5, 0.99, 1e-3, deltas)
    for name, wanted in (("context", x), (MOMENTUM + "context", m), (SQUARE + "context", v)):
        assert float(state[name][0, 0]) == pytest.approx(wanted, rel=1e-5)


def test_without_momentum_it_is_the_plain_mean_bit_for_bit() -> None:
    draws = torch.Generator().manual_seed(2)
    begun = torch.randn(3, 50, generator=draws) * 0.02
    updates = [
        ClientUpdate(name, weight, {"context": begun + torch.randn(3, 50, generator=draws) * 1e-3})
        for name, weight in (("a", 0.3), ("b", 0.7))
    ]
    given = spec(optimizer="momentum", momentum=0.0)
    optimizer = ServerOptimizer(given, {"context": begun, MOMENTUM + "context": torch.zeros(3, 50)})
    found = optimizer.wrap(weighted_mean)(updates)["context"]
    assert torch.equal(found, weighted_mean(updates)["context"])
    assert torch.allclose(optimizer.moments[MOMENTUM + "context"], found - begun, atol=1e-9)


def test_the_change_is_the_rules() -> None:
    """With a robust rule Δ is of what that rule makes, which already counts from the phase's start."""
    begun = torch.tensor([[1.0, 2.0]])
    updates = [
        ClientUpdate(name, 1 / 3, {"context": begun + value}) for name, value in (("a", 0.1), ("b", 0.3), ("c", 50.0))
    ]
    state = {"context": begun, MOMENTUM + "context": torch.full((1, 2), 0.5)}
    rule = Rule(AggregationSpec(rule="median"), state)
    found = ServerOptimizer(spec(optimizer="momentum", learning_rate=0.5), state).wrap(rule)(updates)["context"]
    assert torch.allclose(found, begun + 0.5 * (0.9 * 0.5 + 0.3), atol=1e-6)
    assert set(rule.judged) == {"a", "b", "c"}


def test_defaults_and_what_each_takes() -> None:
    assert spec().model_dump(exclude_none=True) == {"optimizer": "none"}
    assert spec(optimizer="momentum").model_dump(exclude_none=True) == {
        "optimizer": "momentum", "learning_rate": 1.0, "momentum": 0.9,
    }  # fmt: skip
    adam = {"optimizer": "adam", "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    assert spec(optimizer="adam").model_dump(exclude_none=True) == adam
    assert spec(**spec(optimizer="adam").model_dump()) == spec(**adam)
    assert spec(optimizer="adagrad").beta1 == 0
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
    with pytest.raises(
        SpecError, match=r"the server optimizer adam (cannot take the mean's place|has nothing to work on)"
    ):
        resolve_spec({"name": "x", "method": {"name": name}, "aggregation": {"server": {"optimizer": "adam"}}})


@pytest.fixture
def coordinator(tmp_path: Any) -> Iterable[InThread]:
    with in_thread(tmp_path / "data") as running:
        yield running


def test_a_federation_keeps_its_moments_and_shows_them_to_nobody(coordinator: InThread) -> None:
    """Hash and replay cover them; payloads do not hold them, nor do a newcomer or a round without them change them."""
    federation = coordinator.create(
        method={"name": "promptfl", "m": 2}, rounds=3, aggregation={"server": {"optimizer": "adam"}}
    )
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
