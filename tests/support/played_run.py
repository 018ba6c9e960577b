"""A run of the round machine that is played by hand."""

from __future__ import annotations

from dataclasses import replace

from promptfed.coordinator.domain.round_machine import Machine, step
from promptfed.coordinator.domain.run_state import (
    Answered,
    Enrolled,
    Event,
    Fact,
    JobDone,
    PhasePlan,
    Rules,
    Run,
    Start,
    Tick,
)

ONE = (PhasePlan("train"),)
TWO = (PhasePlan("prompts"), PhasePlan("aggregators"))
TWO_ALL = (PhasePlan("prompts"), PhasePlan("aggregators", "all"))


def rules(phases: tuple[PhasePlan, ...] = ONE, **changes: object) -> Rules:
    """Of two rounds in which everybody is asked and must answer; ``changes`` are laid over them."""
    base = Rules(
        draw=3,
        rounds=2,
        min_clients=1,
        fraction=1.0,
        quorum=1.0,
        deadline_seconds=10.0,
        on_missed_quorum="pause",
        evaluate_every=1,
        phases=lambda round: phases,
    )
    return replace(base, **changes)


class Play:
    """A run that is played by hand; ``now`` is its clock. One machine that takes all events comes to the same run."""

    def __init__(self, rules: Rules, *names: str, evaluators: tuple[str, ...] = ()):
        self.rules, self.run, self.now = rules, Run(), 0.0
        self.facts: list[Fact] = []
        self._machine = Machine(rules, self.run)
        for name in names:
            self.send(Enrolled(name, "trainer"))
        for name in evaluators:
            self.send(Enrolled(name, "evaluator"))

    def send(self, event: Event) -> list[Fact]:
        if self._machine.run != self.run or self._machine.rules is not self.rules:  # a test has changed it
            self._machine = Machine(self.rules, self.run)
        self.run, facts = step(self.rules, self.run, event)
        assert self._machine.advance(event) == facts
        assert self._machine.run == self.run
        self.facts += facts
        return list(facts)

    def start(self) -> Play:
        self.send(Start(self.now))
        return self

    def evaluated(self) -> Play:
        """All evaluate."""
        assert self.run.stage is not None
        assert self.run.stage.kind == "evaluate"
        return self.all_answer()

    def all_answer(self) -> Play:
        assert self.run.stage is not None
        for name in self.run.stage.having("open"):
            self.send(Answered(name, self.now))
        return self

    def done(self) -> Play:
        self.send(JobDone(self.now))
        return self

    def later(self, seconds: float) -> list[Fact]:
        self.now += seconds
        return self.send(Tick(self.now))

    @property
    def open(self) -> list[str]:
        return self.run.stage.having("open") if self.run.stage else []
