"""TaskRes against its equation, written out with loops."""

from __future__ import annotations

import math

import torch
from promptfed_task_residual import TaskResidual, TaskResidualHyper, class_weights

from promptfed.shared.methods.core.interface import ServerContext
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors.torch_tensors import TorchDraws


def test_the_weights_are_the_papers() -> None:
    draws = torch.Generator().manual_seed(1)
    text, residual = (torch.randn(3, 4, generator=draws) for _ in range(2))
    found = class_weights(text, residual, alpha=0.5)
    for row in range(3):
        shifted = [float(text[row, i]) + 0.5 * float(residual[row, i]) for i in range(4)]
        length = math.sqrt(sum(value**2 for value in shifted))
        for i in range(4):
            assert abs(float(found[row, i]) - shifted[i] / length) <= 1e-5


def test_round_0_is_the_template() -> None:
    method = TaskResidual(TaskResidualHyper())
    context = ServerContext(TrainingSpec(), BackboneShape(d_e=4), ("cat", "dog"), (), seed=0, rounds=1)
    state = method.initial_state(context, TorchDraws())
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {"residual": (2, 4)}
    assert not state["residual"].any()
