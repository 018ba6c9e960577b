"""The facts of a card: the coordinator has the same as whoever takes the result, and the arithmetic is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.reports import exports
from promptfed.coordinator.reports.exports import tally_of
from promptfed.coordinator.reports.rounds import round_report
from promptfed.sdk.client import Coordinator
from promptfed.sdk.operations import take
from promptfed.shared.api.export_card import Facts, Hashes, Tally, facts_of, spec_hash
from promptfed.shared.api.report_schemas import RoundReport
from promptfed.shared.methods import METHODS
from promptfed.shared.privacy.accounting import training_event
from promptfed.shared.tensors import method_part
from promptfed.shared.tensors.torch_tensors import state_hash
from promptfed.testing.clients import DEADLINE, ScriptedClient, drive, update_body
from tests.support.coordinators import InThread, Make
from tests.support.open_phases import completed, open_first_phase
from tests.support.secure_clients import SecureClient


def told(coordinator: InThread, federation: str, round: int) -> Facts:
    return Facts.model_validate(coordinator.get(f"{federation}/rounds/{round}/card"))


def taken(coordinator: InThread, federation: str, round: int) -> Facts:
    """As `promptfed export` makes them of the coordinator's other answers."""
    token = coordinator.operator["Authorization"].split()[1]
    with Coordinator(coordinator.url, token) as api:
        found = api.run(take(federation, round))
    state = state_hash(method_part(found.state))
    hashes = Hashes(state=state, backbone=found.federation.backbone.fingerprint, spec=spec_hash(found.spec))
    kind = METHODS[found.federation.spec.method["name"]]
    return facts_of(found.federation, found.clients, found.tally, hashes, (kind.summary, kind.paper), round)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregation": {"server": {"optimizer": "adam"}}},
        {
            "privacy": {"level": "client", "clip": 1.0, "noise_multiplier": 0.3},
            "aggregation": {"weighting": "uniform", "max_weight_share": 1},
        },
    ],
    ids=["plain", "with a server optimizer", "protected"],
)
def test_the_coordinator_knows_what_an_exporter_finds(coordinator_with: Make, changes: dict[str, Any]) -> None:
    coordinator = coordinator_with()
    federation = coordinator.create(rounds=2, **changes)
    clients = coordinator.enrol(federation, "b", "a", num_samples=1000)
    clients += coordinator.enrol(federation, "referee", role="evaluator", num_samples=0)
    coordinator.post(f"{federation}/start")
    drive(clients)
    coordinator.until(federation, state="finished")
    for round in (0, 1, 2):
        facts = told(coordinator, federation, round)
        assert facts == taken(coordinator, federation, round)
        assert (facts.round, facts.rounds) == (round, 2)
        assert [one.name for one in facts.participants] == ["a", "b", "referee"]
        assert [one.updates_counted for one in facts.participants] == [round, round, 0]
        assert facts.accuracy.round == round
        reports = [coordinator.get(f"{federation}/rounds/{number}") for number in range(round + 1)]
        assert facts.bytes.up == sum(report["bytes_up"] for report in reports)
        assert (facts.privacy is not None) == ("privacy" in changes)
    coordinator.get(f"{federation}/rounds/3/card", status=404)


def sums_are_those_of_all_reports(coordinator: InThread, federation: str, round: int) -> Tally:
    """The tally after ``round``, which the reports of all rounds add up to."""
    known = coordinator.registry.get(federation)
    with coordinator.registry.database.read() as session:
        expected = Tally(round_report(session, known, number) for number in range(round + 1))
        actual = tally_of(session, known, round)
    if known.spec.privacy.level != "sample":
        expected.rounds_counted = 0  # which nothing shows
    shown = ("up", "down", "states", "measured", "rounds_counted", "spent", "smallest_sum")
    assert [getattr(actual, name) for name in shown] == [getattr(expected, name) for name in shown]
    assert +actual.counted == expected.counted
    return actual


@pytest.mark.both_databases
def test_sums_of_a_plain_federation(coordinator: InThread) -> None:
    federation, _ = completed(coordinator, "b", "a", rounds=3, evaluation={"every": 2})
    coordinator.until(federation, state="finished")
    for round in range(4):
        sums_are_those_of_all_reports(coordinator, federation, round)


@pytest.mark.both_databases
def test_sums_of_clients_that_protect_their_records(coordinator: InThread) -> None:
    privacy = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}
    federation, (a, b), (task, other) = open_first_phase(coordinator, privacy=privacy, rounds=2)
    units = coordinator.get(f"{federation}/clients")["clients"][0]["num_samples"]

    def send(client: ScriptedClient, task: dict[str, Any], epsilon: float) -> None:
        event = training_event(units, 32, 1, 1.0).as_json()
        spent = {"epsilon": epsilon, "delta": 1e-3, "noise": "secret", "events": [event]}
        body = update_body({"context": torch.ones(4, 8)}, task, metrics={}, privacy=spent)
        assert client.send(task, body).status_code == 201

    send(a, task, 1.5)
    send(b, other, 1.25)
    send(a, coordinator.training([a, b])[0], 2.5)
    spent = sums_are_those_of_all_reports(coordinator, federation, 2).spent
    assert {client: cost.epsilon for client, cost in spent.items()} == {"a": 2.5, "b": 1.25}


@pytest.mark.both_databases
def test_sums_of_changes_that_nobody_sees(coordinator: InThread) -> None:
    names = tuple("abcde")
    secure = {"participation": {"min_clients": len(names)}, "secure_aggregation": {"step_seconds": DEADLINE}}
    federation = coordinator.create(rounds=2, **secure)
    token = coordinator.token(federation)
    clients: list[ScriptedClient] = [SecureClient(coordinator.http, federation, name) for name in names]
    for client in clients:
        client.enrol(token).raise_for_status()
    coordinator.post(f"{federation}/start")
    drive(clients)
    tally = sums_are_those_of_all_reports(coordinator, federation, 2)
    assert (tally.smallest_sum, tally.counted["a"]) == (5, 2)


def test_a_card_reads_one_report_of_evaluations(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, _ = completed(coordinator, "b", "a", rounds=3)
    read: list[int] = []

    def reads(session: Session, known: Federation, number: int) -> RoundReport:
        read.append(number)
        return round_report(session, known, number)

    monkeypatch.setattr(exports, "round_report", reads)
    told(coordinator, federation, 2)
    assert read == [2]
