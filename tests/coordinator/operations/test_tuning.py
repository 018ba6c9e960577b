"""Choosing a method before round 1: candidates are compared in trials, by halving, and the best one is trained."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from promptfed.coordinator.operations import federations
from promptfed.coordinator.problems import InvalidSpec
from promptfed.shared.methods import resolve_spec
from promptfed.shared.spec.spec import SpecError
from promptfed.testing.clients import ScriptedClient, spec
from promptfed.testing.coordinator import LocalCoordinator
from tests.support.tuned import ACCURACIES, NAMES, RATES, Site, play, tuned


def halved(accuracies: dict[int, float]) -> tuple[list[list[int]], int]:
    """Successive halving by the book, for four candidates: all, then two of which the first is always one."""
    others = sorted((number for number in accuracies if number != 0), key=lambda number: -accuracies[number])
    best = max(accuracies, key=lambda number: accuracies[number])
    last = [0, others[0]] if best != 0 else sorted([0, others[0]])
    return [[0, 1, 2, 3], last], max(last, key=lambda number: accuracies[number])


@pytest.mark.both_databases
def test_the_best_candidate_becomes_the_method(coordinator: LocalCoordinator) -> None:
    federation = str(coordinator.post("/v1/federations", tuned(), status=201)["id"])
    coordinator.enrol(federation, *NAMES)
    assert coordinator.start(federation)["state"] == "enrolling"
    play(coordinator, federation)
    view = coordinator.get(federation)
    rungs, winner = halved({number: ACCURACIES[rate] + 0.01 for number, rate in enumerate(RATES)})
    assert [(one["rung"], one["candidate"]) for one in view["trials"]] == [
        (rung, candidate) for rung, candidates in enumerate(rungs) for candidate in candidates
    ]
    assert [one["rounds"] for one in view["trials"]] == [2, 2, 2, 2, 3, 3]
    for one in view["trials"]:
        assert one["accuracy"] == pytest.approx(ACCURACIES[RATES[one["candidate"]]] + 0.01)
    assert (view["state"], view["spec"]["tuning"]["chosen"], winner) == ("finished", 2, 2)
    assert view["spec"]["training"]["learning_rate"] == RATES[winner]
    told = coordinator.http.get(f"/v1/federations/{federation}/events", headers=coordinator.operator).text
    [chosen] = [json.loads(line[6:]) for line in told.split("event: method-chosen\n")[1].split("\n")[:1]]
    assert [one["accuracy"] for one in chosen["trials"]] == [one["accuracy"] for one in view["trials"]]


def test_trials_end_with_their_federation(coordinator: LocalCoordinator) -> None:
    federation = str(coordinator.post("/v1/federations", tuned(), status=201)["id"])
    coordinator.enrol(federation, *NAMES)
    coordinator.start(federation)
    trial = coordinator.get(federation)["trials"][0]["federation"]
    again = coordinator.http.post(f"/v1/federations/{federation}/start", headers=coordinator.operator)
    assert "starts by itself" in again.json()["detail"]
    coordinator.post(f"{federation}/cancel")
    coordinator.until(trial, state="cancelled")
    coordinator.delete(federation)
    assert coordinator.get("/v1/federations")["federations"] == []


def test_a_client_that_is_withdrawn_leaves_the_trial_too(coordinator: LocalCoordinator) -> None:
    federation = str(coordinator.post("/v1/federations", tuned(), status=201)["id"])
    coordinator.enrol(federation, *NAMES, "c")
    coordinator.start(federation)
    trial = coordinator.get(federation)["trials"][0]["federation"]
    site = Site(coordinator, federation, "a")
    site.go_on()
    coordinator.delete(f"{federation}/clients/a")
    assert coordinator.get(trial)["clients"]["withdrawn"] == 1


def test_a_trial_s_token_is_for_its_client_alone(coordinator: LocalCoordinator) -> None:
    federation = str(coordinator.post("/v1/federations", tuned(), status=201)["id"])
    coordinator.enrol(federation, *NAMES)
    coordinator.start(federation)
    client = coordinator.client(federation, "a")
    offer = coordinator.http.post(f"{client.path}/trial", headers=client.headers).json()
    stranger = ScriptedClient(coordinator.http, offer["federation"], "stranger")
    assert stranger.enrol(offer["token"]).json()["type"].endswith("/other-token")


def test_evaluators_and_latecomers_wait_for_round_1(coordinator: LocalCoordinator) -> None:
    federation = str(coordinator.post("/v1/federations", tuned(), status=201)["id"])
    coordinator.enrol(federation, *NAMES)
    coordinator.enrol(federation, "referee", role="evaluator")
    coordinator.start(federation)
    play(coordinator, federation, until=lambda: coordinator.get(federation)["trials"][0]["state"] != "enrolling")
    coordinator.enrol(federation, "late")
    for name in ("referee", "late"):
        client = coordinator.client(federation, name)
        assert coordinator.http.post(f"{client.path}/trial", headers=client.headers).status_code == 204


# What cannot work is refused


def among(name: str, training: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    return {"candidates": [{"method": {"name": name, **settings}, "training": training or {}}]}


def refused(**changes: Any) -> str:
    section = among("fedclip") | changes.pop("tuning", {})
    with pytest.raises(SpecError) as error:
        resolve_spec(spec(tuning=section, **changes))
    return str(error.value)


PRIVACY = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0, "evaluation": "noisy"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tuning": among("promptfl", m=4)}, "all are the spec's own method"),
        (
            {"tuning": among("promptfll")},
            r"tuning\.candidates\.0\.method\.name: .*mean",
        ),
        ({"tuning": among("fedclip", {"learning_rate": -1})}, r"tuning\.candidates\.0\.training\.learning_rate"),
        ({"tuning": {"chosen": 0}}, "set by the coordinator"),
        ({"held_out": 0.5}, "leave held_out out"),
        ({"secure_aggregation": {}, "participation": {"min_clients": 3}}, "accuracies stay at the sites"),
        ({"privacy": {**PRIVACY, "level": "client", "evaluation": None, "delta": 1e-3}}, "level client"),
        ({"privacy": {**PRIVACY, "noise_multiplier": None, "epsilon": 3.0}}, "give noise_multiplier"),
        ({"privacy": {**PRIVACY, "evaluation": None}}, "give privacy.evaluation noisy"),
        (
            {"privacy": PRIVACY, "tuning": among("plan")},
            r"tuning\.candidates\.0\.privacy",
        ),
        ({"tuning": among("promptfl", context_init="a photo of a")}, "from words"),
        ({"continues": "sha256:" + "0" * 64}, "leave continues or tuning out"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_creation(changes: dict[str, Any], told: str) -> None:
    assert re.search(told, refused(**changes))


def test_an_operator_makes_no_trials_and_supplies_no_state(coordinator: LocalCoordinator) -> None:
    own = spec(trial={"of": "fed-1", "rung": 0, "candidate": 0})
    assert "leave it out" in coordinator.post("/v1/federations", own, status=422)["detail"]
    federation = str(coordinator.post("/v1/federations", tuned(), status=201)["id"])
    path = f"/v1/federations/{federation}/initial-state"
    answer = coordinator.http.put(path, content=b"", headers=coordinator.operator)
    assert "an initial state fits one method only" in answer.json()["detail"]


def test_a_resolved_spec_stays_unchanged() -> None:
    resolved = resolve_spec(tuned())
    assert resolve_spec(resolved.model_dump(mode="json")) == resolved
    assert resolved.tuning is not None
    assert [candidate.training["learning_rate"] for candidate in resolved.tuning.candidates] == list(RATES)


def test_several_coordinators_refuse_it(coordinator: LocalCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator.registry, "leases", object())
    with pytest.raises(InvalidSpec, match="tuning: several coordinators"):
        federations.create(coordinator.registry, tuned())
    monkeypatch.undo()
