"""What the scheduler finds due, and whom it gives up."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from promptfed.coordinator.domain import clock
from promptfed.coordinator.engine import jobs, retention, scheduler
from promptfed.coordinator.engine.scheduler import RETIRE_SECONDS, Scheduler, _tick
from promptfed.coordinator.store.backend import DatabaseAway
from tests.support.waiting import PATIENCE

SERVED, LACKS = SimpleNamespace(payload_sha256="sha256:0"), SimpleNamespace(payload_sha256=None)
NOW = 1000.0


def federation(state: str = "running", tasks: str = "", deadline: float | None = NOW + 1, **more: Any) -> Any:
    """``tasks``: s for each that has its payload, l for each that lacks it."""
    stage = SimpleNamespace(deadline=deadline) if deadline is not None else None
    run = {"state": state, "due_job": None, "is_damaged": False, "stage": stage, "starters": lambda rules: [1, 2]}
    about = {key: more.pop(key) for key in ("due_job", "is_damaged") if key in more}
    open_tasks = {str(number): SERVED if kind == "s" else LACKS for number, kind in enumerate(tasks)}
    spec = SimpleNamespace(start=more.pop("start", "when_ready"))
    rules = SimpleNamespace(min_clients=more.pop("min_clients", 2))
    return SimpleNamespace(
        id="f",
        absent=more.pop("absent", None),
        tasks=open_tasks,
        spec=spec,
        rules=rules,
        run=SimpleNamespace(**run | about),
    )


@pytest.mark.parametrize(
    ("standing", "due"),
    [
        (federation(absent="no method", due_job="join", tasks="l"), None),
        (federation(due_job="join"), jobs.join),
        (federation(due_job="aggregate", tasks="l"), jobs.aggregate),
        (federation(due_job="judge"), jobs.judge),
        (federation("paused", due_job="aggregate"), None),
        (federation(tasks="ll"), jobs.fill_payloads),
        (federation(tasks="sl"), jobs.fill_payloads),
        (federation("paused", tasks="ls"), jobs.fill_payloads),
        (federation("paused", tasks="ls", is_damaged=True), None),
        (federation("finished", tasks="l"), None),
        (federation(tasks="ss"), None),
        (federation(), None),
        (federation(deadline=NOW), _tick),
        (federation(deadline=NOW, tasks="s"), _tick),
        (federation(deadline=None), None),
        (federation("paused", deadline=NOW), None),
        (federation("enrolling", deadline=None), "start"),
        (federation("enrolling", deadline=None, start="by_operator"), None),
        (federation("enrolling", deadline=None, min_clients=3), None),
        (federation("paused", min_clients=1), None),
    ],
)
def test_one_thing_is_due_or_none(standing: Any, due: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "monotonic", lambda: NOW)
    monkeypatch.setattr(retention, "has_to_retire", lambda federation, retired: False)
    monkeypatch.setattr(scheduler, "_start_key", lambda federation: "as it is")
    registry: Any = SimpleNamespace(retired={})
    one = Scheduler(registry)
    assert one._due(standing) == (one._start_by_itself if due == "start" else due)
    one._refused_starts["f"] = "as it was"
    assert one._due(standing) == (one._start_by_itself if due == "start" else due)
    one._refused_starts["f"] = "as it is"
    assert one._due(standing) == (None if due == "start" else due), "it was refused, and nothing is new"


@pytest.mark.parametrize(
    ("state", "ago", "due"),
    [
        ("running", None, True), ("running", RETIRE_SECONDS, True), ("running", 0.99 * RETIRE_SECONDS, False),
        ("finished", 0.0, True), ("cancelled", 0.0, True), ("paused", 0.0, False),
    ],
)  # fmt: skip
def test_rounds_are_retired_now_and_then_and_at_the_end(
    state: str, ago: float | None, due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "monotonic", lambda: NOW)
    monkeypatch.setattr(retention, "has_to_retire", lambda federation, retired: retired == 7)
    registry: Any = SimpleNamespace(retired={"f": 7})
    one = Scheduler(registry)
    if ago is not None:
        one._retired_at["f"] = NOW - ago
    assert one._due(federation(state)) is (retention.retire if due else None)
    registry.retired = {}
    assert one._due(federation(state)) is None


@pytest.mark.parametrize("error", [None, DatabaseAway("away"), OperationalError("INSERT", {}, Exception("full"))])
def test_a_database_that_hangs_is_given_up_and_one_that_refuses_is_not(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "HANG_SECONDS", 0.02 if error is None else PATIENCE)
    answered, cut = threading.Event(), []

    def beat() -> None:
        if error is not None:
            raise error
        answered.wait(5)

    def give_up(why: str) -> None:
        cut.append(why)
        answered.set()

    registry: Any = SimpleNamespace(database=SimpleNamespace(beat=beat, cut=give_up))
    one = Scheduler(registry)
    monkeypatch.setattr(one, "_beat", beat)
    asyncio.run(one._flush())
    assert cut == ([] if error is not None else ["the database has not answered for 0.02 s"])
