"""What the scheduler finds due, and whom it gives up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection

from promptfed.coordinator.aggregation.global_state import NoTorch
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.round_machine import WrongMoment
from promptfed.coordinator.engine import jobs, retention, scheduler
from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.coordinator.engine.scheduler import RETIRE_SECONDS, Scheduler, _tick
from promptfed.coordinator.problems import CannotStart, NotFound
from promptfed.coordinator.store.backend import DatabaseAway, InUse
from promptfed.coordinator.store.blobs import DamagedBlob
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


LONG = ValueError("a\0b" + "x" * 3000)
GARBAGE = DatabaseError("SELECT", {}, Exception("garbage"))


class Recording:
    """A registry that notes what is sent to its one federation."""

    def __init__(self, damaged: bool = False):
        self.sent: list[Any] = []
        self.woken: list[Any] = []
        self.federations: dict[str, Any] = {}
        members: dict[str, str] = {}
        self.known = SimpleNamespace(run=SimpleNamespace(members=members), supplied_state=None)
        self.database = SimpleNamespace(is_damaged=lambda error: damaged, cannot_be_read=lambda error: "no database")
        self.wakeups = SimpleNamespace(wake=self.woken.append, wake_all=lambda: self.woken.append("all"), closed=False)

    def get(self, id: str) -> Any:
        return self.known

    @contextmanager
    def change(self, id: str) -> Iterator[Any]:
        yield SimpleNamespace(send=self.sent.append)

    async def compute(self, job: Any) -> None:
        job()


@pytest.mark.parametrize(
    ("error", "damaged", "sent", "refused", "raised"),
    [
        (None, False, [], False, False),
        (NotFound("gone"), False, [], False, False),
        (WrongMoment("finished"), False, [], False, False),
        (RegistryClosed(), False, [], False, False),
        (DamagedBlob("sha256:0", "is missing"), False,
         [run_state.Damaged("sha256:0 is missing: put it back from a backup, then resume")], True, False),
        (OSError(28, "No space"), False, [], False, True),
        (OperationalError("x", {}, Exception("full")), True, [], False, True),
        (NoConnection("none is free"), False, [], False, True),
        (DatabaseAway("away"), False, [], False, True),
        (GARBAGE, True, [run_state.Damaged("no database")], True, False),
        (GARBAGE, False, [run_state.Fail(f"DatabaseError: {GARBAGE}")], False, False),
        (NoTorch("no torch"), False, [run_state.NotComputed("no torch; then resume")], False, False),
        (LONG, False, [run_state.Fail(("ValueError: a\\0b" + "x" * 3000)[:2000])], False, False),
    ],
)  # fmt: skip
def test_what_a_job_raises_pauses_ends_or_is_tried_again(
    error: Exception | None,
    damaged: bool,
    sent: list[Any],
    refused: bool,
    raised: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0.0)
    registry: Any = Recording(damaged)
    one = Scheduler(registry)

    def job(given: Any, id: str) -> None:
        assert (given, id) == (registry, "f")
        if error is not None:
            raise error

    if raised and error is not None:
        with pytest.raises(type(error)):
            one._attempt("f", job)
    else:
        one._attempt("f", job)
    assert (registry.sent, list(one._refused_starts)) == (sent, ["f"] * refused)
    one._jobs["f"] = None
    asyncio.run(one._carry_out("f", job))
    assert (one._jobs, registry.woken) == ({}, [["driver"]]), "and the driver looks again"


def test_a_refused_start_is_told_and_waits_for_something_new(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(registry: Any, id: str) -> None:
        raise CannotStart("no room")

    registry: Any = Recording()
    one = Scheduler(registry)
    monkeypatch.setattr(jobs, "start", refuse)
    one._start_by_itself(registry, "f")
    assert registry.sent == [run_state.StartRefused("cannot-start: no room")]
    assert one._refused_starts == {"f": ((), None)}
    monkeypatch.setattr(jobs, "start", lambda registry, id: None)
    one._start_by_itself(registry, "g")
    assert (len(registry.sent), list(one._refused_starts)) == (1, ["f"])


def test_who_asks_for_the_database_again_warns_of_each_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    registry: Any = Recording()
    one = Scheduler(registry)
    comes: list[Exception | None] = [DatabaseAway("a"), DatabaseAway("a"), InUse("b"), GARBAGE, None, DatabaseAway("a")]

    def come_back() -> None:
        if (error := comes.pop(0)) is not None:
            raise error

    registry.come_back = come_back
    assert [asyncio.run(one._is_back()) for _ in range(6)] == [False, False, False, False, True, False]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["a", "b", "a"]
    assert registry.woken == ["all"]


@pytest.mark.parametrize("error", [None, DatabaseAway("away"), RegistryClosed(), OSError("no"), GARBAGE])
def test_what_cannot_be_removed_keeps_nobody(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[Any] = []

    def remove(registry: Any) -> None:
        done.append(registry)
        if error is not None:
            raise error

    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0.0)
    for name in ("sweep", "finish"):
        monkeypatch.setattr(retention, name, remove)
    registry: Any = Recording()
    one = Scheduler(registry)
    one._deleting = object()
    asyncio.run(one._sweep())
    asyncio.run(one._delete_leftovers())
    assert (done, one._deleting) == ([registry] * 2, None), "it may be begun again"
    assert len(caplog.records) == (2 if error in (GARBAGE,) or isinstance(error, OSError) else 0)


def test_the_driver_sleeps_until_the_next_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "monotonic", lambda: NOW)
    registry: Any = Recording()
    one = Scheduler(registry)
    for standing, pause in (
        ([], scheduler.FLUSH_SECONDS),
        ([federation(deadline=NOW + 1), federation(deadline=NOW + 0.5)], 0.5),
        ([federation(deadline=NOW - 1)], 0.0),
        ([federation("paused", deadline=NOW), federation(deadline=None)], scheduler.FLUSH_SECONDS),
        ([federation(deadline=NOW, absent="no method")], scheduler.FLUSH_SECONDS),
        ([federation(deadline=NOW + 9)], scheduler.FLUSH_SECONDS),
    ):
        registry.federations = dict(enumerate(standing))
        assert one._pause() == pause
    registry.federations = {"f": federation(deadline=NOW)}
    one._jobs["f"] = None
    assert one._pause() == scheduler.FLUSH_SECONDS, "its job is under way"


@pytest.mark.parametrize("hangs", [False, True])
def test_an_end_cuts_a_database_that_does_not_answer(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "STOP_SECONDS", 0.02)
    answered, done = threading.Event(), list[str]()

    async def stop_computing(seconds: float) -> None:
        done.append("computing")

    def cut(why: str) -> None:
        done.append(why)
        answered.set()

    if not hangs:
        answered.set()
    registry: Any = SimpleNamespace(
        stop_waiting=lambda: done.append("waiting"),
        stop_computing=stop_computing,
        close=lambda: answered.wait(PATIENCE),
        database=SimpleNamespace(cut=cut),
    )

    async def ended() -> bool:
        one = Scheduler(registry)
        one._jobs["f"] = job = asyncio.create_task(asyncio.sleep(PATIENCE))
        await one.stop()
        await asyncio.sleep(0)
        return job.cancelled()

    assert asyncio.run(ended())
    assert done == ["waiting", "computing", *["the database does not answer while the coordinator ends"] * hangs]


def test_the_driver_looks_flushes_and_gives_back_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Any = Recording()
    registry.away, registry.leftovers = False, False
    registry.federations, registry.wakeups.listen = {"f": "a federation"}, lambda key: key
    one, done, now = Scheduler(registry), list[str](), [NOW]
    moments = iter([0.0, scheduler.FLUSH_SECONDS, scheduler.FLUSH_SECONDS + 0.1, scheduler.TRIM_SECONDS + 0.1])
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(scheduler, "give_back", lambda: done.append("gives back"))
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(one, "_look_at", lambda federation: done.append("looks"))
    monkeypatch.setattr(one, "_pause", lambda: 7.5)

    async def flush() -> None:
        done.append("flushes")

    async def delete() -> None:
        done.append("deletes")

    async def is_back() -> bool:
        registry.away = len(done) == 0
        done.append("asks")
        return not registry.away

    async def wait(wakeup: Any, seconds: float) -> None:
        assert (wakeup, seconds) == ("driver", 7.5)
        await asyncio.sleep(0)
        done.append("|")
        if (later := next(moments, None)) is None:
            registry.wakeups.closed = True
        else:
            now[0] = NOW + later
            registry.leftovers = later > 1

    for name, does in (("_flush", flush), ("_delete_leftovers", delete), ("_is_back", is_back)):
        monkeypatch.setattr(one, name, does)
    monkeypatch.setattr(scheduler, "wait", wait)
    registry.away = True
    asyncio.run(one._drive())
    assert "".join(f" {step}" for step in done).split(" | ") == [
        " asks asks looks flushes", "looks", "looks deletes", "looks flushes", "looks flushes gives back |",
    ]  # fmt: skip
