"""Kill -9 on a coordinator that protects whole clients: the bits of a quiet run, one key for each closing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from promptfed.coordinator.store.tables import PhaseRow
from promptfed.testing.clients import ScriptedClient, spec
from tests.support.coordinators import ForkedCoordinator, in_thread
from tests.support.kill_campaign import KilledApi
from tests.support.waiting import wait_for

NAMES = ("a", "b", "c", "d")
CLOSING = ("phase-closed", "aggregate-computed", "state-before-commit", "state-committed", "update-entered")
ROUNDS = 5


def run(api: Any) -> dict[str, Any]:
    """A federation of Poisson samples to its end: its states, and who counted."""
    raw = spec(
        rounds=ROUNDS,
        privacy={"level": "client", "clip": 1.5, "noise_multiplier": 1.0, "accept_noise": True},
        aggregation={"weighting": "uniform"},
        participation={"min_clients": 4, "sampling": "poisson", "fraction": 0.5},
    )
    headers = api.operator | {"Idempotency-Key": "kills"}
    created = api.http.post("/v1/federations", json=raw, headers=headers)
    assert created.status_code in (200, 201), created.text
    federation = created.json()["id"]
    token = api.token(federation)
    clients: list[ScriptedClient] = [api.client(federation, name) for name in NAMES]
    for client in clients:
        assert client.enrol(token).status_code in (200, 201)
    start = api.http.post(f"/v1/federations/{federation}/start", headers=api.operator)
    assert start.status_code == 200 or start.json().get("state") == "running", start.text
    wait_for("the end", lambda: all([client.work() for client in clients]))  # noqa: C419 (all of them work)
    reports = api.get(f"{federation}/rounds")["rounds"]
    counted = [[one["client"] for one in phase["counted"]] for report in reports for phase in report["phases"]]
    return {
        "id": federation,
        "hashes": [report["state_hash"] for report in reports],
        "counted": counted,
        "epsilon": api.get(federation)["privacy"]["epsilon"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("point", CLOSING)
def test_secret_noise_is_drawn_once_a_phase_whenever_the_coordinator_dies(tmp_path: Path, point: str) -> None:
    """Its key is committed with the closing: what is released twice would be two releases for one budget."""
    process = ForkedCoordinator(tmp_path / "killed", fault=f"{point}:2")
    api = KilledApi(process, [])
    try:
        found = run(api)
        assert api.deaths == 1
        for round in range(1, ROUNDS + 1):
            states = api.post(f"{found['id']}/rounds/{round}/replay", json={})["states"]
            assert [state["same"] for state in states] == [True]
    finally:
        process.kill()
    with in_thread(tmp_path / "killed") as coordinator, coordinator.registry.database.read() as session:
        keys = list(session.scalars(select(PhaseRow.noise_key).where(PhaseRow.kind == "train")))
    assert len(set(keys)) == len(keys) == ROUNDS
    assert None not in keys
