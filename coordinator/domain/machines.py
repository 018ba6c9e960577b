"""The round machine that a federation's schedule needs."""

from __future__ import annotations

from promptfed.coordinator.domain import events, facts
from promptfed.coordinator.domain.buffered_machine import BufferedMachine
from promptfed.coordinator.domain.round_machine import Machine
from promptfed.coordinator.domain.run_state import Rules, Run


def machine_of(rules: Rules, run: Run) -> Machine:
    """The machine for the schedule of ``rules``, at ``run``."""
    return Machine(rules, run) if rules.schedule is None else BufferedMachine(rules, run)


def step(rules: Rules, run: Run, event: events.Event) -> tuple[Run, tuple[facts.Fact, ...]]:
    """The run after ``event``, and the facts to store.

    Raises:
        WrongMoment: the event does not fit the run's state; nothing has changed.
        NotEnoughTrainers: a start with fewer trainers than the rules need.
    """
    machine = machine_of(rules, run)
    new_facts = machine.advance(event)
    return machine.run, new_facts
