"""What a restart reads is what was held, also within a round of two phases."""

from __future__ import annotations

import pytest

from promptfed.coordinator.engine import recovery
from promptfed.coordinator.store.tables import DELETING, FederationRow
from promptfed.shared.methods import METHODS
from tests.support.coordinators import InProcess
from tests.support.open_phases import answer_all, open_first_phase
from tests.support.two_phase import TwoPhase


def test_who_answered_a_round_s_first_phase_is_known_in_its_second(
    coordinator: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)
    federation, clients, tasks = open_first_phase(coordinator, method={"name": "two_phase"}, rounds=1)
    registry, seen = coordinator.registry, []
    for step in (0, 1):
        if step:
            answer_all(clients, tasks)
            coordinator.training(clients)
        with registry.database.read() as session:
            loaded = recovery.load_one(session, federation, 0.0)
        assert loaded is not None
        held = registry.get(federation).run
        seen.append((loaded.run.step, loaded.run.answered_first, loaded.run.sample_size))
        assert seen[-1] == (held.step, held.answered_first, held.sample_size)
    assert seen == [(0, (), 0), (1, ("a", "b"), 2)]
    with registry.database.write() as session:
        session.get_one(FederationRow, federation).state = DELETING
        session.flush()
        assert recovery.load_one(session, federation, 0.0) is None
        session.rollback()
    with registry.database.read() as session:
        assert recovery.load_one(session, "another", 0.0) is None
