"""Virtual time of a simulation: answers arrive in the order in which clients of given speeds would send them.

A client that is asked to train waits at the clock. Time stands still until everyone who is asked waits; then the client
that would be ready first trains and answers. What that leads to (a state, further tasks) happens at the same time.
Evaluations, payloads and aggregation take no time. So the order of arrivals follows from the seed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from promptfed.client_service.training.data import TRAIN
from promptfed.client_service.training.step_budget import keep_steps
from promptfed.client_service.training.trainer import TaskWork
from promptfed.coordinator.domain.federation import Federation
from promptfed.runtime.speeds import Speeds
from promptfed.shared.messages import ENDED, Task

LOOK_SECONDS = 0.002  # between two looks at the coordinator while it or a client computes


@dataclass(frozen=True)
class _Waiting:
    task_id: str
    ready: float
    let_go: asyncio.Event


@dataclass
class VirtualClock:
    """The clock of one federation. ``rounds`` has the virtual seconds at which each round was over, from round 1 on."""

    speeds: Speeds
    now: float = 0.0
    rounds: list[float] = field(default_factory=list)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)

    async def wait(self, work: TaskWork, task: Task) -> None:
        """Return once this client's answer is the next to arrive, or its task is over."""
        if task.kind != "train":
            return
        name = work.name
        seconds = seconds_of(work, task, next(self.speeds[name]))
        waiting = self._waiting[name] = _Waiting(task.task_id, self.now + seconds, asyncio.Event())
        await waiting.let_go.wait()

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
            self._advance(look())
            await asyncio.sleep(LOOK_SECONDS)

    def _advance(self, federation: Federation) -> None:
        """Let go of those whose tasks are over; if nobody else is awaited, of the client that is ready first."""
        run, tasks = federation.run, federation.tasks
        over = run.round if run.state == "finished" else run.round - 1
        self.rounds += [self.now] * (over - len(self.rounds))
        for name, waiting in list(self._waiting.items()):
            if run.state in ENDED or name not in tasks or tasks[name].id != waiting.task_id:
                self._let_go(name)
        still = run.due_job is None and all(name in self._waiting for name in tasks)
        if run.state == "running" and still and self._waiting:
            first = min(self._waiting, key=lambda name: (self._waiting[name].ready, name))
            self.now = max(self.now, self._waiting[first].ready)
            self._let_go(first)

    def _let_go(self, name: str) -> None:
        self._waiting.pop(name).let_go.set()


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
