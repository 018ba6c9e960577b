"""Whether an answer is taken, and when a group of answers is committed: each rule on both sides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from promptfed.coordinator.domain import run_state
from promptfed.coordinator.domain.federation import OpenTask
from promptfed.coordinator.engine import answers, committer
from promptfed.coordinator.engine.answers import Answer, AskedTask, decided
from promptfed.coordinator.engine.committer import LATELY, MOST_SECONDS, QUIET_SECONDS, Committer, RegistryClosed
from promptfed.coordinator.problems import NotFound, Refusal
from promptfed.coordinator.store.backend import DatabaseAway
from promptfed.coordinator.store.queries import tasks_with_phases
from promptfed.coordinator.store.tables import EvaluationRow, ExchangeRow, UpdateRow
from tests.support.coordinators import InProcess
from tests.support.open_phases import completed


def asked(kind: str = "train", status: str = "open", accepted: str | None = None) -> AskedTask:
    about: dict[str, Any] = {"id": "t", "client": "a", "kind": kind, "round": 1, "step": 0, "phase": "train"}
    return AskedTask(**about, opened_at="", status=status, accepted=accepted)


def federation(secure: bool = False, state: str = "running", phase: str = "train") -> Any:
    spec = SimpleNamespace(secure_aggregation=object() if secure else None)
    run = SimpleNamespace(state=state, round=2, stage=SimpleNamespace(having=lambda status: ["b"]))
    return SimpleNamespace(spec=spec, run=run, name="eyes", phase=phase)


@pytest.mark.parametrize(
    ("secure", "task", "kind", "outcome"),
    [
        (False, asked(), "train", False),
        (False, asked(), "evaluate", "this task wants an update"),
        (False, asked(), None, "this task wants an update"),
        (False, asked("evaluate"), "evaluate", False),
        (False, asked("evaluate"), "train", "this task wants an evaluation"),
        (True, asked("train"), None, False),
        (True, asked("mask"), None, False),
        (True, asked("mask"), "train", "this task wants the exchange of step mask: its federation takes no update"),
        (True, asked("train"), "train", "this task wants the exchange of step train"),
        (True, asked("evaluate"), "evaluate", False),
        (True, asked("evaluate"), None, "this task wants an evaluation"),
        (False, asked(accepted="d"), "train", True),
        (False, asked(status="answered", accepted="d"), "train", True),
        (False, asked(accepted="e"), "train", "this task was answered with e; that answer stands"),
        (False, asked(status="expired", accepted="e"), "train", "this task was answered with e"),
        (False, asked(status="expired"), "train", "the phase of round 1 is over"),
    ],
)
def test_an_answer_is_new_known_or_refused(secure: bool, task: AskedTask, kind: str, outcome: bool | str) -> None:
    if isinstance(outcome, bool):
        assert decided(federation(secure), task, kind, "d") is outcome
    else:
        with pytest.raises(Refusal) as refused:
            decided(federation(secure), task, kind, "d")
        assert refused.value.detail.startswith(outcome)


def test_an_open_task_is_known_without_the_database() -> None:
    mine = OpenTask(id="t", client="a", kind="train", round=1, step=0, phase="train", opened_at="")
    run, session, at = federation(), Mock(), lambda name: SimpleNamespace(name=name)
    run.tasks, run.id = {"a": mine}, "f"
    session.execute.return_value.one_or_none.return_value = None
    assert answers.asked_task(session, run, at("a"), "t") == AskedTask(**vars(mine))
    assert not session.execute.called
    change: Any = SimpleNamespace(federation=run, session=session, flush=Mock())
    assert answers.task_in(change, at("a"), "t") == AskedTask(**vars(mine))
    assert not change.flush.called
    for number, (name, task_id) in enumerate((("a", "u"), ("b", "t")), 1):
        with pytest.raises(NotFound, match=f"this client has no task '{task_id}'"):
            answers.task_in(change, at(name), task_id)
        assert change.flush.call_count == number, "its answer may be in the same group"
    assert not decided(run, AskedTask(**vars(mine)), "train", None), "nothing is no answer"


@pytest.mark.parametrize("secure", [False, True])
def test_the_answer_that_stands_is_that_of_the_task(secure: bool, coordinator: InProcess) -> None:
    id, _ = completed(coordinator, "a", "b", rounds=1)
    known: Any = SimpleNamespace(tasks={}, id=id, spec=SimpleNamespace(secure_aggregation=secure or None))
    with coordinator.registry.database.write() as session:
        for row, phase in session.execute(tasks_with_phases(id)).all():
            client: Any = SimpleNamespace(name=row.client)
            if phase.kind == "evaluate":
                session.get_one(EvaluationRow, row.id).digest = wanted = f"evaluation {row.id}"
            elif secure:
                wanted = f"exchange of {row.client}"
                session.add(ExchangeRow(task_id=row.id, digest=wanted, bytes=1, received_at=""))
            else:
                update = session.get_one(UpdateRow, row.id)
                update.sent = "compressed" if row.client == "b" else None
                wanted = update.sent or update.sha256
            session.flush()
            told = answers.asked_task(session, known, client, row.id)
            assert (told.id, told.client, told.kind, told.accepted) == (row.id, row.client, phase.kind, wanted)
            assert (told.status, told.payload_stored) == ("answered", row.payload_stored)
        session.rollback()


def test_an_open_task_of_a_federation_that_goes_on_is_open() -> None:
    answers.expect_open(federation(), asked())
    answers.expect_open(federation(state="paused"), asked())
    for where, task, words in (
        (federation(state="cancelled"), asked(), r"round 1 is over \(open\); eyes is in round 2, train"),
        (federation(phase=""), asked(status="expired"), r"round 1 is over \(expired\); eyes is in round 2$"),
    ):
        with pytest.raises(Refusal, match=words) as refused:
            answers.expect_open(where, task)
        assert refused.value.members == {"round": 2, "phase": where.phase, "state": where.run.state}


@pytest.mark.parametrize(
    ("kind", "opens", "stage", "last"),
    [
        ("unmask", True, True, True), ("unmask", False, True, False), ("unmask", None, True, False),
        ("mask", True, True, False), ("unmask", True, False, False),
    ],
)  # fmt: skip
def test_the_answer_that_opens_the_sum_is_the_last(
    kind: str, opens: bool | None, stage: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def can_open(names: list[str]) -> bool:
        told.append(names)
        return bool(opens)

    monkeypatch.setattr(answers, "task_in", lambda change, client, id: asked(kind))
    monkeypatch.setattr(answers, "decided", lambda *about: False)
    inside = federation(True)
    if not stage:
        inside.run.stage = None
    sent, kept, rows = list[Any](), list[Any](), list[Any]()
    batch = SimpleNamespace(**{answers.STORED[None][0]: rows})
    change: Any = SimpleNamespace(federation=inside, batch=batch, send=sent.append, keep=kept.append)
    client: Any = SimpleNamespace(name="a")
    attempt: Any = SimpleNamespace(can_open=can_open) if opens is not None else None
    held: Any = object() if last else None
    entry = Answer("f", client, "t", "d", None, {"bytes": 3}, held, attempt)
    assert entry.enter(change) is True
    assert type(sent[0]) is (run_state.AnsweredLast if last else run_state.Answered)
    assert told == ([["b", "a"]] if last or opens is False else [])
    assert (kept, rows[0]["task_id"], rows[0]["bytes"]) == ([held] if last else [], "t", 3)
    monkeypatch.setattr(answers, "decided", lambda *about: True)
    assert entry.enter(change) is False
    assert (len(rows), len(sent)) == (1, 1), "nothing is stored twice"


def entry(task_id: str | None) -> Any:
    return SimpleNamespace(entry=SimpleNamespace(federation="f", task_id=task_id))


@pytest.mark.parametrize(
    ("open_tasks", "gathered", "all_of_them"),
    [
        (0, ["a"], False), (1, ["a"], True), (2, ["a"], False), (2, ["a", "b"], True), (2, ["a", "a"], False),
        (2, ["a", None], False), (1, [None], False), (2, ["a", "b", "c"], True),
    ],
)  # fmt: skip
def test_a_group_that_answers_every_open_task_waits_for_none(
    open_tasks: int, gathered: list[str | None], all_of_them: bool
) -> None:
    nothing: Any = None
    one = Committer(nothing, nothing, lambda federation: open_tasks)
    one._gathered = [entry(task_id) for task_id in gathered]
    assert one._answers_all() is all_of_them


Q, L = QUIET_SECONDS, LATELY * QUIET_SECONDS


@pytest.mark.parametrize(
    ("coming", "entered", "since", "asked", "before", "count", "quiet"),
    [
        (2, 1, 2 * Q, 9.0, 9.0, 1, False),
        (1, 1, Q, 1.01 * Q, 0.0, 2, True), (1, 1, Q, Q, 0.0, 2, False), (1, 1, Q, 0.5 * Q, 9.0, 1, False),
        (1, 1, 0.99 * Q, 9.0, 1.01 * L, 1, True), (1, 1, 0.99 * Q, 9.0, L, 1, False),
        (1, 1, 0.99 * Q, 9.0, 1.01 * L, 2, False),
    ],
)  # fmt: skip
def test_it_is_quiet_where_nobody_is_coming_or_has_asked_lately(
    coming: int, entered: int, since: float, asked: float, before: float, count: int, quiet: bool
) -> None:
    nothing: Any = None
    one, now = Committer(nothing, nothing), 0.0
    one._coming, one._entered, one._gathered = coming, entered, [entry("a")] * count
    one._since, one._asked, one._asked_before = now - since, now - asked, now - before
    assert one._is_quiet(now) is quiet


@pytest.mark.parametrize(
    ("full", "quiet", "ago", "timer", "committed", "begun"),
    [
        (True, False, 0.0, False, True, False), (False, True, 0.0, False, True, False),
        (False, False, MOST_SECONDS, False, True, False), (False, False, 0.0, False, False, True),
        (False, False, 0.0, True, False, False), (False, True, 0.0, True, True, False),
    ],
)  # fmt: skip
def test_a_group_is_committed_or_waits_by_one_timer(
    full: bool, quiet: bool, ago: float, timer: bool, committed: bool, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = None
    one = Committer(nothing, nothing)
    monkeypatch.setattr(committer, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    monkeypatch.setattr(committer, "MOST", 2)
    monkeypatch.setattr(one, "_is_quiet", lambda now: quiet)
    calls, cancelled = list[Any](), list[None]()
    loop: Any = SimpleNamespace(call_later=lambda left, *about: calls.append(left) or object())
    one._gathered, one._since = [entry("a")] * (3 if full else 1), 1000.0 - ago
    one._timer = SimpleNamespace(cancel=lambda: cancelled.append(None)) if timer else None
    one._go_on(loop)
    assert (one._committing, one._groups.qsize(), calls) == (committed, committed, [QUIET_SECONDS] * begun)
    assert len(one._gathered) == (1 if full or not committed else 0), "no group is longer than it may be"
    assert (len(cancelled), one._timer is None) == (timer and committed, committed)
    one._go_on(loop)
    assert one._groups.qsize() == committed, "one at a time"


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (OSError("broken"), 3), (DatabaseAway("x"), 1), (RegistryClosed(), 1), (OSError("full"), 1),
        (NotFound("refused"), 3),
    ],
)  # fmt: skip
def test_a_group_that_cannot_be_stored_goes_one_by_one_unless_that_is_no_use(error: Exception, tries: int) -> None:
    nothing: Any = None
    one = Committer(nothing, lambda error: "full" in str(error))
    groups, told = list[int](), list[Any]()

    def together(group: Any) -> None:
        groups.append(len(group))
        raise error

    one._together = together
    one._call = lambda function, group, outcomes: told.append(outcomes)
    one._commit([entry("a"), entry("b")])
    assert groups == [2, 1, 1][:tries]
    assert told == ([[error], [error]] if tries == 3 else [[error, error]])
