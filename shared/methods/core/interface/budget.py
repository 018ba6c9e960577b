"""The number of optimizer steps of a task, where the spec's ``training.budget`` says it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from promptfed.shared.spec.budget import MOST_EPOCHS, BudgetSpec


@dataclass
class StepBudget:
    """Counts the steps of one task, and says when they are enough.

    ``started``: when the task began, by ``clock`` in seconds. ``known``: the number of steps of an earlier attempt,
    which takes the place of ``seconds``. ``taken``: None before training has begun.
    """

    spec: BudgetSpec
    started: float = 0.0
    known: int | None = None
    clock: Callable[[], float] = time.monotonic
    taken: int | None = None

    def begin(self, steps_per_epoch: int) -> None:
        """The task's training loop begins."""
        self.taken, self._first = 0, self.clock()
        epochs = MOST_EPOCHS if self.spec.epochs is None else self.spec.epochs
        self._most = self.known or self.spec.steps or epochs * steps_per_epoch

    def step(self) -> bool:
        """Count one more step; False if there is no time for it."""
        assert self.taken is not None
        if self.taken >= self._most or (self.taken and self._is_late()):
            return False
        self.taken += 1
        return True

    @property
    def share(self) -> float:
        """The part of it that was used up before the present step, 0 to 1."""
        assert self.taken
        if self.spec.seconds is not None and self.known is None:
            return min(1.0, (self.clock() - self.started) / self.spec.seconds)
        return (self.taken - 1) / self._most

    def _is_late(self) -> bool:
        """Whether a step that takes as long as those before would end too late."""
        assert self.taken
        if self.spec.seconds is None or self.known is not None:
            return False
        now = self.clock()
        return now + (now - self._first) / self.taken > self.started + self.spec.seconds
