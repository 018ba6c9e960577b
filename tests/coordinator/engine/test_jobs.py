"""Jobs of small federations: one client, verdicts under noise, and federations that are taken up again."""

from __future__ import annotations

import pytest
import torch

from promptfed.coordinator.engine import sums
from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.testing.clients import update_body
from tests.support.coordinators import InThread
from tests.support.open_phases import completed, launched
from tests.support.waiting import wait_for


def test_one_client_alone_gets_its_payloads(coordinator: InThread) -> None:
    federation, _ = completed(coordinator, "a", participation={"min_clients": 1}, rounds=1)
    assert coordinator.get(federation)["state"] == "finished"
    wait_for("no job is left", lambda: not coordinator.registry._computing)


def test_under_noise_long_changes_are_clipped_and_sums_are_counted(coordinator: InThread) -> None:
    privacy = {"level": "client", "clip": 1.0, "noise_multiplier": 0.5, "accept_noise": True}
    changes = {"privacy": privacy, "aggregation": {"weighting": "uniform", "max_weight_share": 1}, "rounds": 1}
    federation, clients = launched(coordinator, "a", "b", **changes)
    registry = coordinator.registry

    def counted() -> int:
        with registry.database.read() as session:
            return sums.released(session, registry.get(federation))

    tasks = coordinator.training(clients)
    assert counted() == 0
    for client, task, length in zip(clients, tasks, (0.9, 1.1), strict=True):
        begun = client.payload(task)
        moved = {name: tensor + length / tensor.numel() ** 0.5 for name, tensor in begun.items()}
        assert all(torch.isfinite(tensor).all() for tensor in moved.values())
        assert client.send(task, update_body(moved, task)).status_code == 201
    wait_for("the sum", lambda: counted() == 1)
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert [(one["verdict"], one["influence"]) for one in phase["updates"]] == [("counted", 0.5), ("clipped", 0.5)]


def test_what_is_stored_is_taken_up_again_until_the_end(coordinator: InThread) -> None:
    federation, registry = coordinator.create(), coordinator.registry
    before = registry.epoch
    with registry.exclusively():
        registry.federations, registry.leftovers = {}, False
        registry.come_back()
        assert (list(registry.federations), registry.leftovers, registry.away) == ([federation], True, False)
    assert registry.epoch != before
    registry.close()
    after = registry.epoch
    with pytest.raises(RegistryClosed):
        registry.come_back()
    assert registry.epoch == after, "nothing is read any more"
