"""What requests need of a federation without asking the database."""

from __future__ import annotations

from typing import Any

import pytest

from promptfed.coordinator.domain.federation import Federation
from promptfed.shared.methods.core.interface import ServerContext
from promptfed.testing.clients import drive
from tests.support.coordinators import InThread
from tests.support.open_phases import open_first_phase


def test_the_context_is_kept_as_long_as_it_would_come_out_the_same(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole run with a newcomer and a withdrawn client: whenever it is asked for, it is as made anew."""
    asked: list[tuple[ServerContext, ServerContext]] = []
    context = Federation.context

    def compared(self: Federation, names: list[str] | None = None) -> Any:
        found = context(self, names)
        if names is None:
            asked.append((found, self._context([n for n, member in self.run.members.items() if member.joined])))
        return found

    monkeypatch.setattr(Federation, "context", compared)
    federation, clients, _ = open_first_phase(coordinator, "a", "b", "c", rounds=4)
    known = coordinator.registry.federations[federation]
    assert known.context() is known.context()
    clients += coordinator.enrol(federation, "late")
    coordinator.delete(f"{federation}/clients/c")
    del clients[2]
    drive(clients)
    assert coordinator.get(federation)["state"] == "finished"
    assert all(kept == plain for kept, plain in asked)
    rosters = {tuple((one.name, one.active) for one in kept.clients) for kept, _ in asked}
    assert (("a", True), ("b", True), ("c", True)) in rosters
    assert (("a", True), ("b", True), ("c", False), ("late", True)) in rosters
    assert len({id(kept) for kept, _ in asked}) < len(asked)
