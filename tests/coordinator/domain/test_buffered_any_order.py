"""Asynchronous rounds without a server: events in any order, and what they must never do."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from promptfed.coordinator.domain.events import Answered, Event
from promptfed.coordinator.domain.facts import Closed, Opened, Settled
from promptfed.coordinator.domain.round_machine import NotEnoughTrainers, WrongMoment
from promptfed.shared.messages import ENDED
from promptfed.shared.spec.schedule import ScheduleSpec
from tests.coordinator.domain.test_round_machine_any_order import AnyOrder
from tests.support.played_run import ONE, Play, rules


class AnyOrderBuffered(AnyOrder):
    """The same events. An answer may come while no round is open; it counts in the next one, and once."""

    @initialize(
        buffer=st.integers(1, 4),
        concurrency=st.sampled_from([None, 4, 6]),
        late=st.integers(0, 2),
        rounds=st.integers(1, 4),
        quorum=st.sampled_from([0.1, 0.67, 1.0]),
        missed=st.sampled_from(["pause", "fail"]),
        every=st.integers(1, 4),
        clients=st.integers(1, 5),
    )
    def begin(
        self,
        buffer: int,
        concurrency: int | None,
        late: int,
        rounds: int,
        quorum: float,
        missed: str,
        every: int,
        clients: int,
    ) -> None:
        schedule = ScheduleSpec(kind="buffered", buffer=buffer, concurrency=concurrency, max_staleness=late)
        self.rules = rules(
            ONE, rounds=rounds, quorum=quorum, on_missed_quorum=missed, evaluate_every=every, schedule=schedule
        )
        self.play = Play(self.rules, *(f"c{number}" for number in range(clients)), evaluators=("e",))
        self.completed: list[tuple[int, int]] = []
        self.waiting: dict[str, int] = {}  # accepted and not counted yet, by the round of their state
        self.begun: dict[str, int] = {}
        self.extra = 0

    def send(self, event: Event) -> None:
        before = self.play.run
        try:
            facts = self.play.send(event)
        except (WrongMoment, NotEnoughTrainers):
            assert self.play.run == before, "a refused event changes nothing"
            return
        if isinstance(event, Answered) and event.name in before.busy:
            assert event.name not in self.waiting, "a client answers once for each state"
            self.waiting[event.name] = before.busy[event.name]
        round = before.round
        for fact in facts:
            if isinstance(fact, Opened):
                round = fact.round
                self.check_asked(fact)
            elif isinstance(fact, Settled) and fact.status == "discarded":
                self.waiting.pop(fact.name, None)
            elif isinstance(fact, Closed) and before.round <= round:
                self.check_counted(fact, round)
        self.waiting = {name: began for name, began in self.waiting.items() if self.is_known(name)}

    def check_counted(self, fact: Closed, round: int) -> None:
        trained = [name for name in fact.counted if name in self.waiting]
        if not trained:
            return  # an evaluation
        assert trained == list(fact.counted)
        assert len(trained) <= max(1, len(self.play.run.members))
        for name in trained:
            assert 0 <= round - self.waiting.pop(name) <= self.rules.schedule.max_staleness

    def is_known(self, name: str) -> bool:
        run = self.play.run
        stage = run.stage
        return name in run.early or (stage is not None and stage.asks.get(name) == "answered")

    @invariant()
    def the_room_is_kept(self) -> None:
        run, schedule = self.play.run, self.rules.schedule
        if schedule.concurrency is not None:
            assert len(run.busy) <= schedule.concurrency
        assert not set(run.busy) & set(run.early)
        if run.state in ENDED:
            assert not run.busy
            assert not run.early


TestAnyOrderBuffered = AnyOrderBuffered.TestCase
TestAnyOrderBuffered.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
