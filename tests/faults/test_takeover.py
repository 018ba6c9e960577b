"""Three coordinators on one database, killed and paused: a short run of the campaign of ``benchmarks.takeover``."""

from __future__ import annotations

from pathlib import Path

import pytest

from promptfed.shared.methods import METHODS
from tests.support.object_store import ObjectStoreServer
from tests.support.postgres import PostgresServer
from tests.support.takeovers import Group, campaign
from tests.support.two_phase import TwoPhase


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_and_paused_the_run_is_the_undisturbed_one(
    tmp_path: Path, postgres: PostgresServer, object_store: str, object_server: ObjectStoreServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)
    group = Group(tmp_path, postgres.schema(), object_store, dict(object_server.environment))
    try:
        found = campaign(3, 1, 12, ["promptfl", "two_phase"], 0, tmp_path, group)
    finally:
        group.close()
    assert (found["kills"], found["stops"]) == (3, 1)
    assert found["updates"] > 0
    assert len(found["takeover_seconds"]["all"]) == 4
