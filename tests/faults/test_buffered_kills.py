"""Kill -9 on the coordinator of asynchronous rounds, at every named point and at random, on both databases.

The clients answer in a fixed order, one of them six rounds late: it ends where an undisturbed run ends, and the record
replays to the same bits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from promptfed.testing.clients import ScriptedClient, spec
from promptfed.testing.coordinator import OperatorCalls
from tests.support.coordinators import ForkedCoordinator, in_thread
from tests.support.kill_campaign import FILES, KilledApi, at_every_point, killed_at_random
from tests.support.postgres import PostgresServer
from tests.support.waiting import PATIENCE
from tests.support.whole_federation import enrol, outcome

NAMES = ("a", "b", "c", "d")
ROUNDS = 8
RANDOM_KILLS, MOST_RUNS = 20, 20
SPEC = spec(
    name="late",
    method={"name": "promptfl", "m": 4},
    rounds=ROUNDS,
    schedule={"kind": "buffered", "buffer": 2},
    participation={"min_clients": len(NAMES)},
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def pair(round: int) -> tuple[str, str]:
    return ("a", "d") if round == 7 else ("a", "b") if round % 2 else ("b", "c")


def task_of(client: ScriptedClient, kind: str) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE
    while (response := client.task(wait=0.5)).status_code != 200:
        assert time.monotonic() < end, response.text
    task: dict[str, Any] = response.json()
    assert task["kind"] == kind
    return task


def answer(client: ScriptedClient, task: dict[str, Any]) -> None:
    response = client.answer(task)
    assert response.status_code in (200, 201), response.text


def play(api: OperatorCalls) -> dict[str, Any]:
    """The federation to its end; what came of it."""
    created = api.http.post("/v1/federations", json=SPEC, headers=api.operator | {"Idempotency-Key": "late"})
    assert created.status_code in (200, 201), created.text
    federation = created.json()["id"]
    token = api.token(federation)
    clients = {name: ScriptedClient(api.http, federation, name, 0.5) for name in NAMES}
    for client in clients.values():
        enrol(client, token)
    api.http.post(f"/v1/federations/{federation}/start", headers=api.operator)
    for client in clients.values():
        answer(client, task_of(client, "evaluate"))
    late = task_of(clients["d"], "train")  # trains from the first state until round 7
    for round in range(1, ROUNDS + 1):
        for name in pair(round):
            answer(clients[name], late if name == "d" else task_of(clients[name], "train"))
    for client in clients.values():
        answer(client, task_of(client, "evaluate"))
    while api.get(federation)["state"] != "finished":
        time.sleep(0.02)
    found = outcome(api, federation)
    reports = [api.get(f"{federation}/rounds/{round}") for round in range(1, ROUNDS + 1)]
    found["staleness"] = [
        {one["client"]: one["staleness"] for one in report["phases"][0]["updates"] if one["verdict"] == "counted"}
        for report in reports
    ]
    for round in range(1, ROUNDS + 1):
        replayed = api.post(f"{federation}/rounds/{round}/replay", {})
        assert all(one["same"] for one in replayed["states"]), round
    return found


def killed(folder: Path, options: list[str], faults: list[str], kills: int, seed: int, files: bool) -> tuple[Any, int]:
    process = ForkedCoordinator(
        folder, *options, fault=faults.pop(0) if faults else "", constants=FILES if files else None
    )
    api = KilledApi(process, faults)
    try:
        with killed_at_random(process, kills, seed):
            found = play(api)
        return found, api.deaths
    finally:
        process.kill()


@pytest.mark.both_databases
def test_killed_anywhere_it_ends_where_an_undisturbed_run_ends(
    tmp_path: Path, database: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with in_thread(tmp_path / "undisturbed") as server:
        expected = play(server)
    assert expected["state"] == "finished"
    assert expected["staleness"][6] == {"a": 1, "d": 6}

    def options() -> list[str]:
        server: PostgresServer | None = request.getfixturevalue("postgres") if database else None
        return ["--database-url", server.schema()] if server else []

    named = [(fault, files) for files in (False, True) for fault in at_every_point(0, files=files)]
    for number, (fault, files) in enumerate(named):
        point = fault.split(":")[0]
        found, deaths = killed(tmp_path / f"named-{number}", options(), [f"{point}:1"], 0, 0, files)
        assert (found, deaths) == (expected, 1), point
    print(f"\nkilled {len(named)} times at named points", end="")
    deaths = 0
    for run in range(MOST_RUNS):
        found, times = killed(tmp_path / f"random-{run}", options(), [], RANDOM_KILLS - deaths, run, False)
        assert found == expected
        deaths += times
        if deaths >= RANDOM_KILLS:
            break
    assert deaths >= RANDOM_KILLS, "runs are over before anything can be killed"
    print(f", {deaths} times at random in {run + 1} runs")
