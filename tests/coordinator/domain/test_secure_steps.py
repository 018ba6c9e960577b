"""The five steps of a secure sum in the round machine: who is asked, what fails an attempt, what no order may do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from promptfed.coordinator.domain.round_machine import KINDS, WrongMoment, steps_of
from promptfed.coordinator.domain.run_state import (
    QUORUM_MISSED,
    Answered,
    AnsweredLast,
    AttemptFailed,
    Closed,
    Event,
    Failed,
    JobDone,
    Opened,
    Restarted,
    Resume,
    Rules,
    SumInvalid,
    Withdraw,
)
from promptfed.shared.messages import ENDED
from promptfed.shared.spec.sections import SecureAggregationSpec
from tests.support.played_run import ONE, TWO, Play, rules

FIVE = ("a", "b", "c", "d", "e")


def secure(phases: tuple = ONE, **changes: object) -> Rules:
    spec = SecureAggregationSpec(step_seconds=5, **changes)
    plans = steps_of(phases, spec)
    return replace(rules(plans, quorum=0.6), secure=spec)


def play(**changes: object) -> Play:
    """Five clients whose first round has just opened."""
    return Play(secure(**changes), *FIVE).start().evaluated()


def answer(play: Play, *names: str) -> None:
    for name in names:
        play.send(Answered(name, play.now))


def late(play: Play) -> None:
    """The deadline and the one extension pass."""
    play.later(11)
    play.later(11)


def test_each_step_asks_those_who_answered_the_one_before() -> None:
    run = play()
    stage = run.run.stage
    assert stage is not None
    assert (stage.kind, stage.name, run.open) == ("train", "train", list(FIVE))
    run.all_answer()
    assert (run.run.stage.kind, run.run.stage.name) == ("share", "train/share")
    assert run.run.stage.deadline == run.now + 5
    answer(run, "a", "b", "c", "d")
    run.later(6)
    assert (run.run.stage.kind, run.open) == ("mask", ["a", "b", "c", "d"])
    answer(run, "a", "b", "c")
    run.later(6)
    assert (run.run.stage.kind, run.open) == ("confirm", ["a", "b", "c"])
    assert run.run.answered_first == ("a", "b", "c")
    run.all_answer()
    answer(run, "b")
    run.send(AnsweredLast("c", run.now))
    assert run.run.due_job == "aggregate"
    run.done()
    assert (run.run.round, run.run.stage.kind) == (1, "evaluate")


def test_too_few_in_a_step_begin_another_attempt_with_those_of_the_first() -> None:
    run = play()
    run.all_answer()
    answer(run, "a", "b")
    late(run)
    assert [fact for fact in run.facts if isinstance(fact, AttemptFailed)] == [AttemptFailed(1)]
    assert (run.run.step, run.run.stage.name, run.open) == (5, "train/2", list(FIVE))
    run.send(Withdraw("e", False, run.now))
    run.all_answer().all_answer().all_answer().all_answer()
    run.send(AnsweredLast("a", run.now))
    run.done()
    assert run.run.stage.kind == "evaluate"
    assert run.run.step == 10


def test_the_last_attempt_pauses_and_can_be_resumed() -> None:
    run = play()
    for attempt in ("train", "train/2"):
        assert run.run.stage.name == attempt
        run.all_answer()
        run.send(Failed("e", run.now))
        late(run)
    assert (run.run.state, run.run.reason) == ("paused", QUORUM_MISSED)
    run.send(Resume(run.now))
    assert run.open == list(FIVE), "who failed is asked again"


def test_after_a_reveal_there_is_no_other_attempt() -> None:
    run = play()
    run.all_answer().all_answer().all_answer().all_answer()
    assert run.run.stage.kind == "unmask"
    answer(run, "a", "b")
    late(run)
    assert (run.run.state, run.run.reason, run.run.stage.kind) == (
        "paused",
        QUORUM_MISSED,
        "unmask",
    )
    run.send(Resume(run.now))
    run.send(AnsweredLast("c", run.now))
    assert run.run.due_job == "aggregate"


def test_a_sum_that_cannot_be_pauses_with_its_reason() -> None:
    run = play()
    run.all_answer().all_answer().all_answer().all_answer()
    run.send(AnsweredLast("c", run.now))
    run.send(SumInvalid("sum-invalid: the mean's norm"))
    assert (run.run.state, run.run.reason) == ("paused", "sum-invalid: the mean's norm")
    with pytest.raises(WrongMoment):
        run.send(JobDone(run.now)) if run.run.due_job is None else run.send(AnsweredLast("a", run.now))


def test_two_phases_each_have_their_own_steps() -> None:
    run = Play(secure(TWO), *FIVE).start().evaluated()
    for name in ("prompts", "aggregators"):
        assert run.run.stage.name == name
        run.all_answer().all_answer().all_answer().all_answer()
        run.send(AnsweredLast("a", run.now))
        run.done()
    assert run.run.stage.kind == "evaluate"


class AnyOrder(RuleBasedStateMachine):
    """Events in any order: later sets are within earlier ones, and after a reveal no attempt begins."""

    @initialize(clients=st.integers(3, 6), two=st.booleans())
    def begin(self, clients: int, two: bool) -> None:
        names = [f"c{number}" for number in range(clients)]
        base = secure(TWO if two else ONE)
        self.play = Play(replace(base, min_clients=3), *names).start().evaluated()
        self.closed: dict[tuple[int, int], set[str]] = {}
        self.revealed: set[tuple[int, int]] = set()
        self.finish(self.play.facts)

    def finish(self, facts: list) -> None:
        for fact in facts:
            if isinstance(fact, Opened):
                self.here = (fact.round, fact.step)
                plan = self.play.rules.plan(*self.here)
                if plan is None or plan.secure is None:
                    continue
                if plan.secure.index:
                    assert set(fact.names) <= self.closed[(fact.round, fact.step - 1)]
                else:
                    assert (fact.round, plan.secure.number) not in self.revealed, "no attempt after a reveal"
            elif isinstance(fact, Closed):
                self.closed[self.here] = set(fact.counted)

    def send(self, event: Event) -> None:
        stage, run = self.play.run.stage, self.play.run
        try:
            facts = self.play.send(event)
        except WrongMoment:
            return
        if stage is not None and stage.kind == "unmask" and isinstance(event, Answered | AnsweredLast):
            plan = self.play.rules.plan(run.round, run.step)
            assert plan is not None
            assert plan.secure is not None
            self.revealed.add((run.round, plan.secure.number))
        self.finish(facts)

    @rule(pick=st.integers(0, 99), last=st.booleans())
    def answer(self, pick: int, last: bool) -> None:
        if self.play.open:
            name, stage = self.play.open[pick % len(self.play.open)], self.play.run.stage
            unmask = stage is not None and stage.kind == "unmask"
            self.send(AnsweredLast(name, self.play.now) if unmask and last else Answered(name, self.play.now))

    @rule()
    def all_but_the_sum(self) -> None:
        stage = self.play.run.stage
        if stage is not None and stage.kind != "unmask":
            for name in list(self.play.open):
                self.send(Answered(name, self.play.now))

    @rule(pick=st.integers(0, 99))
    def fail(self, pick: int) -> None:
        if self.play.open:
            self.send(Failed(self.play.open[pick % len(self.play.open)], self.play.now))

    @rule(pick=st.integers(0, 99), discard=st.booleans())
    def withdraw(self, pick: int, discard: bool) -> None:
        names = sorted(self.play.run.members)
        self.send(Withdraw(names[pick % len(names)], discard, self.play.now))

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.play.now += seconds
        self.send(Restarted(self.play.now) if seconds == 1.0 else _tick(self.play.now))

    @rule()
    def resume(self) -> None:
        self.send(Resume(self.play.now))

    @rule()
    def done(self) -> None:
        self.send(JobDone(self.play.now))

    @invariant()
    def a_stage_is_of_its_plan(self) -> None:
        run = getattr(self, "play", None) and self.play.run
        if run and run.stage is not None and run.state not in ENDED:
            plan = self.play.rules.plan(run.round, run.step)
            assert run.stage.kind == ("evaluate" if plan is None else plan.kind)
            assert plan is None or plan.secure is None or KINDS[plan.secure.index] == plan.kind


def _tick(now: float) -> Event:
    from promptfed.coordinator.domain.run_state import Tick

    return Tick(now)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
