"""The optimizers of tasks: torch's own steps, without torch's compiler, which is not even imported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from promptfed.shared.methods.core.training import eager, make_optimizer
from promptfed.shared.spec.spec import TrainingSpec


def steps(make: Any) -> list[torch.Tensor]:
    """Two groups of parameters after three steps, and what the last gradients have become."""
    parts = [torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_(), torch.linspace(2, 3, 4).requires_grad_()]
    optimizer = make([{"params": parts[:1]}, {"params": parts[1:], "lr": 0.3}])
    for _ in range(3):
        optimizer.zero_grad()
        (parts[0].sin().sum() * parts[1].square().sum()).backward()
        optimizer.step()
    optimizer.zero_grad()
    assert all(part.grad is None for part in parts)
    return [part.detach() for part in parts]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_steps_are_torch_s(name: str) -> None:
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    training = TrainingSpec(optimizer=name, momentum=0.9, weight_decay=0.01)
    given = {"lr": 0.1, "weight_decay": 0.01} | ({"momentum": 0.9} if name == "sgd" else {})
    own = steps(lambda groups: make_optimizer(groups, training, 0.1))
    theirs = steps(lambda groups: kind(groups, **given))
    assert all(torch.equal(one, other) for one, other in zip(own, theirs, strict=True))
    assert issubclass(eager(kind), kind)
