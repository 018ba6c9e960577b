"""Whole towers: the disk that they need is told when a federation is created; their states are no JSON."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest

from promptfed.coordinator.api import results
from tests.coordinator.aggregation.test_large_updates import VIT_B_32
from tests.support.coordinators import InThread
from tests.support.open_phases import open_first_phase

BYTES = 4 * 87_849_216  # of a ViT-B/32's tower
Usage = namedtuple("Usage", "total used free")


def spec_of(name: str, **method: Any) -> dict[str, Any]:
    backbone = {"model": "ViT-B-32", "pretrained": "openai", "shape": VIT_B_32.model_dump(mode="json")}
    return {"name": name, "method": {"name": "fedavg", **method}, "backbone": backbone, "rounds": 2}


def free(monkeypatch: pytest.MonkeyPatch, bytes: int) -> None:
    monkeypatch.setattr("promptfed.coordinator.engine.disk_room.shutil.disk_usage", lambda path: Usage(0, 0, bytes))


def test_the_disk_that_is_needed_is_told_at_creation(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 10 * BYTES)
    created = coordinator.post("/v1/federations", json=spec_of("whole"), status=201)
    # Updates and payload of two rounds, and two states that are being written, for as many as the spec asks for.
    least = created["spec"]["participation"]["min_clients"]
    needed = 2 * (least + 1) * BYTES + 2 * BYTES
    assert created["disk"] == {"needed": needed, "trainers": least, "free": 10 * BYTES}
    assert coordinator.get("whole")["disk"] == created["disk"]
    assert coordinator.post("/v1/federations", json=spec_of("norms", trainable="norms"), status=201)["disk"] is None
    unknown = spec_of("unknown") | {"backbone": {"model": "ViT-B-32", "pretrained": "openai"}}
    assert coordinator.post("/v1/federations", json=unknown, status=201)["disk"] is None


def test_a_disk_without_room_is_told_before_anything_is_created(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, BYTES)
    refused = coordinator.post("/v1/federations", json=spec_of("whole"), status=507)
    assert refused["type"].endswith("/storage-full")
    assert f"bytes of disk at once, and {BYTES:,} are free: make room" in refused["detail"]
    assert coordinator.get("/v1/federations")["federations"] == []


def test_a_large_state_is_no_json(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, _, _ = open_first_phase(coordinator)
    monkeypatch.setattr(results, "MOST_JSON_NUMBERS", 31)
    refused = coordinator.get(f"{federation}/prompts", status=406, headers={"Accept": "application/json"})
    assert "the state has 32 numbers; JSON is given up to 31: ask for application/octet-stream" in refused["detail"]
    url = f"/v1/federations/{federation}/prompts"
    answer = coordinator.http.get(url, headers=coordinator.operator | {"Accept": "application/octet-stream"})
    assert answer.status_code == 200
