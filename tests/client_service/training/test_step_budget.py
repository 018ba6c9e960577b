"""A client with a budget of seconds: the number of its steps is stored, sent, and taken again after a kill."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from promptfed.client_service.exits import Exit
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.training import step_budget
from promptfed.client_service.training.step_budget import FILE, TaskSteps
from promptfed.shared.methods.core.interface.budget import StepBudget
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors.torch_tensors import decode
from tests.client_service.conftest import MakeCoordinator, MakeWorker
from tests.support.fake_coordinator import FakeCoordinator


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def training(**budget: Any) -> dict[str, Any]:
    return TrainingSpec(learning_rate=0.1, batch_size=4, budget=budget).model_dump()


def sent(coordinator: FakeCoordinator) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    return [decode(body) for body in coordinator.received if body[8:9] == b"{"]


def test_a_repetition_takes_the_stored_number_of_steps_and_has_its_bits(
    make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(name: str) -> None:
        raise Killed(name)

    monkeypatch.setattr(step_budget, "point", die)
    coordinator = make_coordinator(rounds=1, training=training(seconds=0.3))
    with pytest.raises(Killed, match="steps-written"):
        asyncio.run(make_worker(coordinator).run())
    assert not sent(coordinator)
    state = PrivateState(settings.state_dir)
    stored = state.read_as(FILE, TaskSteps)
    state.close()
    assert stored is not None
    assert stored.steps >= 1

    with monkeypatch.context() as slow:
        # By the clock there would be time for one step.
        slow.setattr(StepBudget, "_is_late", lambda budget: budget.known is None)
        assert asyncio.run(make_worker(coordinator).run()) is Exit.OK
    [(tensors, about)] = sent(coordinator)
    assert about["steps"] == stored.steps
    other = make_coordinator(rounds=1, training=training(steps=stored.steps))
    folder = settings.model_copy(update={"state_dir": settings.state_dir / "other"})
    assert asyncio.run(make_worker(other, settings=folder).run()) is Exit.OK
    [(again, told)] = sent(other)
    assert told["steps"] == stored.steps
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)


def test_the_next_task_has_a_number_of_its_own(
    make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = iter([3, 5])
    begin = StepBudget.begin

    def limited(budget: StepBudget, steps_per_epoch: int) -> None:
        begin(budget, steps_per_epoch)
        budget._most = next(allowed)

    monkeypatch.setattr(StepBudget, "begin", limited)
    coordinator = make_coordinator(rounds=2, training=training(seconds=600.0))
    assert asyncio.run(make_worker(coordinator).run()) is Exit.OK
    assert [about["steps"] for _, about in sent(coordinator)] == [3, 5]


def test_without_a_budget_nothing_is_said_of_steps(
    make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings
) -> None:
    coordinator = make_coordinator(rounds=1)
    asyncio.run(make_worker(coordinator).run())
    [(_, about)] = sent(coordinator)
    assert "steps" not in about
    assert not (settings.state_dir / FILE).exists()
