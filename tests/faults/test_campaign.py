"""Crash equivalence: every kind of method on both databases, hundreds of kills -9; one kind in the second tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from promptfed.shared.methods import METHODS
from tests.support.coordinators import ForkedCoordinator, in_thread
from tests.support.fault_points import OF_FILES
from tests.support.kill_campaign import (
    CASES,
    DELETION_FAULTS,
    FILES,
    Case,
    KilledApi,
    at_every_point,
    delete_while_killed,
    killed_at_random,
    play_case,
)
from tests.support.postgres import PostgresServer
from tests.support.stored import wait_until_empty
from tests.support.two_phase import TwoPhase

RANDOM_KILLS = 10
MOST_RUNS = 10

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(autouse=True)
def two_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)


def undisturbed(case: Case, folder: Path) -> dict[str, Any]:
    with in_thread(folder) as server:
        found = play_case(server, case)
    assert found["state"] == "finished"
    assert len(set(found["hashes"])) == case.rounds + 1, "every round has changed the state"
    assert len(found["counted"][-1][0]) == case.clients + 1, "the newcomer took part"
    return found


def killed(
    case: Case, folder: Path, options: list[str], faults: list[str], kills: int, seed: int, files: bool = False
) -> tuple[dict[str, Any], int]:
    """What comes of a run that dies at ``faults`` or so many times at random, and how often it did.

    One that dies at named points is deleted afterwards, and dies at those of the deletion: nothing of it may be left.
    """
    named = bool(faults)
    constants = FILES if files else None
    process = ForkedCoordinator(folder, *options, fault=faults.pop(0) if faults else "", constants=constants)
    api = KilledApi(process, faults)
    try:
        with killed_at_random(process, kills, seed):
            found = play_case(api, case)
        assert faults == [], "every point was reached"
        deaths = api.deaths
        if named:
            deaths += delete_while_killed(process, "campaign")
    finally:
        process.kill()
    if named:
        with in_thread(folder, **({"database_url": options[1]} if options else {})) as coordinator:
            wait_until_empty(coordinator)
    return found, deaths


@pytest.mark.parametrize("files", [False, True], ids=["rows", "files"])
def test_killed_at_every_named_instant_it_ends_where_an_undisturbed_run_ends(tmp_path: Path, files: bool) -> None:
    """Blobs are rows; where they are files, at the instants that only files have."""
    case, faults = CASES["two_phase"], [f"{name}:1" for name in OF_FILES] if files else at_every_point(0)
    points = len(faults)
    found, deaths = killed(case, tmp_path / "killed", [], faults, 0, seed=0, files=files)
    assert found == undisturbed(case, tmp_path / "undisturbed")
    assert deaths == points + len(DELETION_FAULTS)


@pytest.mark.slow
@pytest.mark.both_databases
@pytest.mark.parametrize("name", CASES)
def test_killed_anywhere_it_ends_where_an_undisturbed_run_ends(
    name: str, tmp_path: Path, database: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    case = CASES[name]
    expected = undisturbed(case, tmp_path / "undisturbed")

    def options() -> list[str]:
        server: PostgresServer | None = request.getfixturevalue("postgres") if database else None
        return ["--database-url", server.schema()] if server else []

    named, at_random, runs = [], 0, 0
    for run in range(2):
        files = run == 1
        faults = at_every_point(run, files=files)
        found, deaths = killed(case, tmp_path / f"named-{run}", options(), faults, 0, seed=0, files=files)
        assert found == expected
        named.append(deaths)
    # A run may be over before all its kills have come: as many runs as it takes.
    while at_random < RANDOM_KILLS:
        found, deaths = killed(
            case, tmp_path / f"random-{runs}", options(), [], RANDOM_KILLS - at_random, seed=2 + runs
        )
        assert found == expected
        at_random, runs = at_random + deaths, runs + 1
        assert runs < MOST_RUNS, "a run is over before anything can be killed"
    kind = "PostgreSQL" if database else "SQLite"
    told = f"killed {named[0]} + {named[1]} times at named points, {at_random} times at random in {runs} runs"
    print(f"\n{name} on {kind}: {told}")
