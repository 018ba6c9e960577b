"""Kill -9 on the coordinator at every named instant and at random ones: it ends where an undisturbed run ends.

The clients are fakes over plain httpx that answer with deterministic tensors, try again when nobody answers, and never
compute an update twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from promptfed.shared.methods import METHODS
from tests.support.coordinators import ForkedCoordinator, InThread, in_thread
from tests.support.kill_campaign import (
    DELETION_FAULTS,
    FILES,
    KilledApi,
    at_every_point,
    delete_while_killed,
    killed_at_random,
)
from tests.support.stored import wait_until_empty
from tests.support.two_phase import TwoPhase
from tests.support.whole_federation import run

ROUNDS = 6


@pytest.fixture
def two_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)


def undisturbed(folder: Path, method: str) -> dict[str, Any]:
    server: InThread
    with in_thread(folder / "undisturbed") as server:
        found = run(server, method, ROUNDS)
    assert found["state"] == "finished"
    assert len(found["counted"][ROUNDS][0]) == 3, "the newcomer took part"
    return found


@pytest.mark.parametrize("files", [False, True], ids=["rows", "files"])
def test_killed_at_every_named_instant_it_ends_where_an_undisturbed_run_ends(
    tmp_path: Path, two_phase: None, files: bool
) -> None:
    expected = undisturbed(tmp_path, "two_phase")
    faults = at_every_point(0, files=files)
    instants = len(faults)
    process = ForkedCoordinator(tmp_path / "killed", fault=faults.pop(0), constants=FILES if files else None)
    api = KilledApi(process, faults)
    try:
        found = run(api, "two_phase", ROUNDS)
        deaths = api.deaths
        assert faults == [], "every point was reached"
        assert found == expected
        assert deaths == instants
        if not files:
            assert delete_while_killed(process, "kills") == len(DELETION_FAULTS)
    finally:
        process.kill()
    if not files:
        with in_thread(tmp_path / "killed") as coordinator:
            wait_until_empty(coordinator)


def test_killed_at_random_instants_it_ends_where_an_undisturbed_run_ends(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, "promptfl")
    deaths = 0
    for seed in range(5, 15):  # a run may be over before two kills have come: as many runs as it takes
        process = ForkedCoordinator(tmp_path / f"killed-{seed}")
        api = KilledApi(process, [])
        try:
            with killed_at_random(process, 5, seed=seed):
                found = run(api, "promptfl", ROUNDS)
        finally:
            process.kill()
        assert found == expected
        deaths += api.deaths
        if deaths >= 2:
            break
    assert deaths >= 2
