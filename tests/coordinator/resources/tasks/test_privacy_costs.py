"""What updates say that they have cost."""

from __future__ import annotations

import re

import pytest
import torch

from promptfed.coordinator.problems import PrivacyMismatch, PrivacyMissing
from promptfed.coordinator.resources.tasks.privacy_costs import spent_by
from promptfed.shared.messages import PrivacyEvent, SpendReport
from promptfed.shared.privacy.accounting import COARSE, Event, epsilon_of, training_event
from promptfed.shared.tensors.torch_tensors import encode
from tests.support.coordinators import InThread
from tests.support.open_phases import enrolled, kind, open_first_phase

GOOD = {"context": torch.ones(4, 8)}


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


SAMPLE = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}


@pytest.mark.extended
def test_updates_of_a_protected_federation_cost_what_the_terms_give(coordinator: InThread) -> None:
    federation, (a, _), (task, _) = open_first_phase(coordinator, privacy=SAMPLE, training={"epochs": 1})
    assert task["config"]["privacy"]["noise_multiplier"] == 1.0
    count = coordinator.get(f"{federation}/clients")["clients"][0]["num_samples"]
    right = training_event(count, 32, 1, 1.0).as_json()
    about = {"task_id": task["task_id"], "payload_sha256": task["payload"]["sha256"], "metrics": {}}
    spent = {"epsilon": 3.5, "delta": 1e-3, "noise": "secret"}
    bad = {
        "privacy-missing": about,
        "privacy-mismatch": about | {"privacy": spent | {"events": [right | {"z": 0.5}]}},
        "bad-metadata": about | {"privacy": spent | {"events": []}},
    }
    for expected, metadata in bad.items():
        refused = a.send(task, encode(GOOD, metadata))
        assert (refused.status_code, kind(refused)) == (422, expected), refused.text
    for wrong in (right | {"count": right["count"] + 1}, right | {"q": right["q"] / 2}):
        refused = a.send(task, encode(GOOD, about | {"privacy": spent | {"events": [wrong]}}))
        assert kind(refused) == "privacy-mismatch"
    alone = epsilon_of([Event(**right)], 1e-3)
    for false in ({"epsilon": 0.98 * alone}, {"epsilon": 0}, {"delta": 0.5}, {"delta": 1e-11}):
        refused = a.send(task, encode(GOOD, about | {"privacy": spent | false | {"events": [right]}}))
        assert kind(refused) == "privacy-mismatch", "a ledger holds what this update costs, at a small δ"
    for beyond in ({"epsilon": 1001}, {"epsilon": 1e308}, {"epsilon_replace_one": 1e10}):
        refused = a.send(task, encode(GOOD, about | {"privacy": spent | beyond | {"events": [right]}}))
        assert kind(refused) == "bad-metadata"
    assert a.send(task, encode(GOOD, about | {"privacy": spent | {"events": [right]}})).status_code == 201


def test_an_unprotected_federation_takes_no_update_that_says_what_it_cost(coordinator: InThread) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator)
    assert "privacy" not in task["config"]
    about = {"task_id": task["task_id"], "payload_sha256": task["payload"]["sha256"], "metrics": {}}
    event = {"mechanism": "gaussian", "q": 1.0, "z": 1.0, "count": 1}
    spent = {"epsilon": 1.5, "delta": 1e-3, "noise": "secret", "events": [event]}
    assert kind(a.send(task, encode(GOOD, about | {"privacy": spent}))) == "privacy-mismatch"


def spend(delta: float = 1e-3, times: float = 1.0, z: float = 1.0) -> SpendReport:
    """Of 10 images; the ledger stands at ``times`` what the update costs alone."""
    event = training_event(10, 32, 1, z)
    epsilon = times * epsilon_of([event], delta, COARSE)
    events = [PrivacyEvent.model_validate(event.as_json())]
    return SpendReport(events=events, epsilon=epsilon, delta=delta, noise="secret")


COSTS: list[tuple[SpendReport | None, str | None]] = [
    (spend(), None),
    (spend(times=0.9901), None),
    (spend(times=0.9899), "the ledger is said to stand at ε = "),
    (spend(times=2), None),
    (spend(1e-4), None),
    (spend(1.001e-3), "δ = 0.001001 is larger than the federation allows (0.001)"),
    (spend(0.1), "δ = 0.1 is not between 1e-10 and 1/10"),
    (spend(z=1.01), "10 samples give {'mechanism': 'gaussian', 'q': 1.0, 'z': 1.0, 'count': 1}"),
    (None, "is protected at level sample, and the update does not say what it cost"),
]


def test_a_cost_is_held_against_the_terms(coordinator: InThread) -> None:
    id, _ = enrolled(coordinator, "a", training={"epochs": 1}, privacy=SAMPLE | {"delta": 1e-3})
    federation = coordinator.registry.get(id)
    for told, why in COSTS:
        given = (coordinator.registry.database, federation, federation.clients["a"], told)
        if told is None or why is not None:
            refused = pytest.raises(PrivacyMissing if told is None else PrivacyMismatch, match=re.escape(why or ""))
            with refused:
                spent_by(*given)
            continue
        alone = epsilon_of([told.events[0].event()], told.delta, COARSE)
        about = {"epsilon": alone, "ledger_epsilon": told.epsilon, "delta": told.delta, "noise_multiplier": 1.0}
        assert about.items() <= (spent_by(*given) or {}).items()
