"""Asynchronous rounds over HTTP: FedBuff written out, lateness, evaluations, replay, restarts and refusals.

The fixtures of this folder compare memory with what a restart would load after every change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from promptfed.coordinator.engine import jobs
from promptfed.coordinator.store.blobs import digest_of
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.testing.clients import ScriptedClient, drive, spec, update_body
from tests.support.coordinators import InThread
from tests.support.waiting import wait_for

NAMES = ("a", "b", "c", "d")
CENTRES = {"a": 1.0, "b": -2.0, "c": 3.0, "d": 0.5}
RATE = 0.5
PRIVATE = {"level": "client", "clip": 1.0, "noise_multiplier": 1.0}
Arrays = dict[str, np.ndarray]


def began(coordinator: InThread, rounds: int = 6, **changes: Any) -> tuple[str, dict[str, ScriptedClient]]:
    schedule = {"kind": "buffered", "buffer": 2, **changes.pop("schedule", {})}
    federation = coordinator.create(rounds=rounds, schedule=schedule, **changes)
    clients = coordinator.enrol(federation, *NAMES)
    coordinator.post(f"{federation}/start")
    for client in clients:
        assert client.answer(coordinator.task(client)).status_code == 201  # the evaluation before round 1
    return federation, {client.name: client for client in clients}


def change_of(name: str, start: Arrays) -> Arrays:
    """A toy problem: a step on ½‖w - c‖²."""
    return {
        key: (-RATE * (value.astype(np.float64) - CENTRES[name])).astype(np.float32) for key, value in start.items()
    }


def answer(client: ScriptedClient, task: dict[str, Any], status: int = 201) -> Any:
    start = {key: value.numpy() for key, value in client.payload(task).items()}
    change = change_of(client.name, start)

    made = {key: torch.from_numpy(start[key] + change[key]) for key in start}
    response = client.send(task, update_body(made, task))
    assert response.status_code == status, response.text
    return response


def state(coordinator: InThread, federation: str, round: int) -> Arrays:
    response = coordinator.http.get(
        f"/v1/federations/{federation}/prompts", params={"round": round}, headers=coordinator.operator
    )
    return {key: value.numpy() for key, value in decode(response.content)[0].items()}


def factor(kind: str, staleness: int) -> float:
    if kind == "constant":
        return 1.0
    if kind == "hinge":
        return 1.0 if staleness <= 4 else 1 / (10 * (staleness - 4) + 1)
    return float(1 / np.sqrt(1 + staleness))


@pytest.mark.both_databases
@pytest.mark.parametrize("kind", ["polynomial", "constant", "hinge"])
def test_states_are_those_of_fedbuff_written_out(coordinator: InThread, kind: str) -> None:
    """w ← w + Σ p·s(τ)·Δ, Algorithm 1 of Nguyen et al. (2022), with numbers of samples as weights."""
    federation, clients = began(coordinator, rounds=8, schedule={"staleness": kind})
    w = [state(coordinator, federation, 0)]
    # Client d trains for six rounds, so that its change is 6 states late.
    tasks = {name: coordinator.task(client) for name, client in clients.items()}
    assert {task["round"] for task in tasks.values()} == {1}
    for round in range(1, 9):
        pair = ("a", "d") if round == 7 else ("a", "b") if round % 2 else ("b", "c")
        for name in pair:
            task = tasks.pop(name, None) or coordinator.task(clients[name])
            tasks[name] = task
            answer(clients[name], task)
        held = {name: tasks.pop(name) for name in pair}
        assert all(task["kind"] == "train" for task in held.values())
        now = {}
        for key, value in w[-1].items():
            moved = value.astype(np.float64)
            for name in pair:
                since = held[name]["round"]
                change = change_of(name, w[since - 1])[key].astype(np.float64)
                moved = moved + 0.5 * factor(kind, round - since) * change
            now[key] = moved
        if round < 8:
            coordinator.task(clients[pair[0]])  # it is made
        else:
            coordinator.until(federation, round=8, phase="evaluation")
        made = state(coordinator, federation, round)
        for key, value in made.items():
            np.testing.assert_allclose(value, now[key], atol=1e-6, rtol=0)
        w.append(made)
    report = coordinator.get(f"{federation}/rounds/7")
    [phase] = report["phases"]
    late = {update["client"]: update["staleness"] for update in phase["updates"] if update["verdict"] == "counted"}
    assert late == {"a": 1, "d": 6}
    [similarity] = coordinator.get(f"{federation}/insights?round=7")["similarity"]
    rows = [np.concatenate([part.ravel() for part in change_of(*one).values()]) for one in (("a", w[5]), ("d", w[0]))]
    expected = rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1])
    assert similarity["cosines"][0][1] == pytest.approx(expected, abs=1e-5)
    for round in (1, 7):
        replayed = coordinator.post(f"{federation}/rounds/{round}/replay", {})
        assert all(one["same"] for one in replayed["states"])


def test_who_is_too_late_is_told_so_and_gets_the_newest_state(coordinator: InThread) -> None:
    federation, clients = began(coordinator, rounds=9, schedule={"max_staleness": 1})
    old = coordinator.task(clients["d"])
    for round in range(1, 4):
        for name in ("a", "b") if round % 2 else ("b", "c"):
            answer(clients[name], coordinator.task(clients[name]))
    coordinator.until(federation, round=4)
    refused = answer(clients["d"], old, status=409).json()
    assert refused["type"].endswith("/too-stale")
    assert "3 rounds old" in refused["detail"]
    new = coordinator.task(clients["d"])
    assert (new["task_id"] != old["task_id"], new["round"]) == (True, 3)
    answer(clients["d"], new)


def test_no_more_clients_train_at_a_time_than_the_spec_says(coordinator: InThread) -> None:
    clients = began(coordinator, schedule={"concurrency": 3})[1]

    def asked() -> set[str]:
        return {name for name, client in clients.items() if client.task().status_code == 200}

    wait_for("three tasks", lambda: len(asked()) == 3)
    first = min(busy := asked())
    answer(clients[first], coordinator.task(clients[first]))
    (other,) = set(NAMES) - busy
    assert coordinator.task(clients[other])["round"] == 1
    assert clients[first].task().status_code == 204, "it has answered in this round"


def test_an_evaluation_waits_for_those_that_train_and_their_changes_count_later(coordinator: InThread) -> None:
    federation, clients = began(coordinator, rounds=2, evaluation={"every": 1})
    tasks = {name: coordinator.task(clients[name]) for name in NAMES}
    for name in ("a", "b"):
        answer(clients[name], tasks[name])
    first = coordinator.task(clients["a"])
    assert (first["kind"], first["round"]) == ("evaluate", 1)
    assert clients["c"].task().json()["kind"] == "train", "it still trains"
    answer(clients["c"], tasks["c"])
    for name in ("a", "b", "c"):
        clients[name].answer(coordinator.task(clients[name]))
    assert coordinator.get(federation)["phase"] == "evaluation", "it waits for d"
    answer(clients["d"], tasks["d"])
    clients["d"].answer(coordinator.task(clients["d"]))
    coordinator.until(federation, round=2, phase="evaluation")
    [phase] = coordinator.get(f"{federation}/rounds/2")["phases"]
    assert [one["client"] for one in phase["counted"]] == ["c", "d"]
    assert [one["staleness"] for one in phase["updates"]] == [1, 1]


def test_a_withdrawn_client_s_answer_is_dropped_wherever_it_is(coordinator: InThread) -> None:
    federation, clients = began(coordinator, rounds=2, evaluation={"every": 1})
    tasks = {name: coordinator.task(clients[name]) for name in NAMES}
    for name in ("a", "b", "c"):  # c's counts in round 2
        answer(clients[name], tasks[name])
        if name == "b":
            coordinator.until(federation, phase="evaluation")
    ids = {client["name"]: client["client_id"] for client in coordinator.get(f"{federation}/clients")["clients"]}
    coordinator.delete(f"{federation}/clients/{ids['c']}?discard=true")
    coordinator.delete(f"{federation}/clients/{ids['d']}")
    for name in ("a", "b"):
        clients[name].answer(coordinator.task(clients[name]))
    for name in ("a", "b"):
        answer(clients[name], coordinator.task(clients[name]))
    coordinator.until(federation, round=2, phase="evaluation")
    [phase] = coordinator.get(f"{federation}/rounds/2")["phases"]
    assert [one["client"] for one in phase["counted"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"method": {"name": "plan"}}, "mean"),
        ({"method": {"name": "pfedpg"}}, "mean"),
        ({"secure_aggregation": {}, "participation": {"min_clients": 3}}, "answer together"),
        ({"privacy": PRIVATE, "aggregation": {"weighting": "uniform"}}, "drawn together"),
        ({"participation": {"fraction": 0.5}}, "concurrency"),
        ({"schedule": {"kind": "buffered", "buffer": 3, "concurrency": 2}}, "at least the buffer"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused_with_the_reason(
    coordinator: InThread, changes: dict[str, Any], why: str
) -> None:
    raw = spec(**{"schedule": {"kind": "buffered", "buffer": 2}, **changes})
    refused = coordinator.post("/v1/federations", raw, status=422)
    assert any(why in error["detail"] for error in refused["errors"]), refused


def test_a_buffer_of_all_clients_gives_the_states_of_plain_rounds(coordinator: InThread) -> None:
    hashes = []
    for schedule in (None, {"kind": "buffered", "buffer": len(NAMES)}):
        federation = coordinator.create(
            name=f"with-{schedule is not None}", rounds=3, evaluation={"every": 3}, schedule=schedule
        )
        clients = coordinator.enrol(federation, *NAMES)
        coordinator.post(f"{federation}/start")
        drive(clients)
        coordinator.until(federation, state="finished")
        reports = [coordinator.get(f"{federation}/rounds/{round}") for round in (1, 2, 3)]
        hashes.append([report["state_hash"] for report in reports])
    assert hashes[0] == hashes[1]


def test_the_payload_of_a_late_task_is_made_again_from_its_own_state(coordinator: InThread) -> None:
    federation, clients = began(coordinator)
    old = coordinator.task(clients["d"])
    for names in (("a", "b"), ("b", "c")):
        for name in names:
            answer(clients[name], coordinator.task(clients[name]))
    coordinator.until(federation, round=3)
    digest = old["payload"]["sha256"]
    made = jobs.payload_again(coordinator.registry, coordinator.registry.get(federation), digest)
    assert made is not None
    assert digest_of(made) == digest
