"""Which rounds are read for remarks, and what the remarks are told of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.resources.results import rounds


@pytest.mark.parametrize(
    ("begun", "every", "of", "read"),
    [
        ([], 1, 9, []),
        ([0], 1, 9, [0]),
        ([0, 1], 1, 9, [0, 1]),
        (list(range(9)), 1, 9, [1, 6, 7, 8]),  # 6 is three quarters of the last one
        (list(range(8)), 1, 9, [1, 5, 6, 7]),
        (list(range(10)), 4, 9, [1, 4, 8, 9]),  # the last one of all is evaluated too
        (list(range(10)), 4, 10, [1, 4, 8]),
    ],
)
def test_remarks_are_of_few_rounds_and_of_the_classes_that_trainers_choose_among(
    begun: list[int], every: int, of: int, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(class_names: list[str] | None = None, **method: str) -> list[Any]:
        evaluation = SimpleNamespace(every=every)
        spec = SimpleNamespace(evaluation=evaluation, rounds=of, class_names=class_names, method=method)
        client = [("trainer", "ab"), ("evaluator", "abc"), ("trainer", "abcd")]
        clients = {str(n): SimpleNamespace(role=role, class_names=names) for n, (role, names) in enumerate(client)}
        federation: Any = SimpleNamespace(id="f", spec=spec, clients=clients)
        session: Any = None
        return rounds.remarks_of(session, federation)

    monkeypatch.setattr(rounds, "rounds", lambda session, id: begun)
    monkeypatch.setattr(rounds, "round_report", lambda session, federation, number: number)
    monkeypatch.setattr(rounds, "has_rate", lambda spec: "rate")
    monkeypatch.setattr(rounds, "remarks", lambda spec, *given: [*given])
    assert told() == [read, [2, 4], "rate"]
    assert told(["a", "b", "c", "d", "e"]) == [read, [5], "rate"]
    assert told(["a", "b", "c", "d", "e"], label_space="client") == [read, [2, 4], "rate"]
