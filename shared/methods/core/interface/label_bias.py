"""The threshold that a federation learns for images with several labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from promptfed.shared.methods.core.interface.protection import Objective
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from promptfed.shared.clip import Backbone

STEP = 4.0  # 1/L: the second derivative of a mean binary cross-entropy in its bias is at most 1/4


class LabelBias:
    """b = s·β, one number that is added to all logits, and trained by gradient steps of its own.

    ``leaf (1,)`` is C·b, so that its gradient is the mean over the classes and at most 1, like that of one logit.
    The spec's optimizer and rates do not apply to it: a step of 1/L lowers the loss for any scale of the logits.
    """

    def __init__(self, beta: Tensor, backbone: Backbone, classes: int):
        self._unit = classes * backbone.logit_scale
        self._classes = classes
        self.leaf = (beta.to(backbone.device) * self._unit).detach().clone().requires_grad_()
        self._current = self.leaf

    @property
    def value(self) -> Tensor:
        """β ``(1,)``."""
        return self.leaf.detach() / self._unit

    def added(self, logits: Tensor) -> Tensor:
        """``logits (B, C)`` plus b, or plus each image's own copy of it."""
        return logits + (self._current / self._classes).reshape(-1, 1)

    def step(self) -> None:
        """One step along the leaf's gradient, if it has one."""
        if self.leaf.grad is not None:
            with torch.no_grad():
                self.leaf -= STEP * self._classes * self.leaf.grad
            self.leaf.grad = None

    def among(self, objective: Objective) -> Objective:
        """``objective`` with the leaf as the last of its parameters."""

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            self._current = copies[-1]
            try:
                return objective.units(copies[:-1], indices)
            finally:
                self._current = self.leaf

        common = objective.common
        others: Callable[[Sequence[Tensor]], Tensor] | None = None
        if common is not None:
            others = lambda parameters: common(parameters[:-1])  # noqa: E731
        return Objective(units, others)
