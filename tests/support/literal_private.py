"""DP-SGD written out slowly: one unit at a time, with plain autograd, from the same stream of draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from promptfed.shared.privacy.noise import NoiseStream


class Silent(NoiseStream):
    """Draws of noise that are all 0."""

    def normals(self, count: int) -> Any:
        return np.zeros(count)


def private_sgd(
    start: Sequence[Tensor],
    unit_loss: Callable[[Sequence[Tensor], int], Tensor],
    common: Callable[[Sequence[Tensor]], Tensor] | None,
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    stream: NoiseStream,
    *,
    units: int,
    batch: int,
    epochs: int,
    clip: float,
    z: float,
) -> list[Tensor]:
    """The tensors after epochs·⌈n/B⌉ steps of ``make``'s optimizer."""
    theta = [tensor.clone().requires_grad_() for tensor in start]
    optimizer = make(theta)
    numbers, q = sum(tensor.numel() for tensor in theta), min(1.0, batch / units)
    for _ in range(epochs * -(-units // batch)):
        chance, total = stream.uniforms(units), torch.zeros(numbers, dtype=torch.float64)
        for unit in range(units):
            if chance[unit] <= q:
                parts = torch.autograd.grad(unit_loss(theta, unit), theta)
                row = torch.cat([part.flatten() for part in parts]).double()
                total += row * min(1.0, clip * (1 - 1e-6) / float(row.norm()))
        mean = (total + torch.from_numpy(stream.normals(numbers)) * z * clip) / (q * units)
        optimizer.zero_grad()
        if common is not None:
            torch.autograd.backward(common(theta))
        for tensor, part in zip(theta, torch.split(mean, [tensor.numel() for tensor in theta]), strict=True):
            own = part.view_as(tensor) if tensor.grad is None else part.view_as(tensor) + tensor.grad.double()
            tensor.grad = own.float()
        optimizer.step()
    return [tensor.detach() for tensor in theta]
