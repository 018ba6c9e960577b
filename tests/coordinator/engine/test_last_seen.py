"""Figures that are collected in memory, lines of the log, and what the readiness of the store says."""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from promptfed.coordinator.domain import run_state
from promptfed.coordinator.engine import last_seen, log_lines
from promptfed.coordinator.engine.last_seen import LastSeen
from promptfed.coordinator.engine.metrics import Metrics
from promptfed.coordinator.store import writable
from promptfed.coordinator.store.backend import DatabaseAway
from promptfed.coordinator.store.bucket import ObjectStoreAway
from promptfed.coordinator.store.writable import Writable


class Written:
    """A database that notes what is written, or raises."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.error: Exception | None = None
        self.begun = 0

    @contextmanager
    def write(self) -> Iterator[Any]:
        self.begun += 1
        if self.error is not None:
            raise self.error
        execute = lambda statement, rows=None: self.rows.append(rows)  # noqa: E731
        yield SimpleNamespace(connection=lambda: SimpleNamespace(execute=execute), execute=execute)

    def is_full(self, error: Exception) -> bool:
        return "full" in str(error)


FULL = OperationalError("UPDATE", {}, Exception("the disk\nis full"))


def test_what_was_seen_waits_until_it_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    database: Any = Written()
    seen = LastSeen(database)
    now = [1000.0]
    monkeypatch.setattr(last_seen, "time", SimpleNamespace(time=lambda: now[0]))
    seen.flush()
    assert database.begun == 0, "nothing has come"
    database.error = FULL
    seen.seen("a")
    seen.seen("b")
    seen.served("t", 5)
    seen.flush_if_possible()
    now[0] = 2000.0
    seen.seen("a")
    seen.served("t", 2)
    with pytest.raises(OperationalError):
        seen.flush()
    database.error = None
    seen.flush()
    clients, tasks = database.rows
    assert {row["key"]: row["moment"] for row in clients} == {
        "a": last_seen.clock.text(2000.0),
        "b": last_seen.clock.text(1000.0),
    }
    assert tasks == [{"key": "t", "size": 7}]
    seen.served("t", 1)
    seen.flush()
    assert database.rows[2:] == [[{"key": "t", "size": 1}]], "once, and of clients nothing"
    seen.seen("c")
    seen.flush_if_possible()
    assert [[row["key"] for row in rows] for rows in database.rows[3:]] == [["c"]]


def test_what_was_seen_changes_in_its_turn_alone() -> None:
    class InTurn(LastSeen):
        def __setattr__(self, name: str, value: Any) -> None:
            assert "_progress" not in vars(self) or self._lock.locked(), name
            super().__setattr__(name, value)

    class Held(Counter[str]):
        def __setitem__(self, key: str, value: Any) -> None:
            assert seen._lock.locked()
            super().__setitem__(key, value)

    database: Any = Written()
    database.error, seen = FULL, InTurn(database)
    vars(seen).update({name: Held() for name in ("_seen", "_bytes", "_progress")})
    seen.is_at("t", 0.5)
    seen.seen("a")
    seen.served("t", 5)
    with pytest.raises(OperationalError):
        seen.flush()
    assert (list(seen._seen), seen._bytes) == (["a"], {"t": 5})


def test_progress_is_forgotten_where_nothing_more_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(last_seen.clock, "monotonic", lambda: now[0])
    database: Any = Written()
    seen = LastSeen(database)
    seen.is_at("t", 0.25)
    for later, told in ((159.9, 0.25), (160.0, None)):
        now[0] = later
        assert seen.progress("t") == told
        assert seen.progress("another") is None
        seen.flush()
        assert list(seen._progress) == (["t"] if told else [])


def test_lists_of_a_line_are_cut_and_places_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    about = {"round": 3, "client": "a", "names": list(range(21)), "few": list(range(20)), "why": None, "text": "x"}
    extra = log_lines.of_event("eyes", about)
    assert (extra["federation"], extra["round"], extra["client"]) == ("eyes", 3, "a")
    assert sorted(extra["data"]) == ["few", "names", "text", "why"]
    assert (extra["data"]["names"][19:], len(extra["data"]["few"])) == ([19, "... and 1 more"], 20)
    record = logging.makeLogRecord({"msg": "hello %s", "args": ("you",), **extra})
    words = log_lines.TextFormatter().words(record)
    assert words.startswith("hello you (federation eyes, round 3, client a) names=[0, ")
    assert words.endswith(" text=x")
    assert log_lines.TextFormatter().words(logging.makeLogRecord({"msg": "bare"})) == "bare"
    for format, is_json in (("json", True), ("auto", True), ("text", False)):
        log_lines.configure("warning", format)
        logging.getLogger("x").info("below")
        logging.getLogger("x").warning("above")
        [line] = capsys.readouterr().err.splitlines()
        assert ("above" in line, line.startswith("{") and json.loads(line)["message"] == "above") == (True, is_json)
    assert [logging.getLogger(name).level for name in ("alembic", "uvicorn.access")] == [logging.WARNING] * 2


def test_neighbours_that_tell_the_same_of_clients_are_one_line() -> None:
    same = [("task-settled", {"client": name, "status": "expired"}) for name in "ab"]
    other, alone = ("task-settled", {"client": "c", "status": "failed"}), ("client-enrolled", {"client": "d"})
    told = list(log_lines.together([*same, other, alone, alone, ("x", {}), ("x", {})]))
    assert told == [
        ("tasks-settled", {"status": "expired", "clients": "a, b"}),
        other,
        alone,
        alone,
        ("x", {}),
        ("x", {}),
    ]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, None),
        (FULL, "nothing can be written: the disk is full, make room"),
        (OSError(errno.EIO, "x"), "nothing can be written: the coordinator's log says why"),
        (DatabaseAway("x"), "nothing can be written: the coordinator's log says why"),
        (ObjectStoreAway("x"), "the object store does not answer: the coordinator's log says why"),
    ],
)
def test_whether_the_store_can_be_written_is_asked_now_and_then_and_logged_once(
    error: Exception | None,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, probed = [50.0], list[None]()
    monkeypatch.setattr(writable, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def probe() -> None:
        probed.append(None)
        if isinstance(error, ObjectStoreAway):
            raise error

    database: Any = Written()
    database.error = None if isinstance(error, ObjectStoreAway) else error
    blobs: Any = SimpleNamespace(temporary=lambda: tmp_path / "x", bucket=SimpleNamespace(probe=probe))
    asked = Writable(database, blobs)
    for later, times in ((0.0, 1), (0.99, 1), (1.0, 2), (1.5, 2), (2.0, 3)):
        now[0] = 50.0 + later
        assert asked.why_not() == why
        if database.error is None:
            assert len(probed) == times
    assert len(caplog.messages) == (why is not None)
    if error is FULL:
        assert caplog.messages == [f"{why}: the disk is full"], "in one line"
    database.error = OSError("another")
    now[0] = 53.0
    asked.why_not()
    changed = why is None or not why.startswith("nothing can be written: the coordinator's")
    assert len(caplog.messages) == (why is not None) + changed
    assert list(tmp_path.iterdir()) == []


def test_two_who_ask_at_once_are_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    asked, looks = Writable(nothing, nothing), list[threading.Thread]()

    def look() -> None:
        looks.append(other := threading.Thread(target=asked.why_not))
        if len(looks) == 1:
            other.start()
            other.join(0.05)  # it can only end where it looks too

    monkeypatch.setattr(asked, "_look", look)
    asked.why_not()
    looks[0].join()
    assert len(looks) == 1


def test_what_a_change_did_is_counted_and_kept_to_itself_from_the_first_secret_on() -> None:
    def observed(metrics: Metrics, secret: bool, **run: Any) -> None:
        spec = SimpleNamespace(participation=SimpleNamespace(is_secret=secret))
        recorded = [run_state.Settled("a", "answered"), run_state.Completed(), run_state.Moved("paused", None)]
        after = SimpleNamespace(**{"round": 3, "state": "running"} | run)
        federation = SimpleNamespace(spec=spec, run=after)
        change: Any = SimpleNamespace(federation=federation, completed=[("train", 2.0)], recorded=recorded)
        before: Any = SimpleNamespace(round=1, state="running")
        metrics.observe(change, before)

    metrics = Metrics()
    observed(metrics, False)
    text = metrics.text().decode()
    for line in (
        "rounds_completed_total 2.0", 'tasks_settled_total{status="answered"} 1.0', "phases_completed_total 1.0",
        'federation_moves_total{state="paused"} 1.0', 'phase_seconds_sum{kind="train"} 2.0',
    ):  # fmt: skip
        assert f"promptfed_{line}" in text
    for round, state, over in ((3, "finished", 5.0), (1, "cancelled", 5.0), (0, "enrolling", 5.0)):
        observed(metrics, False, round=round, state=state)
        assert f"promptfed_rounds_completed_total {over}" in metrics.text().decode()
    for secret in (True, False):
        observed(metrics, secret)
        assert "tasks_settled_total" not in metrics.text().decode()
    metrics.refused("phase-closed", True)
    metrics.refused("not-found", False)
    metrics.failed("made-up")
    counted = {kind: metrics.updates.labels(kind)._value.get() for kind in ("late", "refused")}
    assert (counted, metrics.refusals.labels("not-found")._value.get()) == ({"late": 1, "refused": 0}, 1)
