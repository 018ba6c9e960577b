"""``training.budget`` over HTTP: FedNova written out, replay, refusals, and a client that lies about its steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from promptfed.coordinator.aggregation.unequal_steps import MOST_TIMES
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.testing.clients import ScriptedClient, update_body
from tests.support.coordinators import InThread

RATE = 0.01
CENTRES = {"a": 1.0, "b": -2.0, "c": 3.0}
SAMPLES = {"a": 10, "b": 30, "c": 60}
STEPS = {"a": 3, "b": 8, "c": 21}
Arrays = dict[str, np.ndarray]


def began(coordinator: InThread, budget: dict[str, Any], momentum: float = 0.9, **changes: Any) -> tuple[str, dict]:
    training = {"momentum": momentum, "learning_rate": RATE, "budget": budget}
    changes = {"aggregation": {"max_weight_share": None}, "evaluation": {"every": 9}} | changes
    federation = coordinator.create(rounds=3, training=training, **changes)
    clients = {}
    for name, samples in SAMPLES.items():
        [clients[name]] = coordinator.enrol(federation, name, num_samples=samples)
    coordinator.post(f"{federation}/start")
    for client in clients.values():
        assert client.answer(coordinator.task(client)).status_code == 201  # the evaluation before round 1
    return federation, clients


def trained(name: str, start: Arrays, steps: int, momentum: float) -> Arrays:
    """A toy problem: ``steps`` of SGD on ½‖w - c‖²."""
    made = {}
    for key, value in start.items():
        w = torch.from_numpy(value.astype(np.float64)).clone()
        buffer = torch.zeros_like(w)
        for _ in range(steps):
            buffer = momentum * buffer + (w - CENTRES[name])
            w = w - RATE * buffer
        made[key] = w.float().numpy()
    return made


def send(client: ScriptedClient, task: dict[str, Any], tensors: Arrays, status: int = 201, **about: Any) -> Any:
    made = {key: torch.from_numpy(value) for key, value in tensors.items()}
    response = client.send(task, update_body(made, task, **about))
    assert response.status_code == status, response.text
    return response.json()


def start_of(client: ScriptedClient, task: dict[str, Any]) -> Arrays:
    return {key: value.numpy() for key, value in client.payload(task).items()}


def state(coordinator: InThread, federation: str, round: int) -> Arrays:
    response = coordinator.http.get(
        f"/v1/federations/{federation}/prompts", params={"round": round}, headers=coordinator.operator
    )
    return {key: value.numpy() for key, value in decode(response.content)[0].items()}


def round_of(coordinator: InThread, clients: dict[str, ScriptedClient], momentum: float, steps: dict[str, int]) -> None:
    for name, client in clients.items():
        task = coordinator.task(client)
        send(client, task, trained(name, start_of(client, task), steps[name], momentum), steps=steps[name])


@pytest.mark.both_databases
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_states_are_those_of_fednova_written_out(coordinator: InThread, momentum: float) -> None:
    """x ← x + τ_eff·Σ p_i·Δ_i/‖a_i‖₁, with a_i written out as how often each gradient is in the change."""
    federation, clients = began(coordinator, {"seconds": 10.0}, momentum)
    round_of(coordinator, clients, momentum, STEPS)
    coordinator.until(federation, round=2)
    before, after = state(coordinator, federation, 0), state(coordinator, federation, 1)
    sums = {
        name: sum(sum(momentum**power for power in range(steps - step)) for step in range(steps))
        for name, steps in STEPS.items()
    }
    p = {name: samples / sum(SAMPLES.values()) for name, samples in SAMPLES.items()}
    effective = sum(p[name] * sums[name] for name in STEPS)
    for key, value in before.items():
        wanted = value.astype(np.float64)
        for name, steps in STEPS.items():
            change = trained(name, before, steps, momentum)[key].astype(np.float64) - value
            wanted = wanted + effective * p[name] * change / sums[name]
        np.testing.assert_allclose(after[key], wanted, atol=1e-6, rtol=0)
        plain = sum(p[name] * trained(name, before, steps, momentum)[key] for name, steps in STEPS.items())
        assert np.abs(after[key] - plain).max() > 1e-3, "the plain mean is another one"
    report = coordinator.get(f"{federation}/rounds/1")
    assert {one["client"]: one["steps"] for one in report["phases"][0]["updates"]} == STEPS
    replayed = coordinator.post(f"{federation}/rounds/1/replay", {})
    assert all(one["same"] for one in replayed["states"])
    without = coordinator.post(f"{federation}/rounds/1/replay", {"without": ["c"]})
    assert not without["states"][0]["same"]


def test_equal_steps_give_the_bits_of_the_plain_mean(coordinator: InThread) -> None:
    states = []
    for budget in ({"steps": 5}, None):
        training = {"learning_rate": RATE, "budget": budget}
        federation = coordinator.create(name=f"with-{budget is not None}", rounds=1, training=training)
        clients = {client.name: client for client in coordinator.enrol(federation, *STEPS)}
        coordinator.post(f"{federation}/start")
        for client in clients.values():
            client.answer(coordinator.task(client))
        for name, client in clients.items():
            task = coordinator.task(client)
            about = {} if budget is None else {"steps": 5}
            send(client, task, trained(name, start_of(client, task), 5, 0.9), **about)
        coordinator.until(federation, round=1, phase="evaluation")
        states.append(coordinator.get(f"{federation}/rounds/1")["phases"][0]["state_hash"])
    assert states[0] == states[1]


def test_a_client_that_says_few_steps_gains_no_more_than_admission_allows(coordinator: InThread) -> None:
    admission = {"max_update_norm": 5.0}
    federation, clients = began(coordinator, {"seconds": 10.0}, 0.0, admission=admission)
    for name, client in clients.items():
        task = coordinator.task(client)
        start = start_of(client, task)
        [key] = start
        change = np.zeros_like(start[key])
        change.flat[0] = 4.0 if name == "a" else 0.0
        send(client, task, {key: start[key] + change}, steps=1 if name == "a" else 1000)
    coordinator.until(federation, round=2)
    [before], [after] = (list(state(coordinator, federation, round).values()) for round in (0, 1))
    share = SAMPLES["a"] / sum(SAMPLES.values())
    assert float(np.linalg.norm((after - before).astype(np.float64))) == pytest.approx(share * 5.0, rel=1e-5)


def test_a_client_that_says_very_many_steps_does_not_enlarge_the_changes_of_others(coordinator: InThread) -> None:
    """τ_eff is a mean of all numbers of steps: 2^31 steps of one client would take every other change to the limit."""
    federation, clients = began(coordinator, {"seconds": 10.0}, 0.0)
    for name, client in clients.items():
        task = coordinator.task(client)
        start = start_of(client, task)
        steps, own = ((1 << 31) - 1, start) if name == "c" else (5, trained(name, start, 5, 0.0))
        send(client, task, own, steps=steps)
    coordinator.until(federation, round=2)
    before, after = (state(coordinator, federation, round) for round in (0, 1))
    p = {name: samples / sum(SAMPLES.values()) for name, samples in SAMPLES.items()}
    effective = (p["a"] + p["b"]) * 5 + p["c"] * MOST_TIMES * 5
    for key, value in before.items():
        honest = sum(p[name] * (trained(name, before, 5, 0.0)[key].astype(np.float64) - value) for name in "ab")
        np.testing.assert_allclose(after[key], value + effective / 5 * honest, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("budget", "about", "why"),
    [
        ({"seconds": 1.0}, {}, "say how many steps"),
        ({"steps": 5}, {"steps": 4}, "4, where each task takes 5"),
        ({"steps": 5}, {"steps": 0}, "greater than or equal to 1"),
        (None, {"steps": 4}, "nobody asks"),
    ],
)
def test_updates_with_other_steps_are_refused(
    coordinator: InThread, budget: dict[str, Any] | None, about: dict[str, Any], why: str
) -> None:
    _, clients = began(coordinator, budget)
    task = coordinator.task(clients["a"])
    refused = send(clients["a"], task, start_of(clients["a"], task), 422, **about)
    assert refused["type"].endswith("/bad-metadata")
    assert why in refused["detail"]
