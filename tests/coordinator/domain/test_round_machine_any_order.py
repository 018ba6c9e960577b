"""The round machine without a server: events in any order, and what they must never do."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from promptfed.coordinator.domain.round_machine import NotEnoughTrainers, WrongMoment
from promptfed.coordinator.domain.run_state import (
    Answered,
    Closed,
    Completed,
    Enrolled,
    Event,
    Failed,
    JobDone,
    Moved,
    Opened,
    Pause,
    PhasePlan,
    Restarted,
    Resume,
    Start,
    Tick,
    Withdraw,
)
from promptfed.shared.messages import ENDED
from tests.support.played_run import ONE, TWO, TWO_ALL, Play, rules


class AnyOrder(RuleBasedStateMachine):
    """Events in any order; what they must never do is checked after each."""

    @initialize(
        phases=st.sampled_from([(), ONE, TWO, TWO_ALL]),
        rounds=st.integers(1, 3),
        min_clients=st.integers(1, 3),
        fraction=st.sampled_from([0.1, 0.5, 1.0]),
        quorum=st.sampled_from([0.1, 0.5, 0.67, 1.0]),
        missed=st.sampled_from(["pause", "fail"]),
        every=st.integers(1, 3),
        clients=st.integers(1, 5),
    )
    def begin(
        self,
        phases: tuple[PhasePlan, ...],
        rounds: int,
        min_clients: int,
        fraction: float,
        quorum: float,
        missed: str,
        every: int,
        clients: int,
    ) -> None:
        self.rules = rules(
            phases,
            rounds=rounds,
            min_clients=min_clients,
            fraction=fraction,
            quorum=quorum,
            on_missed_quorum=missed,
            evaluate_every=every,
        )
        self.play = Play(self.rules, *(f"c{number}" for number in range(clients)), evaluators=("e",))
        self.closed: dict[tuple[int, int], tuple[str, ...]] = {}
        self.completed: list[tuple[int, int]] = []
        self.answered: dict[tuple[int, int], set[str]] = {}
        self.extra = 0

    def send(self, event: Event) -> None:
        before = self.play.run
        try:
            facts = self.play.send(event)
        except (WrongMoment, NotEnoughTrainers):
            assert self.play.run == before, "a refused event changes nothing"
            return
        here = (before.round, before.step)
        if isinstance(event, Answered):
            assert before.stage is not None
            assert not before.stage.closed
            assert before.stage.asks[event.name] == "open"
            self.answered.setdefault(here, set()).add(event.name)
        for fact in facts:
            if isinstance(fact, Opened):
                here = (fact.round, fact.step)
                self.check_asked(fact)
            elif isinstance(fact, Closed):
                assert here not in self.closed, "a stage closes once"
                assert set(fact.counted) <= self.answered.get(here, set())
                self.closed[here] = fact.counted
            elif isinstance(fact, Completed):
                assert here in self.closed
                assert here not in self.completed, "a stage is aggregated once"
                self.completed.append(here)
            elif isinstance(fact, Moved) and fact.state == "finished":
                assert here[0] == self.rules.rounds

    def check_asked(self, fact: Opened) -> None:
        members = self.play.run.members
        assert all(members[name].joined for name in fact.names)
        if fact.kind == "train":
            assert all(members[name].role == "trainer" for name in fact.names), "evaluators are never sampled"

    @rule(pick=st.integers(0, 100))
    def answer(self, pick: int) -> None:
        names = sorted(self.play.run.members)
        self.send(Answered(names[pick % len(names)], self.play.now))

    @precondition(lambda self: bool(self.play.open))
    @rule(pick=st.integers(0, 100))
    def answer_when_asked(self, pick: int) -> None:
        self.send(Answered(self.play.open[pick % len(self.play.open)], self.play.now))

    @rule(pick=st.integers(0, 100))
    def fail(self, pick: int) -> None:
        names = sorted(self.play.run.members)
        self.send(Failed(names[pick % len(names)], self.play.now))

    @rule(pick=st.integers(0, 100), discard=st.booleans())
    def withdraw(self, pick: int, discard: bool) -> None:
        names = sorted(self.play.run.members)
        self.send(Withdraw(names[pick % len(names)], discard, self.play.now))

    @rule(role=st.sampled_from(["trainer", "evaluator"]))
    def enrol(self, role: str) -> None:
        self.extra += 1
        self.send(Enrolled(f"late{self.extra}", role))

    @rule(seconds=st.sampled_from([0.0, 3.0, 10.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.play.now += seconds
        self.send(Tick(self.play.now))

    @rule()
    def start(self) -> None:
        self.send(Start(self.play.now))

    @rule()
    def work(self) -> None:
        self.send(JobDone(self.play.now))

    @rule()
    def pause(self) -> None:
        self.send(Pause())

    @rule()
    def resume(self) -> None:
        self.send(Resume(self.play.now))

    @rule()
    def restart(self) -> None:
        self.play.now += 1000
        self.send(Restarted(self.play.now))

    @invariant()
    def what_runs_waits_for_something_that_ends(self) -> None:
        run = self.play.run
        if run.state == "running" and run.due_job is None:
            assert run.stage is not None
            assert not run.stage.closed
            assert run.stage.deadline <= self.play.now + self.rules.deadline_seconds
        if run.due_job == "aggregate":
            assert run.stage is not None
            assert run.stage.closed
        if run.state in ENDED:
            assert run.stage is None
            assert run.due_job is None

    @invariant()
    def completed_stages_are_in_order(self) -> None:
        assert self.completed == sorted(self.completed)

    def teardown(self) -> None:
        """However it stands: if nobody ever answers again, it ends or asks for the operator in a bounded time."""
        for _ in range(10 * (self.rules.rounds + 1) * 4 + 20):
            if self.play.run.state != "running":
                return
            if self.play.run.due_job is not None:
                self.work()
            else:
                self.wait(self.rules.deadline_seconds)
        raise AssertionError("it waits without end")


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
