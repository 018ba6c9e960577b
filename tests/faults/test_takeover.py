"""Three coordinators on one database, disturbed in every way: a short run of ``benchmarks.takeover``."""

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
def test_however_holders_are_disturbed_the_run_is_the_undisturbed_one(
    tmp_path: Path, postgres: PostgresServer, object_store: str, object_server: ObjectStoreServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)
    group = Group(tmp_path, postgres.schema(), object_store, dict(object_server.environment))
    try:
        wanted = {"kill": 2, "stop": 1, "inside": 1, "cut": 1, "store": 1, "freeze": 1}
        found = campaign(wanted, 12, ["promptfl", "two_phase"], 0, tmp_path, group)
    finally:
        group.close()
    assert found["disturbances"] == wanted
    assert found["updates"] > 0
    assert found["stale_answers"] == []
    assert found["watched_answers"] > 0
    assert found["takeover_seconds"]["most"] < 10
