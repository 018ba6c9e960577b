"""Whole tuned federations: kills lead to the same choice and state, the winner trains afresh, failed trials lose."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from promptfed.coordinator.store.fault_points import TUNING_POINTS
from promptfed.testing.clients import drive
from promptfed.testing.coordinator import LocalCoordinator, local_coordinator
from tests.support.coordinators import ForkedCoordinator
from tests.support.tuned import NAMES, outcome, play, tuned
from tests.support.waiting import PATIENCE

FAULTS = (f"{TUNING_POINTS[0]}:2", *(f"{point}:1" for point in TUNING_POINTS[1:]), "state-committed:5")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_killed_coordinator_comes_to_the_same_choice(
    tmp_path: Path, fault: str, coordinator: LocalCoordinator
) -> None:
    undisturbed = str(coordinator.post("/v1/federations", tuned(), status=201)["id"])
    coordinator.enrol(undisturbed, *NAMES)
    coordinator.start(undisturbed)
    play(coordinator, undisturbed)

    process = ForkedCoordinator(tmp_path / "killed")
    stopped = threading.Event()

    def start_again() -> None:
        process.wait()
        process.start()
        stopped.set()

    try:
        federation = str(process.post("/v1/federations", tuned(), status=201)["id"])
        process.enrol(federation, *NAMES)
        process.kill()
        process.start(fault)
        watcher = threading.Thread(target=start_again)
        watcher.start()
        process.post(f"{federation}/start")
        play(process, federation)
        watcher.join(PATIENCE)
        assert stopped.is_set(), "it was killed, and started again"
        assert outcome(process, federation) == outcome(coordinator, undisturbed)
    finally:
        process.kill()


def test_a_restart_between_the_trials_changes_nothing(tmp_path: Path) -> None:
    with local_coordinator(tmp_path) as first:
        federation = str(first.post("/v1/federations", tuned(), status=201)["id"])
        first.enrol(federation, *NAMES)
        first.start(federation)
        play(first, federation, until=lambda: len(first.get(federation)["trials"]) == 3)
    with local_coordinator(tmp_path) as second:
        assert second.get(federation)["state"] == "enrolling"
        play(second, federation)
        assert outcome(second, federation)[:2] == ("finished", 2)


def test_the_winner_trains_as_if_it_had_been_the_method_from_the_beginning(coordinator: LocalCoordinator) -> None:
    federation = str(coordinator.post("/v1/federations", tuned(), status=201)["id"])
    coordinator.enrol(federation, *NAMES)
    coordinator.start(federation)
    play(coordinator, federation)
    plain = coordinator.create(name="plain", training={"learning_rate": 0.03})
    clients = coordinator.enrol(plain, *NAMES)
    coordinator.start(plain)
    drive(clients)
    assert coordinator.get(federation)["state_hash"] == coordinator.get(plain)["state_hash"]
    replay = coordinator.post(f"{federation}/rounds/2/replay", {})
    assert all(state["same"] for state in replay["states"])


def test_a_trial_that_fails_is_the_worst(coordinator: LocalCoordinator) -> None:
    """The operator cancels the trial of the best candidate: the next one is chosen."""
    federation = str(coordinator.post("/v1/federations", tuned(), status=201)["id"])
    coordinator.enrol(federation, *NAMES)
    coordinator.start(federation)

    def third_is_open() -> bool:
        return coordinator.get(federation)["trials"][-1]["candidate"] == 2

    play(coordinator, federation, until=third_is_open)
    trial = coordinator.get(federation)["trials"][-1]["federation"]
    refused = coordinator.http.delete(f"/v1/federations/{trial}", headers=coordinator.operator)
    assert "cancel the trial" in refused.json()["detail"]
    coordinator.post(f"{trial}/cancel")
    play(coordinator, federation)
    assert coordinator.get(federation)["spec"]["tuning"]["chosen"] == 3
