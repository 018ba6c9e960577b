"""What the facts about a stage write down, and for whom they wake."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select

from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.engine.recorder import Change, Changes, _Recorder
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import ClientRow, PhaseRow, TaskRow
from tests.support.coordinators import InProcess
from tests.support.open_phases import open_first_phase


def test_facts_about_a_stage_are_rows_events_and_wakeups(
    coordinator: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, _, tasks = open_first_phase(coordinator, "a", "b", "c", participation={"min_clients": 2})
    registry = coordinator.registry
    run = registry.get(federation).run
    with registry.database.write() as session:
        change = Change(session, registry.get(federation), queries.Batch(), registry.noise)
        recorder = _Recorder(change, run.round, run.step)
        recorder.write(run_state.Settled("a", "expired"))
        assert (list(change.federation.tasks), change.wake) == (["b", "c"], {"a"})
        recorder.write(run_state.Settled("a", "withdrawn"))  # its latest task, which is open no longer
        recorder.write(run_state.Extended(True))
        recorder.write(run_state.Asked(("a",)))
        assert sorted(change.federation.tasks) == ["a", "b", "c"]
        change.wake.clear()
        recorder.write(run_state.DeadlineSet(100.0))
        assert change.wake == {"a", "b", "c"}, "each is told of its new deadline"
        deadline = change.federation.deadline
        session.get_one(ClientRow, registry.get(federation).clients["c"].id).joined = False
        recorder.write(run_state.Joined(("c",)))
        assert change.client_row("c").joined
        recorder.write(run_state.Completed())
        change.flush()
        phase = session.scalars(select(PhaseRow).where(PhaseRow.round == run.round, PhaseRow.step == run.step)).one()
        mine = select(TaskRow).where(TaskRow.phase_id == phase.id).order_by(TaskRow.number)
        rows = [(row.number, row.client, row.status) for row in session.scalars(mine)]
        assert (phase.extended, phase.deadline, phase.completed_at is not None) == (True, deadline, True)
        session.rollback()
    assert rows == [(0, "a", "withdrawn"), (1, "b", "open"), (2, "c", "open"), (3, "a", "open")]
    kinds = ["task-settled", "task-settled", "phase-extended", "clients-asked", "clients-joined", "phase-completed"]
    assert [kind for kind, _ in change.emitted] == kinds
    about = {"round": 1, "phase": tasks[0]["phase"], "kind": "train"}
    assert [data for _, data in change.emitted] == [
        about | {"client": "a", "status": "expired"}, about | {"client": "a", "status": "withdrawn"}, about,
        about | {"asked": ["a"]}, {"clients": ["c"]}, about,
    ]  # fmt: skip
    assert [kind for kind, seconds in change.completed if seconds >= 0] == ["train"]


def test_a_stage_opens_with_its_tasks_and_is_timed_until_its_end(
    coordinator: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, _, _ = open_first_phase(coordinator)
    registry, now = coordinator.registry, [datetime(2030, 1, 1, tzinfo=UTC)]
    monkeypatch.setattr(clock, "utc", lambda: now[0])
    with registry.database.write() as session:
        change = Change(session, registry.get(federation), queries.Batch(), registry.noise)
        recorder = _Recorder(change, 1, 0)
        stages: Any = (("train", 2.5), ("evaluate", 0.0))
        for step, (kind, seconds) in enumerate(stages, 5):
            recorder.write(run_state.Opened(1, step, kind, "it", ("b", "a"), 2, 1.5))
            change.flush()
            row = session.scalars(select(PhaseRow).where(PhaseRow.step == step)).one()
            assert (row.kind, row.name, row.sample_size, row.extended) == (kind, "it", 2, False)
            assert row.expected == (1.5 if kind == "train" else None), "what the noise of training is divided by"
            mine = select(TaskRow.number, TaskRow.client).where(TaskRow.phase_id == row.id).order_by(TaskRow.number)
            assert session.execute(mine).all() == [(0, "b"), (1, "a")]
            about = {"round": 1, "phase": "it", "kind": kind}
            assert change.emitted[-1] == ("phase-opened", about | {"asked": ["b", "a"]})
            now[0] += timedelta(seconds=seconds)
            recorder.write(run_state.Completed())
        recorder.write(run_state.Opened(1, 7, "train", "it", ("b", "a"), 2, 1.5))
        recorder.write(run_state.Closed(("a",), 1))  # in the transaction that has opened it
        assert change.emitted[-1] == ("phase-closed", about | {"kind": "train", "counted": ["a"]})
        assert (change.federation.tasks, change.federation.deadline) == ({}, None)
        change.flush()
        row = session.scalars(select(PhaseRow).where(PhaseRow.step == 7)).one()
        assert (row.closed_at is not None, row.sample_size, row.noise_key) == (True, 1, None)
        mine = select(TaskRow.client, TaskRow.counted, TaskRow.weight).where(TaskRow.phase_id == row.id)
        assert sorted(session.execute(mine).all()) == [("a", True, 1.0), ("b", False, None)]
        session.rollback()
    assert change.completed == [("train", 2.5), ("evaluate", 0.0)]


def test_what_a_block_has_held_is_written_with_the_rows_that_name_it() -> None:
    change: Any = SimpleNamespace(batch=queries.Batch())
    held: Any = SimpleNamespace(small={"sha256:a": b"a"}, keys={"sha256:b": "b/1"})
    Change.keep(change, held)
    assert (change.batch.blobs, change.batch.objects) == (held.small, held.keys)


def test_an_attempt_that_failed_is_over_and_its_tasks_with_it(coordinator: InProcess) -> None:
    federation, _, _ = open_first_phase(coordinator)
    registry = coordinator.registry
    run = registry.get(federation).run
    with registry.database.write() as session:
        change = Change(session, registry.get(federation), queries.Batch(), registry.noise)
        recorder = _Recorder(change, run.round, run.step)
        recorder.write(run_state.AttemptFailed(2))
        change.flush()
        phase = session.scalars(select(PhaseRow).where(PhaseRow.round == run.round, PhaseRow.step == run.step)).one()
        assert phase.closed_at is not None
        assert phase.closed_at == phase.completed_at
        session.rollback()
    assert (change.federation.tasks, change.federation.deadline) == ({}, None)
    assert [(kind, data["attempt"], data["round"]) for kind, data in change.emitted] == [("attempt-failed", 2, 1)]


def test_each_event_meets_the_run_as_it_stands(coordinator: InProcess) -> None:
    federation, _, _ = open_first_phase(coordinator)
    registry = coordinator.registry
    with registry.database.write() as session:
        change = Change(session, registry.get(federation), queries.Batch(), registry.noise)
        change.send(run_state.Pause())
        assert change.federation.run.state == "paused"
        assert change.batch.federations[federation]["state"] == "paused"
        machine = change._machine
        change.send(run_state.Resume(0.0))
        assert (change.federation.run.state, change._machine is machine) == ("running", True)
        paused = replace(change.federation.run, state="paused", reason="another way")
        change.federation = replace(change.federation, run=paused)
        change.send(run_state.Resume(0.0))
        assert (change.federation.run.state, change.batch.federations[federation]["state"]) == ("running",) * 2
        session.rollback()


def test_keys_of_phases_come_from_where_it_is_said() -> None:
    given: Any = SimpleNamespace(key=None)
    for noise, own in ((given, False), (None, True)):
        one, other = (Changes(Any, lambda id: Any, noise).of(name) for name in "ab")
        assert (one.noise is not given, one.noise is not other.noise) == (own, own)


@dataclass(frozen=True)
class Standing:
    """A federation as far as a move changes it."""

    tasks: dict[str, int]
    deadline: str | None


@pytest.mark.parametrize(
    ("state", "started", "ended"),
    [("running", True, False), ("paused", False, False), ("finished", False, True), ("failed", False, True)],
)
def test_a_move_notes_the_first_start_and_the_end(state: Any, started: bool, ended: bool) -> None:
    row = SimpleNamespace(started_at=None, ended_at=None)
    emitted: list[Any] = []
    change: Any = SimpleNamespace(
        session=None,
        federation=Standing({"a": 1}, "soon"),
        federation_row=lambda: row,
        everyone=False,
        emit=lambda kind, **data: emitted.append((kind, data)),
    )
    _Recorder(change, 1, 0)._moved(run_state.Moved(state, "why"))
    assert (row.started_at is not None, row.ended_at is not None, change.everyone) == (started, ended, True)
    assert emitted == [("federation-state", {"state": state, "reason": "why"})]
    assert (change.federation.tasks, change.federation.deadline) == (({}, None) if ended else ({"a": 1}, "soon"))
    if started:
        row.started_at = "before"
        _Recorder(change, 1, 0)._moved(run_state.Moved(state, None))
        assert row.started_at == "before", "a resumed run has begun before"
