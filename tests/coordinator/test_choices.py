"""The choice of clients over HTTP: reasons in status, reports and events, restarts, over-selection, refusals.

The fixtures of this folder compare memory with what a restart would load after every change.
"""

from __future__ import annotations

from typing import Any

import pytest

from promptfed.testing.clients import ScriptedClient, spec, update_body
from tests.support.coordinators import InThread

NAMES = tuple(f"c{number}" for number in range(6))
PRIVATE = {"level": "client", "clip": 1.0, "noise_multiplier": 1.0}


def began(coordinator: InThread, **changes: Any) -> tuple[str, dict[str, ScriptedClient]]:
    federation = coordinator.create(evaluation={"every": 50}, **{"rounds": 8, **changes})
    clients = coordinator.enrol(federation, *NAMES)
    coordinator.post(f"{federation}/start")
    for client in clients:
        assert client.answer(coordinator.task(client)).status_code == 201  # the evaluation before round 1
    return federation, {client.name: client for client in clients}


def train(coordinator: InThread, client: ScriptedClient, **metrics: float) -> None:
    task = coordinator.task(client)
    response = client.send(task, update_body(client.payload(task), task, metrics=metrics))
    assert response.status_code == 201, response.text


def asked(coordinator: InThread, federation: str, round: int) -> list[str]:
    coordinator.until(federation, round=round, phase="train")
    return list(coordinator.get(federation)["asked"])


@pytest.mark.both_databases
@pytest.mark.parametrize("choice", ["power_of_choice", "oort"])
def test_clients_are_asked_by_what_they_report_and_everybody_sees_why(coordinator: InThread, choice: str) -> None:
    part = {"fraction": 0.5, "choice": choice, "candidates": 2.0, "preferred_seconds": 60.0}
    federation, clients = began(coordinator, participation=part)
    losses = {name: number + 1.0 for number, name in enumerate(NAMES)}
    for round in range(1, 5):
        for name in asked(coordinator, federation, round):
            train(coordinator, clients[name], loss=losses[name], squared_losses=losses[name] ** 2)
    view = coordinator.get(federation)
    assert set(view["choice"]) == set(view["asked"])
    said = " ".join(view["choice"].values())
    assert ("loss" if choice == "power_of_choice" else "utility") in said
    if choice == "power_of_choice":
        assert view["asked"] == list(NAMES[3:]), "all are candidates: the highest losses"
        assert view["choice"]["c5"] == "loss 6, of 6 candidates"
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert set(phase["choice"]) == set(phase["asked"])
    assert "is not known" in " ".join(phase["choice"].values())
    for round in (1, 4):
        replayed = coordinator.post(f"{federation}/rounds/{round}/replay", {})
        assert all(one["same"] for one in replayed["states"])


def test_the_first_answers_of_an_over_selected_round_count_and_later_ones_are_refused(coordinator: InThread) -> None:
    part = {"fraction": 0.5, "over_select": 1.5}
    federation, clients = began(coordinator, participation=part)
    names = asked(coordinator, federation, 1)
    assert len(names) == 5
    late = {name: coordinator.task(clients[name]) for name in names[3:]}
    for name in names[:3]:
        train(coordinator, clients[name], loss=1.0)
    coordinator.until(federation, round=2)
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert [one["client"] for one in phase["counted"]] == names[:3]
    assert (phase["expired"], phase["extended"], phase["sample_size"]) == (names[3:], False, 3)
    for name, task in late.items():
        response = clients[name].send(task, update_body(clients[name].payload(task), task))
        assert response.status_code == 409
        assert response.json()["type"].endswith("/phase-closed")


def test_only_clients_that_meet_the_requirements_train_and_the_others_evaluate(coordinator: InThread) -> None:
    federation = coordinator.create(
        rounds=3, participation={"require": {"images": 50, "gpu": True, "domain": "photo"}, "min_clients": 2}
    )
    photo = {"name": "photo", "description": "a photo of a {}."}
    fit = {"num_samples": 50, "device": "cuda (H200)", "domain": photo}
    declared = {
        "fit": fit,
        "few": fit | {"num_samples": 49},
        "cpu": fit | {"device": "cpu"},
        "sketch": fit | {"domain": photo | {"name": "sketch"}},
    }
    for name, about in declared.items():
        coordinator.enrol(federation, name, **about)
    refused = coordinator.post(f"{federation}/start", status=409)
    assert "enrolled trainers that meet participation.require: 1, needed: 2" in refused["detail"]
    coordinator.enrol(federation, "mps", **(fit | {"device": "mps"}))
    coordinator.post(f"{federation}/start")
    view = coordinator.get(federation)
    assert (view["phase"], len(view["asked"])) == ("evaluation", 5)
    for name in view["asked"]:
        client = ScriptedClient(coordinator.http, federation.rpartition("/")[2], name)
        client.answer(coordinator.task(client))
    assert asked(coordinator, federation, 1) == ["fit", "mps"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"participation": {"choice": "oort"}, "privacy": PRIVATE, "aggregation": {"weighting": "uniform"}}, "alike"),
        ({"participation": {"over_select": 1.5}, "privacy": PRIVATE, "aggregation": {"weighting": "uniform"}}, "alike"),
        ({"participation": {"choice": "power_of_choice"}, "privacy": {"level": "sample", "epsilon": 3.0}}, "no noise"),
        ({"participation": {"choice": "oort", "min_clients": 3}, "secure_aggregation": {}}, "no number leaves"),
        ({"participation": {"over_select": 2.0, "min_clients": 3}, "secure_aggregation": {}}, "secure sum needs"),
        ({"participation": {"choice": "all_available", "fraction": 0.5}}, "every client"),
        ({"participation": {"choice": "power_of_choice"}, "method": {"name": "zero_shot"}}, "reports none"),
        ({"participation": {"choice": "oort"}, "method": {"name": "fast_pt"}}, "train without"),
        ({"participation": {"choice": "oort"}, "method": {"name": "promptfl_ft"}}, "trained first"),
    ],
)
def test_choices_that_cannot_work_are_refused_with_the_reason(
    coordinator: InThread, changes: dict[str, Any], why: str
) -> None:
    raw = spec(**changes)
    raw["method"] = changes.get("method", raw["method"])
    refused = coordinator.post("/v1/federations", raw, status=422)
    assert any(why in error["detail"] and error["path"] == "participation" for error in refused["errors"]), refused


def test_a_draw_that_is_secret_stays_so(coordinator: InThread) -> None:
    federation, _ = began(coordinator, participation={"fraction": 0.5, "choice": "round_robin"})
    view = coordinator.get(federation)
    assert view["draw"]["secret"] is None
    assert coordinator.registry.get(view["id"]).draw_secret not in str(view)
