"""One forward pass of the text tower for all trainings that start from the same context, as the clients of a round do.

The features keep their graph, so that each training only computes its own gradient. The operations are the same and in
the same order as in a pass of its own: so are the bits.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from promptfed.shared.clip.lru import content_key
from promptfed.shared.clip.towers.tokens import ClassPrompts


@dataclass(frozen=True)
class _Pass:
    """A forward pass: its input, which is a leaf, and its output."""

    start: Tensor
    features: Tensor


class SharedStarts:
    """The last pass of each thread; its graph takes as much memory as one of a training step."""

    def __init__(self) -> None:
        self._kept = threading.local()

    def features(self, context: Tensor, prompts: ClassPrompts, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """`encode(context)` for these prompts, which receives gradients, but no second derivatives."""
        key = prompts, content_key(context), torch.get_num_threads()  # the bits may depend on the number of threads
        kept = getattr(self._kept, "last", None)
        if kept is None or kept[0] != key:
            start = context.detach().clone().requires_grad_()
            kept = self._kept.last = key, _Pass(start, encode(start))
        features: Tensor = _Again.apply(context, kept[1])
        return features


class _Again(torch.autograd.Function):
    """`apply(context, pass)`: the features of a pass, whose gradient goes to `context`."""

    @staticmethod
    def forward(ctx: Any, context: Tensor, made: _Pass) -> Tensor:
        ctx.made = made
        return made.features.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (to_start,) = torch.autograd.grad(ctx.made.features, ctx.made.start, gradient, retain_graph=True)
        return to_start, None
