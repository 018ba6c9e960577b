"""A round passes the points at which the campaigns of kills end a process, in the order in which things get durable."""

from __future__ import annotations

import pytest

from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared.data import open_source
from promptfed.shared.methods import resolve_spec
from promptfed.shared.service import fault_points

DATA = "symbols:neon?topic=weather&classes=base&per_class=1&test_per_class=1"
BEFORE = ["federation-created", "client-enrolled", "start-before-commit", "start-committed"]
BEFORE += ["payloads-before-commit", "payloads-committed", "training-step", "pending-written"]
UPDATE = ["update-received", "update-checked", "update-entered", "group-stepped", "blob-row-written"]
UPDATE += ["group-before-commit", "group-committed"]
CLOSED = ["phase-closed", "aggregate-computed", "state-before-commit", "blob-row-written", "state-committed"]


class Passed(str):
    """An armed point that is none: it notes which are passed."""

    __slots__ = ()
    names: list[str] = []  # noqa: RUF012 - one test fills and reads it
    __hash__ = str.__hash__

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self, "", ""

    def __ne__(self, name: object) -> bool:
        self.names.append(str(name))
        return True


def test_a_round_passes_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"name": "x", "method": {"name": "fedlp"}, "rounds": 1, "backbone": {"model": "promptfed-tiny"}}
    monkeypatch.setattr(fault_points, "_armed", Passed())
    simulate(resolve_spec(spec | {"class_names": list(open_source(DATA).class_names)}), [Site("a", DATA)])
    left = iter(Passed.names)
    assert [name for name in [*BEFORE, *UPDATE, *CLOSED] if name not in left] == []
    assert {"answer-sent", "update-sent"} <= set(Passed.names)
