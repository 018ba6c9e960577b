"""Virtual time of a simulation: answers arrive in the order in which clients of given speeds would send them.

A client that is asked to train waits at the clock. Time stands still until everyone who is asked waits; then the client
that would be ready first trains and answers. What that leads to (a state, further tasks) happens at the same time.
Evaluations, payloads and aggregation take no time. So the order of arrivals follows from the seed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from promptfed.client_service.training.data import TRAIN
from promptfed.client_service.training.step_budget import keep_steps
from promptfed.client_service.training.trainer import TaskWork
from promptfed.coordinator.domain.federation import Federation, OpenTask
from promptfed.runtime.speeds import Speeds
from promptfed.shared.messages import ENDED, Task

LOOK_SECONDS = 0.002  # between two looks at the coordinator while it or a client computes

Place = tuple[int, str]
"""Round and phase of a training task, which tell it from the client's others."""


@dataclass(frozen=True)
class Look:
    """A federation at one moment: the number of rounds that are ``over``, and the ``places`` of clients' open tasks.

    ``settled``: nothing is computed that leads to other tasks. ``all_known``: a client without a place has no task.
    """

    state: str
    over: int
    places: Mapping[str, Place]
    settled: bool
    all_known: bool = True

    @classmethod
    def at(cls, federation: Federation) -> Look:
        """At a federation of this process."""
        run = federation.run
        over = run.round if run.state == "finished" else run.round - 1
        places = {name: (task.round, task.phase) for name, task in federation.tasks.items()}
        return cls(run.state, over, places, run.due_job is None)


@dataclass
class Turn:
    """A client's last training task, its ``number``-th, for which the client takes ``seconds``.

    It waits until it is ``over``: let go to train, or no longer open. ``ready``: when it would answer.
    """

    place: Place
    number: int
    seconds: float = 0.0
    ready: float | None = None
    over: bool = False
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def waits(self) -> bool:
        """Whether its client waits."""
        return self.ready is not None and not self.over


@dataclass
class VirtualClock:
    """The clock of one federation. ``rounds`` has the virtual seconds at which each round was over, from round 1 on."""

    speeds: Speeds
    now: float = 0.0
    rounds: list[float] = field(default_factory=list)
    turns: dict[str, Turn] = field(default_factory=dict)

    def took(self, task: OpenTask, received: str) -> float:
        """The virtual seconds of the task that a client has just answered."""
        return self.turns[task.client].seconds

    async def wait(self, work: TaskWork, task: Task) -> None:
        """Return once this client's answer is the next to arrive, or its task is over."""
        if task.kind == "train":
            place = task.round, task.phase
            await self.hold(work.name, place, seconds_of(work, task, self.step(work.name, place)))

    def step(self, name: str, place: Place) -> float:
        """The seconds of an optimizer step in a client's task."""
        turn = self.turns.get(name)
        if turn is None or turn.place != place:
            turn = self.turns[name] = Turn(place, 0 if turn is None else turn.number + 1)
        speeds = self.speeds[name]
        return speeds[turn.number % len(speeds)]

    async def hold(self, name: str, place: Place, seconds: float) -> None:
        """Return once a task of so many seconds is the next to be answered, or over. It can be asked for again."""
        turn = self.turns[name]
        assert turn.place == place, "its step was asked for"
        if turn.ready is None:
            turn.seconds, turn.ready = seconds, self.now + seconds
        if not turn.over:
            await turn.let_go.wait()

    @contextmanager
    def running(self, look: Callable[[], Federation]) -> Iterator[None]:
        """Let time pass in the block; ``look`` returns the federation as it is."""
        task = asyncio.create_task(self._run(look))
        try:
            yield
        finally:
            task.cancel()

    async def _run(self, look: Callable[[], Federation]) -> None:
        while True:
            self.advance(Look.at(look()))
            await asyncio.sleep(LOOK_SECONDS)

    def advance(self, look: Look) -> bool:
        """Let go of those whose tasks are over; if nobody else is awaited, of the client that is ready first.

        Returns whether anything has changed.
        """
        self.rounds += [self.now] * (new := max(0, look.over - len(self.rounds)))
        gone = [name for name, turn in self.turns.items() if turn.waits and _is_over(look, name, turn)]
        waiting = {name: turn.ready for name, turn in self.turns.items() if turn.waits and name not in gone}
        if look.state == "running" and look.settled and waiting and all(name in waiting for name in look.places):
            ready, first = min((ready or 0.0, name) for name, ready in waiting.items())
            self.now = max(self.now, ready)
            gone.append(first)
        for name in gone:
            self.turns[name].over = True
            self.turns[name].let_go.set()
        return bool(gone or new)


def _is_over(look: Look, name: str, turn: Turn) -> bool:
    place = look.places.get(name)
    return look.state in ENDED or (look.all_known if place is None else place != turn.place)


def seconds_of(work: TaskWork, task: Task, step: float) -> float:
    """The virtual seconds of a task on a client that takes ``step`` seconds for an optimizer step.

    Where the task ends within some seconds, the client takes the steps, at least one, that fit into them.
    """
    training = task.config.training
    steps = training.steps(work.data.count(TRAIN))
    if steps is None:
        assert training.budget is not None
        assert training.budget.seconds is not None
        steps = max(1, int(training.budget.seconds / step))
        keep_steps(work.state, task, steps)
    return steps * step
