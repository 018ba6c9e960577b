"""``training.budget``: numbers of steps, their weights, and every method under one."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import METHODS, make_method, resolve_spec
from promptfed.shared.methods.core.interface.base import ClientContext, MethodError
from promptfed.shared.methods.core.interface.budget import StepBudget
from promptfed.shared.methods.core.training import train
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.budget import BudgetSpec, accumulated
from promptfed.shared.spec.spec import SpecError
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone

SGD = {"optimizer": "sgd", "learning_rate": 0.01}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def able(name: str) -> bool:
    """Whether the method takes a budget, by its check."""
    raw = {"name": "budget", "method": {"name": name}, "class_names": list(NAMES)}
    try:
        resolve_spec(raw | {"training": SGD | {"budget": {"steps": 4}}})
    except SpecError as error:
        return not any(one["path"] == "training.budget" for one in error.errors)
    return True


ABLE = sorted(name for name in METHODS.own() if able(name))


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_accumulated_is_what_torch_s_sgd_makes_of_gradients_of_one(steps: int, momentum: float) -> None:
    """‖a‖₁ is the distance of a run on a constant gradient, and the sum of the coefficients written out."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    by_hand = sum(momentum**power for step in range(steps) for power in range(steps - step))
    assert accumulated(steps, momentum) == pytest.approx(-weight.item(), rel=1e-12)
    assert accumulated(steps, momentum) == pytest.approx(by_hand, rel=1e-12)


def context_with(backbone: Backbone, budget: StepBudget | None, images: int = 6, **training: Any) -> ClientContext:
    return replace(client_context(backbone, images, **training), budget=budget)


def seen(context: ClientContext) -> tuple[list[list[int]], float]:
    """The batches of a training, and the loss that it returns: the mean of the images' numbers."""
    given: list[list[int]] = []
    weight = torch.zeros(1, requires_grad=True)

    def loss(indices: torch.Tensor) -> torch.Tensor:
        given.append(indices.tolist())
        return indices.float().mean() + 0 * weight.sum()

    return given, train(context, [weight], loss)


@pytest.mark.parametrize(("given", "steps"), [({"steps": 5}, 5), ({"epochs": 2}, 6), ({"seconds": 60.0}, 4)])
def test_a_budget_cuts_the_same_batches(backbone: Backbone, given: dict[str, Any], steps: int) -> None:
    known = 4 if "seconds" in given else None
    budget = StepBudget(BudgetSpec(**given), 0.0, known)
    found, loss = seen(context_with(backbone, budget, batch_size=2, epochs=1))
    plain, _ = seen(context_with(backbone, None, batch_size=2, epochs=3))
    assert found == plain[:steps]
    assert budget.taken == steps
    last = [number for batch in found[3 * ((steps - 1) // 3) :] for number in batch]
    assert loss == pytest.approx(sum(last) / len(last)), "the mean over the images of the last epoch, whole or not"


def test_a_whole_epoch_s_loss_has_the_bits_that_it_has_without_a_budget(backbone: Backbone) -> None:
    budget = StepBudget(BudgetSpec(epochs=2))
    assert seen(context_with(backbone, budget, batch_size=4)) == seen(
        context_with(backbone, None, batch_size=4, epochs=2)
    )


@pytest.mark.parametrize(("seconds", "steps"), [(0.5, 1), (1.5, 1), (2.0, 2), (7.9, 7), (86400.0, 30_000)])
def test_a_task_ends_within_its_seconds_after_at_least_one_step(seconds: float, steps: int) -> None:
    """Each step takes one second; 10,000 epochs of three steps are the most."""
    ticks = count()
    budget = StepBudget(BudgetSpec(seconds=seconds), 0.0, clock=lambda: float(next(ticks)))
    budget.begin(3)
    taken = 0
    while budget.step():
        taken += 1
    assert (taken, budget.taken) == (steps, steps)


def test_a_second_training_loop_is_refused(backbone: Backbone) -> None:
    context = context_with(backbone, StepBudget(BudgetSpec(steps=2)))
    seen(context)
    with pytest.raises(MethodError, match="one training loop"):
        seen(context)


@pytest.mark.parametrize("given", [{}, {"steps": 1, "epochs": 1}])
def test_a_budget_is_one_of_three(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give one of steps, seconds and epochs"):
        BudgetSpec(**given)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"training": {"optimizer": "adam"}}, "none for adam"),
        ({"secure_aggregation": {}, "participation": {"min_clients": 3}}, "no number leaves"),
        (
            {
                "privacy": {"level": "client", "clip": 1.0, "noise_multiplier": 1.0},
                "aggregation": {"weighting": "uniform"},
            },
            "must not scale",
        ),
        ({"privacy": {"level": "sample", "clip": 1.0, "noise_multiplier": 1.0}}, "accounts for the steps"),
        ({"method": {"name": "plan"}}, "no change to weigh"),
        ({"method": {"name": "fedprox"}}, "proximal"),
        ({"method": {"name": "coop"}}, "nothing to weigh"),
    ],
)
def test_what_has_no_weights_is_refused_with_the_reason(changes: dict[str, Any], why: str) -> None:
    raw: dict[str, Any] = {"name": "budget", "method": {"name": "promptfl"}, **changes}
    raw["training"] = {**SGD, "budget": {"steps": 4}, **changes.get("training", {})}
    with pytest.raises(SpecError, match=why) as caught:
        resolve_spec(raw)
    assert "training.budget" in {error["path"] for error in caught.value.errors}


@pytest.mark.parametrize("name", ABLE)
def test_every_method_with_a_budget_takes_its_steps(backbone: Backbone, name: str) -> None:
    """Two epochs' worth of steps, in one loop, are the two epochs."""
    method = make_method({"name": name} | ({"m": 4} if "m" in METHODS[name].Hyper.model_fields else {}))
    server = server_context(backbone, "a")
    [phase] = method.phases(1, 4)
    state = method.initial_state_with(backbone, server, initial_draws(3))
    payload = method.payload(state, phase, server.clients[0], server)
    sent = []
    for budget, epochs in ((StepBudget(BudgetSpec(steps=4)), 1), (None, 2)):
        context = context_with(backbone, budget, learning_rate=0.01, batch_size=3, epochs=epochs, phase=phase.name)
        sent.append(method.train(context, payload, {}).update)
        assert budget is None or budget.taken == 4
    assert sent[0].keys() == sent[1].keys()
    assert all(torch.equal(sent[0][key], sent[1][key]) for key in sent[0])


def test_most_methods_take_a_budget() -> None:
    assert {"promptfl", "fedavg", "fedtpg", "fedpgp", "fedclip", "fedvpt"} <= set(ABLE)
    assert not {"plan", "pfedpg", "fast_pt", "fedprox", "fedlp", "perfedavg"} & set(ABLE)
