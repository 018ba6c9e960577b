"""`stop`: rounds end once the figures of held-out images rise no more, also where the coordinator went away."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from promptfed.coordinator.domain.run_state import EVALUATION
from promptfed.coordinator.engine import jobs
from promptfed.coordinator.engine import selection as selections
from promptfed.coordinator.engine.registry import Registry
from promptfed.shared.methods import resolve_spec
from promptfed.shared.spec.sections import SelectionSpec, without_rise
from promptfed.shared.spec.spec import SpecError
from promptfed.testing.clients import ScriptedClient, drive
from tests.support.coordinators import InThread, Make
from tests.support.open_phases import launched

SPEC: dict[str, Any] = {"name": "f", "method": {"name": "promptfl"}, "class_names": ["a", "b"], "rounds": 8}
SAMPLE = {"level": "sample", "clip": 1.0, "noise_multiplier": 1.0}


@dataclass
class Measuring(ScriptedClient):
    """Tells these figures of its held-out images, by round, and of its test images in the final test alone."""

    figures: tuple[float, ...] = ()

    def evaluate(self, task: dict[str, Any], accuracy: float | None = None) -> httpx.Response:
        final = task.get("selected") is not None
        told = {"test": 0.5} if final else {"validation": self.figures[task["round"]]}
        splits = {name: {"accuracy": value, "macro_f1": 0.5, "num_samples": 20} for name, value in told.items()}
        body = {"splits": splits, "zero_shot": {name: {"accuracy": 0.25, "num_samples": 20} for name in splits}}
        return self.http.put(f"{self.path}/tasks/{task['task_id']}/evaluation", json=body, headers=self.headers)


def measuring(
    coordinator: InThread, figures: tuple[float, ...], stop: dict[str, Any], **changes: Any
) -> tuple[str, Any]:
    federation, clients = launched(coordinator, "a", "b", rounds=len(figures) - 1, stop=stop, **changes)
    return federation, [Measuring(one.http, one.federation, one.name, figures=figures) for one in clients]


STOPS = [
    ((0.2, 0.5, 0.5, 0.4, 0.9), 2, 1, 3, 1),  # an equal figure is no rise
    ((0.2, 0.5, 0.5, 0.6, 0.7), 2, 1, 4, 4),  # it rose just in time
    ((0.2, 0.1, 0.1, 0.1, 0.1, 0.1), 2, 2, 4, 0),  # evaluations are counted, not rounds
]


@pytest.mark.parametrize(
    ("figures", "patience", "every", "ends", "best", "database"),
    [*((*stop, "sqlite") for stop in STOPS), pytest.param(*STOPS[0], "postgresql", marks=pytest.mark.extended)],
    indirect=["database"],
)
def test_rounds_end_where_the_figure_has_not_risen_for_so_many_evaluations(
    coordinator: InThread, figures: tuple[float, ...], patience: int, every: int, ends: int, best: int
) -> None:
    federation, clients = measuring(coordinator, figures, {"patience": patience}, evaluation={"every": every})
    drive(clients)
    found = coordinator.get(federation)
    early = ends < len(figures) - 1
    said = f"stopped after round {ends}: no rise for {patience} evaluations"
    assert (found["state"], found["round"], found["reason"]) == ("finished", ends, said if early else None)
    assert found["selection"]["round"] == best
    last = coordinator.get(f"{federation}/rounds")["rounds"][-1]
    assert last["round"] == ends
    card = coordinator.get(f"{federation}/rounds/{best}/card")
    assert card.get("stopped") == found["reason"]
    assert card["accuracy"]["mean"]["trainer"]["adapted"] == 0.5, "the best state was tested, also after a stop"


def test_the_stop_looks_at_its_own_metric(coordinator: InThread) -> None:
    federation, clients = measuring(coordinator, (0.1, 0.2, 0.3, 0.4), {"patience": 1, "metric": "macro_f1"})
    drive(clients)
    assert (coordinator.get(federation)["round"], coordinator.get(federation)["selection"]["metric"]) == (1, "macro_f1")


def test_a_coordinator_that_goes_away_before_it_has_judged_stops_after_its_restart(
    coordinator_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("promptfed.coordinator.engine.scheduler.RETRY_SECONDS", 0.05)
    judge, judged = jobs.judge, []

    def failing(registry: Registry, id: str) -> None:
        judged.append(id)
        if len(judged) > 2:  # after rounds 0 and 1
            raise OSError(28, "No space left on device")
        judge(registry, id)

    monkeypatch.setattr(jobs, "judge", failing)
    first = coordinator_with()
    federation, clients = measuring(first, (0.5, 0.4, 0.3, 0.9, 0.9), {"patience": 2})
    while len(judged) < 3:
        for client in clients:
            client.work()
    assert (first.get(federation)["state"], first.get(federation)["round"]) == ("running", 2)
    first.stop()
    monkeypatch.setattr(jobs, "judge", judge)
    second = coordinator_with()
    drive(
        [
            Measuring(second.client(federation, one.name).http, federation, one.name, figures=one.figures)
            for one in clients
        ]
    )
    assert second.get(federation)["reason"] == "stopped after round 2: no rise for 2 evaluations"


def test_no_figures_are_no_evaluations() -> None:
    assert [without_rise(means) for means in ({}, {0: 0.5}, {0: 0.5, 2: 0.5}, {0: 0.5, 2: 0.5, 4: 0.6})] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("given", "path", "words"),
    [
        ({"privacy": SAMPLE}, "selection", "leave selection and stop, or privacy and secure_aggregation, out"),
        ({"secure_aggregation": {}, "participation": {"min_clients": 3}}, "selection", "leave selection and stop"),
        ({"stop": {"patience": 2, "metric": "loss"}}, "stop.metric", "'accuracy' or 'macro_f1'"),
        ({"stop": {"patience": 0}}, "stop.patience", "greater than or equal to 1"),
        ({"stop": {}}, "stop.patience", "is missing"),
        (
            {"task": "multi_label", "stop": {"patience": 2, "metric": "macro_f1"}},
            "selection",
            "macro_f1 is not evaluated",
        ),
        ({"task": "multi_label", "stop": None, "selection": {"metric": "macro_f1"}}, "selection", "macro_f1 is not"),
        ({"rounds": 0, "continues": f"sha256:{'0' * 64}"}, "rounds", "leave stop out"),
    ],
)
def test_what_cannot_be_stopped_is_refused_by_name(given: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        resolve_spec(SPEC | {"stop": {"patience": 2}} | given)
    found = {error["path"]: error["detail"] for error in refused.value.errors}
    assert words in found[path]


def test_a_stop_brings_its_selection() -> None:
    alone, both = (
        {"stop": {"patience": 2, "metric": "macro_f1"}} | more for more in ({}, {"selection": {"share": 0.5}})
    )
    found = [resolve_spec(SPEC | given).selection for given in (alone, both)]
    assert [(one.metric, one.share) for one in found if one is not None] == [("macro_f1", 0.2), ("accuracy", 0.5)]


@pytest.mark.parametrize(("patience", "selection", "ends"), [
    (2, True, True), (3, True, False), (2, False, False), (None, True, False), (None, False, False),
])  # fmt: skip
def test_rounds_end_where_enough_evaluations_came_after_the_best(
    patience: int | None, selection: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(
        selection=SelectionSpec(metric="accuracy") if selection else None,
        stop=None if patience is None else SimpleNamespace(metric="macro_f1", patience=patience),
    )
    federation, asked, session = SimpleNamespace(spec=spec, id="f", run=SimpleNamespace(round=9)), list[Any](), Mock()
    means: dict[int, float] = {2: 0.1, 4: 0.7, 6: 0.7, 8: 0.6}
    monkeypatch.setattr(selections, "means_by_round", lambda *about: asked.append(about) or means)
    told: Any = federation
    assert selections.rises_no_more(session, told) is ends
    looked = [(session, "f", EVALUATION, SelectionSpec(metric="macro_f1"))] if patience and selection else []
    assert asked == looked
    view = selections.selection_view(session, told)
    found = view and (view.round, view.value, view.compared, view.metric)
    assert found == ((4, 0.7, 4, "accuracy") if selection else None)
    assert selections.selected_round(session, told) == (4 if selection else 9)
    means.clear()
    assert (selections.selection_view(session, told), selections.selected_round(session, told)) == (None, 9)
