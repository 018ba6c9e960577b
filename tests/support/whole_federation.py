"""A whole federation, played by fakes that answer with deterministic tensors, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from promptfed.testing.clients import ScriptedClient, spec
from promptfed.testing.coordinator import OperatorCalls
from tests.support.waiting import PATIENCE

NAMES = ("a", "B", "c")  # by code point B comes first, in a dictionary a


def run(api: OperatorCalls, method: str, rounds: int) -> dict[str, Any]:
    """A federation of two clients, with a newcomer after the second round; what came of it."""
    return play(api, spec(name="kills", method={"name": method}, rounds=rounds), NAMES)


def play(
    api: OperatorCalls,
    raw: dict[str, Any],
    names: Sequence[str],
    client: type[ScriptedClient] = ScriptedClient,
    *,
    accuracy_step: float = 0.1,
    seconds: float = PATIENCE,
) -> dict[str, Any]:
    """The federation of a spec to its end, in which the last of ``names`` is a newcomer after the second round."""
    headers = api.operator | {"Idempotency-Key": raw["name"]}
    created = api.http.post("/v1/federations", json=raw, headers=headers)
    assert created.status_code in (200, 201), created.text
    federation = created.json()["id"]
    token = api.token(federation)
    clients = [client(api.http, federation, name, 0.5 + accuracy_step * i) for i, name in enumerate(names[:-1])]
    for trainer in clients:
        enrol(trainer, token)
    start = api.http.post(f"/v1/federations/{federation}/start", headers=api.operator)
    assert start.status_code == 200 or start.json().get("state") == "running", start.text
    newcomer = client(api.http, federation, names[-1], 0.9)
    end = time.monotonic() + seconds
    while [trainer for trainer in clients if not answer_one_task(trainer)]:
        assert time.monotonic() < end
        # The newcomer comes while round 2 trains: the same point of every run.
        if newcomer not in clients and api.get(federation)["round"] == 2:
            enrol(newcomer, token)
            clients.append(newcomer)
    return outcome(api, federation)


def enrol(client: ScriptedClient, token: str) -> None:
    """Enrol, or find that an earlier request has done so."""
    response = client.enrol(token)
    assert response.status_code in (200, 201), response.text


def answer_one_task(client: ScriptedClient) -> bool:
    """Carry out at most one task; whether the federation has ended."""
    response = client.task(wait=0.05)
    if response.status_code == 200:
        answer = client.answer(response.json())
        assert answer.status_code in (200, 201), answer.text
    return response.status_code == 410


def outcome(api: OperatorCalls, federation: str) -> dict[str, Any]:
    """State hashes, counted lists and accuracies of all rounds."""
    rounds = api.get(f"{federation}/rounds")["rounds"]
    return {
        "state": api.get(federation)["state"],
        "hashes": [report["state_hash"] for report in rounds],
        "counted": [
            [[(update["client"], update["weight"]) for update in phase["counted"]] for phase in report["phases"]]
            for report in rounds
        ],
        "accuracies": [
            {name: client["splits"] for name, client in report["evaluation"]["clients"].items()}
            for report in rounds
            if report["evaluation"]
        ],
    }
