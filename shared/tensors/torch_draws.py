"""Draws as torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor


class TorchDraws(torch.Generator):
    """The draws of clients and of what a coordinator computes with torch, as a ``torch.Generator``."""

    xp = torch

    def uniform(self, *shape: int) -> Tensor:
        """``shape`` float32, uniform in [0, 1)."""
        return torch.rand(shape, generator=self)

    def normal(self, *shape: int) -> Tensor:
        """``shape`` float32 from N(0, 1)."""
        return torch.randn(shape, generator=self)

    def permutation(self, size: int) -> list[int]:
        """The numbers below ``size`` in a random order."""
        order: list[int] = torch.randperm(size, generator=self).tolist()
        return order
