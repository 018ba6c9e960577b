"""The facts of a card: whoever takes the result has the coordinator's, and the arithmetic is right."""

from __future__ import annotations

from typing import Any

import pytest

from promptfed.sdk.client import Coordinator
from promptfed.sdk.operations import take
from promptfed.shared.api.export_card import Facts
from promptfed.shared.tensors import method_part
from promptfed.shared.tensors.torch_tensors import state_hash
from promptfed.testing.clients import drive
from tests.support.coordinators import InThread, Make


def told(coordinator: InThread, federation: str, round: int) -> Facts:
    return Facts.model_validate(coordinator.get(f"{federation}/rounds/{round}/card"))


def taken(coordinator: InThread, federation: str, round: int) -> Facts:
    """As `promptfed export` takes them; their hash is of the state that comes beside them."""
    token = coordinator.operator["Authorization"].split()[1]
    with Coordinator(coordinator.url, token) as api:
        found = api.run(take(federation, round))
    assert found.facts.hashes.state == state_hash(method_part(found.state))
    assert found.facts.hashes.backbone == found.federation.backbone.fingerprint
    return found.facts


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregation": {"server": {"optimizer": "adam"}}},
        {
            "privacy": {"level": "client", "clip": 1.0, "noise_multiplier": 0.3, "accept_noise": True},
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
        means = {"adapted": 0.5, "zero_shot": 0.25}  # as every scripted client answers
        assert facts.accuracy.mean == {"trainer": means, "evaluator": means}
        reports = [coordinator.get(f"{federation}/rounds/{number}") for number in range(round + 1)]
        assert facts.bytes.up == sum(report["bytes_up"] for report in reports)
        assert (facts.privacy is not None) == ("privacy" in changes)
    coordinator.get(f"{federation}/rounds/3/card", status=404)
