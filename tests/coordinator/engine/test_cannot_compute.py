"""Torch that is missing: the federation pauses, and nothing of it is lost."""

from __future__ import annotations

from typing import Any

import pytest

from promptfed.coordinator.aggregation import global_state
from promptfed.testing.clients import drive
from tests.support.coordinators import InThread


@pytest.mark.parametrize("function", ["aggregate", "payload"])
def test_torch_that_is_missing_pauses_the_federation_until_it_is_resumed(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    call, missed = global_state.call, []

    def missing_once(federation: Any, name: str, *arguments: Any) -> Any:
        if name == function and federation.name == "eyes" and federation.run.round == 2 and not missed:
            missed.append(name)
            raise global_state.NoTorch("there is no torch")
        return call(federation, name, *arguments)

    hashes = []
    for name in ("ears", "eyes"):
        monkeypatch.setattr(global_state, "call", missing_once)
        federation = coordinator.create(name=name, rounds=2)
        clients = coordinator.enrol(federation, "a", "b")
        coordinator.post(f"{federation}/start")
        if name == "eyes":
            while coordinator.get(federation)["state"] != "paused":
                for client in clients:
                    client.work()
            assert coordinator.get(federation)["reason"] == "there is no torch; then resume"
            coordinator.post(f"{federation}/resume")
        drive(clients)
        coordinator.until(federation, state="finished")
        hashes.append(coordinator.get(f"{federation}/rounds/2")["state_hash"])
    assert missed == [function]
    assert hashes[0] == hashes[1], "nothing is lost"


def test_a_replay_that_needs_torch_where_there_is_none_says_what_to_do(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = coordinator.create(rounds=1)
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    drive(clients)

    def without_torch(federation: Any, name: str, *arguments: Any) -> Any:
        raise global_state.NoTorch(f"{name} needs torch: {global_state.GET_TORCH}")

    monkeypatch.setattr(global_state, "call", without_torch)
    answer = coordinator.post(f"{federation}/rounds/1/replay", {}, status=503)
    assert answer["type"].endswith("/method-absent")
    assert "coordinator-torch" in answer["detail"]
