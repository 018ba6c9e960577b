"""The steps of a task with a budget: stored before its answer, so that a repetition after a crash takes as many."""

from __future__ import annotations

from dataclasses import dataclass

from promptfed.client_service.state.faults import point
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.messages import Task
from promptfed.shared.methods.core.interface.base import MethodError
from promptfed.shared.methods.core.interface.budget import StepBudget

FILE = "steps.json"


@dataclass(frozen=True)
class TaskSteps:
    """The optimizer steps that a task takes."""

    task_id: str
    steps: int


def budget_of(task: Task, state: PrivateState, started: float) -> StepBudget | None:
    """The budget of a task that began at ``started`` (`time.monotonic`); None where its training has none."""
    spec = task.config.training.budget
    if spec is None:
        return None
    kept = state.read_as(FILE, TaskSteps)
    known = kept.steps if kept is not None and kept.task_id == task.task_id else None
    return StepBudget(spec, started, known)


def keep_steps(state: PrivateState, task: Task, steps: int) -> None:
    """Make it durable that the task takes so many steps."""
    state.write_as(FILE, TaskSteps(task.task_id, steps))


def taken_steps(budget: StepBudget | None, task: Task, state: PrivateState) -> int | None:
    """The steps that training took, which are stored; None without a budget.

    Raises:
        MethodError: the method has trained without counting them.
    """
    if budget is None:
        return None
    if not budget.taken:
        raise MethodError("training.budget is for the spec's training loop, and this method has its own: leave it out")
    if budget.spec.seconds is not None and budget.known is None:
        keep_steps(state, task, budget.taken)
        point("steps-written")
    return budget.taken
