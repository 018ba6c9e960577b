"""Which rounds are read for remarks, and what the remarks are told of them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.problems import NotFound
from promptfed.coordinator.resources.results import rounds
from promptfed.shared.api import report_schemas
from promptfed.shared.api.report_schemas import Reached
from tests.coordinator.resources.results.test_round_reports import result
from tests.support.coordinators import InProcess


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


def test_a_round_of_which_nothing_is_left_is_not_found(coordinator: InProcess) -> None:
    federation = coordinator.registry.get(coordinator.create())
    with coordinator.registry.database.read() as session, pytest.raises(NotFound, match="eyes has just been deleted"):
        rounds.round_report(session, federation, 1)


def measured(role: str, splits: dict[str, float], zero_shot: dict[str, float], epsilon: float | None = None) -> Any:
    told = [{name: result(value) for name, value in of.items()} for of in (splits, zero_shot)]
    privacy = None if epsilon is None else SimpleNamespace(count_epsilon=epsilon)
    return SimpleNamespace(role=role, splits=told[0], zero_shot=told[1], privacy=privacy)


def test_what_trainers_reach_is_of_their_test_images() -> None:
    clients = {
        "a": measured("trainer", {"test": 0.5, "val": 0.9}, {"test": 0.25}),
        "b": measured("trainer", {"test": 0.75}, {"val": 0.25}, epsilon=math.log(2)),
        "no test": measured("trainer", {"val": 0.5}, {}),
        "evaluator": measured("evaluator", {"test": 0.5}, {"test": 0.25}),
    }
    reports: Any = [
        SimpleNamespace(round=round, evaluation=None if found is None else SimpleNamespace(clients=found))
        for round, found in ((0, clients), (1, None), (2, {}))
    ]
    noise = 2 / 10  # of a right answer more or less: with e^−ε = 1/2, √(2·1/2)/(1 − 1/2), of 10 images
    wanted = {"a": Reached(0.5, 0.25, 10, 0.0), "b": Reached(0.75, None, 10, pytest.approx(noise))}
    assert report_schemas._curve(reports) == {0: wanted, 2: {}}
