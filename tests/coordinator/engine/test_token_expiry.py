"""Tokens are marked once, in one transaction, and only where one has expired since."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.domain.federation import EnrolmentToken
from promptfed.coordinator.engine import token_expiry
from promptfed.coordinator.engine.audit import Operator

NOW = datetime(2026, 11, 29, tzinfo=UTC)
TICK = timedelta(microseconds=1)


@pytest.mark.parametrize("operators", [{}, {"o": 0}, {"o": 1, "p": 0, "q": -1}])
@pytest.mark.parametrize("enrolment", [{}, {"t": 0}, {"t": 1, "u": 0, "v": -1}])
def test_tokens_are_marked_once_when_their_time_has_come(
    operators: dict[str, int], enrolment: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_expiry.clock, "utc", lambda: NOW)
    written, inside = list[Any](), list[None]()

    @contextmanager
    def exclusively() -> Any:
        inside.append(None)
        yield
        inside.clear()

    @contextmanager
    def write() -> Any:
        execute = lambda statement, rows: written[-1].append([row["key"] for row in rows])  # noqa: E731
        assert inside, "nothing else changes meanwhile"
        written.append([])
        yield SimpleNamespace(connection=lambda: SimpleNamespace(execute=execute))

    registry: Any = SimpleNamespace(exclusively=exclusively, database=SimpleNamespace(write=write))
    registry.operators = {name: Operator(name, name, "viewer", NOW + late * TICK) for name, late in operators.items()}
    tokens = {name: EnrolmentToken(name, name, NOW + late * TICK) for name, late in enrolment.items()}
    registry.federations = {"f": SimpleNamespace(tokens=tokens), "empty": SimpleNamespace(tokens={})}
    registry.note = lambda id, tokens: registry.federations.update({id: SimpleNamespace(tokens=tokens)})
    over = [sorted(name for name, late in some.items() if late <= 0) for some in (operators, enrolment)]
    for _ in range(2):
        token_expiry.mark_expired(registry)
        assert written == [[some for some in over if some]] * any(over), "once"
    known = registry.operators, registry.federations["f"].tokens
    assert [sorted(name for name, one in some.items() if one.expired) for some in known] == over
    monkeypatch.setattr(token_expiry.clock, "utc", lambda: NOW - timedelta(days=9))
    assert [sorted(name for name, one in some.items() if token_expiry.has_expired(one)) for some in known] == over
