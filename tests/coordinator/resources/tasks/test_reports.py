"""Accuracies and failures that clients report."""

from __future__ import annotations

import pytest
import torch

from promptfed.testing.clients import update_body
from tests.support.coordinators import InThread
from tests.support.open_phases import kind, launched, open_first_phase

GOOD = {"context": torch.ones(4, 8)}


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


@pytest.mark.both_databases
def test_an_evaluation_is_stored_once(coordinator: InThread) -> None:
    federation, (a, _) = launched(coordinator, "a", "b")
    task = coordinator.task(a)
    assert [a.evaluate(task).status_code, a.evaluate(task).status_code] == [201, 200]
    assert kind(a.evaluate(task, accuracy=0.9)) == "already-answered"
    url = f"/v1/federations/{federation}/tasks/{task['task_id']}/evaluation"
    for accuracy in (1.5, -0.1, "NaN"):
        body = {"splits": {"test": {"accuracy": accuracy, "num_samples": 3}}}
        response = coordinator.http.put(url, json=body, headers=a.headers)
        assert (response.status_code, kind(response)) == (422, "invalid-request")


def test_a_reported_failure_is_not_waited_for(coordinator: InThread) -> None:
    part = {"min_clients": 3, "quorum": 0.3}
    federation, (a, b, c), (task_a, task_b, task_c) = open_first_phase(
        coordinator, *"abc", participation=part, rounds=1
    )
    about = {"type": "bad-shares", "detail": f"ed25519:{'0' * 64}"}  # as if there were any here
    url = f"{c.path}/tasks/{task_c['task_id']}/failure"
    assert coordinator.http.post(url, json=about, headers=c.headers).status_code == 200
    assert [a.fail(task_a).status_code, a.fail(task_a).status_code] == [200, 200]
    assert kind(a.send(task_a, update_body(GOOD, task_a))) == "phase-closed"
    b.answer(task_b)
    assert kind(b.fail(task_b)) == "already-answered"
    coordinator.until(federation, phase="evaluation")
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert phase["failed"] == [{"client": "a", "type": "out-of-memory", "detail": "no room"}, {"client": "c", **about}]
