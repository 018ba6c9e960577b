"""What updates say that they have cost."""

from __future__ import annotations

import pytest
import torch

from promptfed.shared.privacy.accounting import Event, epsilon_of, training_event
from promptfed.shared.tensors.torch_tensors import encode
from tests.support.coordinators import InThread
from tests.support.open_phases import kind, open_first_phase

GOOD = {"context": torch.ones(4, 8)}


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


SAMPLE = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}


@pytest.mark.door
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


@pytest.mark.door
def test_an_unprotected_federation_takes_no_update_that_says_what_it_cost(coordinator: InThread) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator)
    assert "privacy" not in task["config"]
    about = {"task_id": task["task_id"], "payload_sha256": task["payload"]["sha256"], "metrics": {}}
    event = {"mechanism": "gaussian", "q": 1.0, "z": 1.0, "count": 1}
    spent = {"epsilon": 1.5, "delta": 1e-3, "noise": "secret", "events": [event]}
    assert kind(a.send(task, encode(GOOD, about | {"privacy": spent}))) == "privacy-mismatch"
