"""Jobs whose federation has moved on meanwhile, sums that cannot be, and payloads that are shared or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from promptfed.coordinator import problems
from promptfed.coordinator.domain import run_state
from promptfed.coordinator.domain.federation import OpenTask
from promptfed.coordinator.domain.round_machine import NotEnoughTrainers, WrongMoment
from promptfed.coordinator.engine import jobs, sums
from promptfed.coordinator.problems import CannotStart
from promptfed.shared.methods.core.interface import Measured, MethodError, NeedsBackbone
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.secagg import SecureError
from promptfed.shared.tensors import TensorError
from tests.support.coordinators import InProcess
from tests.support.open_phases import enrolled, launched

Nothing: Any = None


class Registry:
    """Holds a federation, which is another one once something is computed."""

    def __init__(self, before: Any, after: Any = None):
        self.before, self.after = before, after if after is not None else before
        self.sent: list[Any] = []
        timer = SimpleNamespace(time=self._block, observe=lambda seconds: None)
        updates = SimpleNamespace(labels=lambda verdict: SimpleNamespace(inc=lambda number: None))
        self.metrics = SimpleNamespace(job_seconds=SimpleNamespace(labels=lambda name: timer), updates=updates)
        self.database = SimpleNamespace(read=self._block)
        self.blobs = SimpleNamespace(hold=self._block)

    @contextmanager
    def _block(self) -> Iterator[Any]:
        yield self

    def get(self, id: str) -> Any:
        return self.before

    @contextmanager
    def change(self, id: str) -> Iterator[Any]:
        yield SimpleNamespace(federation=self.after, send=self.sent.append, keep=lambda held: None)


def standing(**run: Any) -> Any:
    members = {"a": SimpleNamespace(joined=True)}
    about: dict[str, Any] = {"due_job": "join", "joining": ("b",), "round": 1, "step": 0, "members": members} | run
    return SimpleNamespace(run=SimpleNamespace(**about), spec=None, context=lambda: None)


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is committed; nothing is computed."""
    done: list[Any] = []
    monkeypatch.setattr(jobs, "current_state", lambda *about: {})
    monkeypatch.setattr(jobs, "put_tensors", lambda *about: None)
    monkeypatch.setattr(jobs, "_commit_state", lambda change, state, stored, origin, id: done.append(origin))
    monkeypatch.setattr(jobs.global_state, "joined", lambda *about: {})
    return done


@pytest.mark.parametrize(
    ("after", "there"),
    [
        (standing(), True), (standing(due_job=None), False), (standing(due_job="aggregate"), False),
        (standing(joining=("b", "c")), False),
    ],
)  # fmt: skip
def test_newcomers_join_where_that_is_still_due(after: Any, there: bool, committed: list[Any]) -> None:
    registry: Any = Registry(standing(), after)
    jobs.join(registry, "f")
    assert (committed, [type(event) for event in registry.sent]) == (["join"] * there, [run_state.JobDone] * there)


@pytest.mark.parametrize(
    ("now", "there"), [({}, True), ({"due_job": None}, False), ({"round": 2}, False), ({"step": 1}, False)]
)
def test_an_aggregate_of_a_phase_is_committed_once(
    now: dict[str, Any], there: bool, committed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = SimpleNamespace(id=7, name="train")
    monkeypatch.setattr(jobs.queries, "phase_at", lambda *about: phase)
    monkeypatch.setattr(jobs, "given", lambda *about: SimpleNamespace(updates=[]))
    monkeypatch.setattr(jobs, "compute", lambda *about: jobs.Computed({}, {}, {}))
    registry: Any = Registry(standing(due_job="aggregate"), standing(**{"due_job": "aggregate"} | now))
    if there:
        with pytest.raises(AttributeError, match="batch"):  # what follows is written down by a real change
            jobs.aggregate(registry, "f")
    else:
        jobs.aggregate(registry, "f")
    assert committed == ["train"] * there

    def refuse(*about: Any) -> Any:
        raise SecureError("sum-invalid", "too long")

    monkeypatch.setattr(jobs, "compute", refuse)
    jobs.aggregate(registry, "f")
    assert registry.sent == [run_state.SumInvalid("sum-invalid: too long")]


@pytest.mark.parametrize(
    ("ends", "now", "event"),
    [
        (True, {}, run_state.NoRise), (False, {}, run_state.JobDone), (True, {"due_job": None}, None),
        (True, {"round": 2}, None),
    ],
)  # fmt: skip
def test_an_evaluation_is_judged_once(ends: bool, now: Any, event: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "rises_no_more", lambda *about: ends)
    registry: Any = Registry(standing(due_job="judge"), standing(**{"due_job": "judge"} | now))
    jobs.judge(registry, "f")
    assert [type(sent) for sent in registry.sent] == ([event] if event is not None else [])


def test_what_a_state_keeps_of_a_client_is_forgotten_where_there_is_something(
    coordinator: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, calls = coordinator.registry, list[str]()
    federation, _ = enrolled(coordinator, "a", "b")
    monkeypatch.setattr(jobs.global_state, "forgotten", lambda f, state, client, context: calls.append(client) or state)
    jobs.forget(registry, federation, "a")
    assert calls == [], "there is no state yet"
    coordinator.post(f"{federation}/start")
    coordinator.until(federation, state="running")
    jobs.forget(registry, federation, "a")
    assert calls == ["a"]
    with registry.database.read() as session:
        state = jobs.current_state(registry, session, federation)
    monkeypatch.setattr(jobs.global_state, "forgotten", lambda f, state, client, context: dict(state))
    jobs.forget(registry, federation, "a")
    with registry.database.read() as session:
        rows = jobs.queries.last_state(session, federation)
    assert rows is not None
    assert (rows.origin, sorted(state)) == (jobs.FORGOTTEN, sorted(registry.blobs.tensors(rows.sha256)[0]))
    member = replace(registry.get(federation).run.members["b"], joined=False)
    run = registry.get(federation).run
    registry.note(federation, run=replace(run, members={**run.members, "b": member}))
    monkeypatch.setattr(jobs.global_state, "forgotten", lambda *about: pytest.fail("it has not joined"))
    jobs.forget(registry, federation, "b")
    registry.note(federation, run=run)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (NeedsBackbone("needs words"), "initial-state-missing"), (MethodError("no"), "cannot-start"),
        (TensorError("wrong-shape", "other"), "initial-state-mismatch"),
    ],
)  # fmt: skip
def test_an_initial_state_that_cannot_be_is_told(
    error: Exception, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*about: Any) -> Any:
        raise error

    monkeypatch.setattr(jobs.global_state, "initial_state", fail)
    registry: Any = Registry(None)
    with pytest.raises(problems.Refusal) as told:
        jobs._initial_state(registry, Nothing, Nothing)
    assert told.value.kind == refused


def test_a_method_measures_where_it_has_something_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Measuring(PromptFL):
        def measure(self, *about: Any) -> Any:
            return None

    found, asked = Measured({"gamma": 1.0}), list[str]()
    monkeypatch.setattr(jobs, "call", lambda federation, name, *about: asked.append(name) or found)
    for kind, told in ((PromptFL, Measured()), (Measuring, found)):
        federation: Any = SimpleNamespace(method=kind(PromptFL.Hyper()))
        assert jobs._measured(federation, {}, Nothing, {}, Nothing) == told
    assert asked == ["measure"]


@pytest.mark.parametrize("room", [-1, 0])
def test_a_start_needs_as_much_disk_as_it_will_take(
    room: int, coordinator: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, _ = enrolled(coordinator, "a", "b")
    registry = coordinator.registry
    one = registry.get(federation)
    context = one.context(list(one.run.newcomers()))
    monkeypatch.setattr(jobs, "needed_bytes", lambda *about: 5_000)
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000 + room))
    if room == 0:
        jobs._expect_room(registry, one, context)
    else:
        with pytest.raises(CannotStart, match="2 trainers need about 5,000 bytes of disk at once, and 4,999 are free"):
            jobs._expect_room(registry, one, context)

    def refuse(*about: Any) -> None:
        raise MethodError("too many")

    monkeypatch.setattr(jobs, "check_clients", refuse)
    with pytest.raises(CannotStart, match="too many"):
        jobs._expect_room(registry, one, context)


def test_who_was_withdrawn_while_a_state_was_made_is_not_started_with(
    coordinator: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, _ = enrolled(coordinator, "a", "b", "c")
    made, first = jobs._initial_state, list[Any]()

    def meanwhile(registry: Any, one: Any, context: Any) -> Any:
        first.append([client.name for client in context.clients])
        if len(first) == 1:
            with registry.change(federation) as change:
                change.send(run_state.Withdraw("c", False, 0.0))
                change.client_row("c").active = False
        return made(registry, one, context)

    monkeypatch.setattr(jobs, "_initial_state", meanwhile)
    coordinator.post(f"{federation}/start")
    assert first == [["a", "b", "c"], ["a", "b"]]
    coordinator.until(federation, state="running")
    assert coordinator.get(federation)["asked"] == ["a", "b"]


def open_task(client: str, kind: Any = "train") -> OpenTask:
    return OpenTask(id=f"t-{client}", client=client, kind=kind, round=1, step=0, phase="p", opened_at="")


@pytest.mark.parametrize(
    ("one_payload", "same", "encoded", "remembered"), [(True, True, 1, 1), (False, True, 1, 0), (False, False, 3, 0)]
)
def test_payloads_that_are_the_same_are_encoded_once(
    one_payload: bool, same: bool, encoded: int, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"x": np.zeros(2)}
    monkeypatch.setattr(jobs.global_state, "payload", lambda *about: shared if same else {"x": np.zeros(2)})
    puts, kept = list[Any](), list[str]()

    def put(blobs: Any, held: Any, tensors: Any) -> Any:
        puts.append(tensors)
        return SimpleNamespace(digest=f"sha256:{len(puts)}", size=9)

    monkeypatch.setattr(jobs, "put_tensors", put)
    registry: Any = Registry(None)
    registry.blobs.remember = lambda held, digest: kept.append(digest)
    federation: Any = SimpleNamespace(
        method=SimpleNamespace(one_payload=one_payload),
        context=lambda: None,
        method_phase=lambda round, step: None,
        clients=dict.fromkeys("abc"),
    )
    tasks = [open_task(name) for name in "abc"]
    made = jobs._with_payloads(registry, Nothing, federation, {}, tasks)
    assert (len(puts), len(kept)) == (encoded, remembered)
    digests = [made[task.id].payload_sha256 for task in tasks]
    assert digests == (["sha256:1"] * 3 if encoded == 1 else ["sha256:1", "sha256:2", "sha256:3"])
    assert not jobs._are_the_same({"x": shared["x"]}, {"x": shared["x"], "y": shared["x"]})


def test_an_attempt_and_its_keys_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(sums, "_secure", lambda federation, round, step: SimpleNamespace(first=step - step % 5))
    monkeypatch.setattr(
        sums, "Attempt", lambda database, federation, round, secure: made.append((round, secure.first)) or made[-1]
    )
    registry: Any = SimpleNamespace(attempts={}, keys={}, database=SimpleNamespace(read=Registry(None)._block))
    federation: Any = SimpleNamespace(id="f")
    for round, step in ((1, 0), (1, 4), (1, 5), (2, 0), (2, 1)):
        sums.attempt_of(registry, federation, round, step)
    assert made == [(1, 0), (1, 5), (2, 0)]
    asked: list[Any] = []
    monkeypatch.setattr(
        sums.secure_sums, "answers", lambda session, id, round, step, all_sent: asked.append(step) or {}
    )
    for round, step in ((1, 0), (1, 0), (1, 5), (2, 5)):
        sums.keys_of(registry, federation, round, step)["key"] = "a"
    assert (asked, registry.keys["f"]) == ([0, 5, 5], ((2, 5), {"key": "a"}))


@pytest.mark.parametrize(("limit", "fits"), [(2.0, True), (1.999, False)])
def test_a_mean_change_is_as_long_as_it_may_be(limit: float, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "mean_change", lambda total, weight: np.array([2.0, 0.0]))
    monkeypatch.setattr(sums, "change_limit", lambda spec, method, size: limit if size == 2 else 0.0)
    for name in ("common_payload", "after_mean"):
        monkeypatch.setattr(sums.global_state, name, lambda *about: {"x": 1})
    monkeypatch.setattr(sums.secure_sums, "shapes", lambda *about: {})
    monkeypatch.setattr(sums, "as_tensors", lambda *about: {})
    federation: Any = SimpleNamespace(spec=None, method=None)
    if fits:
        assert sums.state_after(federation, {}, Nothing, Nothing, 1.0, Nothing) == ({"x": 1}, 2.0)
    else:
        with pytest.raises(SecureError, match=r"norm is 2; 1.999 is allowed"):
            sums.state_after(federation, {}, Nothing, Nothing, 1.0, Nothing)


def test_nobody_is_left_out_of_a_step_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_secure", lambda *about: SimpleNamespace(first=0))
    for place in ((2, 0), (1, 1)):
        run = SimpleNamespace(round=place[0], step=place[1], state="running")
        change: Any = SimpleNamespace(federation=SimpleNamespace(run=run))
        with pytest.raises(WrongMoment):
            sums.leave_out(change, open_task("a", "share"), {})


def test_a_start_by_who_may_not_is_told_what_is_missing(coordinator: InProcess) -> None:
    federation, _ = launched(coordinator, "a", "b")
    registry = coordinator.registry
    with pytest.raises(problems.WrongState, match="only a federation that is enrolling can be started"):
        jobs.start(registry, federation)
    assert not registry.get(federation).starting
    few, _ = enrolled(coordinator, "a", name="few")
    with pytest.raises(problems.NotEnoughClients, match="enrolled trainers: 1, needed: 2") as told:
        jobs.start(registry, few)
    assert told.value.members == {"enrolled": 1, "needed": 2}
    assert not registry.get(few).starting


@pytest.mark.parametrize(
    ("sums_", "level", "computed"),
    [(True, False, "summed"), (True, True, "summed"), (False, True, "noised"), (False, False, "aggregated")],
)
def test_a_phase_is_summed_noised_or_aggregated(
    sums_: bool, level: bool, computed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = SimpleNamespace(count=3, weight=40.0)
    monkeypatch.setattr(jobs.sums, "summed", lambda *about: ("summed", total, 0.5))
    monkeypatch.setattr(jobs, "_computed_with_noise", lambda *about: jobs.Computed("noised", {}, {}))
    monkeypatch.setattr(jobs, "room", lambda blobs: Registry(None)._block())
    monkeypatch.setattr(jobs, "Rule", lambda spec, state: SimpleNamespace(judged={"a": 1}))
    monkeypatch.setattr(jobs.global_state, "after_phase", lambda *about: "aggregated")
    monkeypatch.setattr(jobs.global_state, "stored_updates", lambda blobs, updates, changed: changed.update(a=2.0))
    monkeypatch.setattr(jobs.rows, "measured", lambda *about: None)
    monkeypatch.setattr(jobs, "_measured", lambda *about: jobs.Measured({"gamma": 0.5, "none": float("nan")}))
    privacy = SimpleNamespace(protects_clients=level)
    spec = SimpleNamespace(secure_aggregation=object() if sums_ else None, privacy=privacy, aggregation=None)
    federation: Any = SimpleNamespace(spec=spec, method_phase=lambda *about: None, context=lambda: None)
    registry: Any = Registry(None)
    closed: Any = SimpleNamespace(round=1, step=0)
    found = jobs.compute(registry, federation, {}, closed, SimpleNamespace(updates=[], payloads={}))
    assert found.after == computed
    assert (found.total is total, found.judged) == (sums_, {"a": 1} if computed == "aggregated" else {})
    assert (
        found.measured
        == {
            "summed": {"phase": {"sum_clients": 3, "sum_weight": 40.0, "mean_norm": 0.5}, "clients": {}},
            "noised": {},
            "aggregated": {"phase": {"gamma": 0.5}, "clients": {}, "changes": {"a": 2.0}},
        }[computed]
    )


@pytest.mark.parametrize("error", [WrongMoment("enrolling"), NotEnoughTrainers(1, 2)])
@pytest.mark.parametrize("moved_on", [True, False])
def test_a_start_that_comes_too_late_says_why(
    error: Exception, moved_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(event: object) -> None:
        raise error

    def expect(federation: object) -> None:
        assert federation == "as it stands"
        if moved_on:
            raise CannotStart("it has been started")

    monkeypatch.setattr(jobs, "expect_startable", expect)
    change: Any = SimpleNamespace(send=refuse, federation="as it stands")
    with pytest.raises(CannotStart if moved_on else type(error)):
        jobs._send_start(change)
