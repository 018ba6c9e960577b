"""A whole federation, played by fakes that answer with deterministic tensors, and what came of it."""

from __future__ import annotations

import time
from typing import Any

from tests.support.coordinators import Api
from tests.support.fake_clients import FakeClient, spec

NAMES = ("a", "B", "c")  # by code point B comes first, in a dictionary a


def run(api: Api, method: str, rounds: int) -> dict[str, Any]:
    """A whole federation, with a newcomer after the second round; what came of it."""
    raw = spec(name="kills", method={"name": method}, rounds=rounds)
    headers = api.operator | {"Idempotency-Key": "kills"}
    federation = api.http.post("/v1/federations", json=raw, headers=headers).json()["id"]
    token = api.token(federation)
    clients = [FakeClient(api.http, federation, name, 0.5 + 0.1 * i) for i, name in enumerate(NAMES[:2])]
    for client in clients:
        assert client.enrol(token).status_code in (200, 201)
    start = api.http.post(f"/v1/federations/{federation}/start", headers=api.operator)
    assert start.status_code == 200 or start.json()["state"] == "running", start.text
    late = FakeClient(api.http, federation, NAMES[2], 0.9)
    end = time.monotonic() + 120
    while [client for client in clients if not one_task(client)]:
        assert time.monotonic() < end
        # The newcomer comes while round 2 trains: the same point of every run.
        if late not in clients and api.get(federation)["round"] == 2:
            assert late.enrol(token).status_code in (200, 201)
            clients.append(late)
    return outcome(api, federation)


def one_task(client: FakeClient) -> bool:
    """Carry out at most one task; whether the federation has ended."""
    response = client.task(wait=0.05)
    if response.status_code == 200:
        assert client.answer(response.json()).status_code in (200, 201)
    return response.status_code == 410


def outcome(api: Api, federation: str) -> dict[str, Any]:
    """State hashes, counted lists and accuracies of all rounds."""
    rounds = api.get(f"{federation}/rounds")["rounds"]
    return {
        "state": api.get(federation)["state"],
        "hashes": [one["state_hash"] for one in rounds],
        "counted": [
            [[(u["client"], u["weight"]) for u in phase["counted"]] for phase in one["phases"]] for one in rounds
        ],
        "accuracies": [
            {name: found["splits"] for name, found in one["evaluation"]["clients"].items()} for one in rounds
        ],
    }
