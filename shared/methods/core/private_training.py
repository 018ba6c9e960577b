"""Differentially private gradients: clipped for each unit over all trained tensors together, summed and noised.

One step of DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016) is

    ḡ = (Σ_{i in S} g_i·min(1, C/‖g_i‖) + z·C·ξ)/(q·n),  ξ ~ N(0, I),  S: each unit with probability q = min(1, B/n)

and the optimizer takes ḡ + ∇R. The divisor is the expected size of S, never its size; an empty S is a step like any
other. Nothing else here depends on data. Sums, noise and division run in float64, where the parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from promptfed.shared.methods.core.interface.protection import Objective, Protection
from promptfed.shared.tensors.lazy import torch
from promptfed.shared.tensors.transfer import sent_to

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS_PER_TEXT = 1 << 13  # of copies times trained numbers at once; bounds memory and does not affect the result
WITHIN = 1 - 1e-6  # factor of the clip: rounding to float32 may add this to a norm


class PrivateGradients:
    """The gradients of one training loop over ``parameters``, step by step.

    ``texts``: copies times classes at once, which bounds the memory. Indices are on the parameters' device, or on the
    CPU where the loss ``reads_images``.

    Without an ``objective``, ``loss(indices)`` is computed for one unit at a time. Where units are groups, a unit's
    loss is the mean over its images.
    """

    def __init__(
        self,
        protection: Protection,
        parameters: Sequence[Tensor],
        loss: Callable[[Tensor], Tensor],
        objective: Objective | None,
        images: int,
        classes: int,
        texts: int,
        reads_images: bool = False,
    ):
        self.event = protection.begin(images)
        self._protection, self._parameters = protection, parameters
        self._loss, self._objective = loss, objective
        self._size = sum(parameter.numel() for parameter in parameters)
        self._most = max(1, min(texts // max(1, classes), texts * NUMBERS_PER_TEXT // max(1, self._size)))
        self._device = parameters[0].device
        self._reads_images = reads_images

    def step(self) -> None:
        """Set the parameters' gradients to ḡ + ∇R."""
        given, q = self._protection, self.event.q
        chosen = torch.from_numpy(given.stream.poisson_sample(given.units, q))
        total = self._summed(chosen)
        noise = torch.from_numpy(given.stream.normals(self._size)) * (given.noise_multiplier * given.clip)
        self._leave((total + sent_to(noise, self._device)) / (q * given.units))

    def _summed(self, chosen: Tensor) -> Tensor:
        """``(d,)`` Σ of the clipped gradients, of fewer units together where the device lacks the memory."""
        while True:
            most = self._most
            with suppress(torch.OutOfMemoryError) if most > 1 else nullcontext():
                total = torch.zeros(self._size, dtype=torch.float64, device=self._device)
                for units in self._chunks(chosen):
                    total += clipped(self._of_units(units), self._protection.clip).sum(dim=0)
                return total
            self._most = most // 2

    def _chunks(self, chosen: Tensor) -> Iterator[Tensor]:
        if len(chosen):
            yield from torch.split(chosen, self._most if self._objective is not None else 1)

    def _of_units(self, units: Tensor) -> Tensor:
        """``(b, d)`` float64: each unit's gradient of the mean loss of its images."""
        if self._protection.rows is None:
            return self._gradients(units)
        if self._objective is None:
            return torch.cat([self._gradients(torch.tensor(self._protection.images_of(int(u)))) for u in units])
        means = torch.zeros(len(units), self._size, dtype=torch.float64, device=self._device)
        for place, unit in enumerate(units.tolist()):
            rows = torch.tensor(self._protection.images_of(unit))
            for part in torch.split(rows, self._most):
                means[place] += self._gradients(part).sum(dim=0) / len(rows)
        return means

    def _gradients(self, rows: Tensor) -> Tensor:
        """``(b, d)`` float64: each image's gradient of its loss; without an objective one for all rows."""
        count = len(rows)
        if not self._reads_images:
            rows = sent_to(rows, self._device)
        if self._objective is None:
            given = torch.autograd.grad(self._loss(rows), self._parameters, allow_unused=True)
            return flat([_there(part, like) for part, like in zip(given, self._parameters, strict=True)], 1)
        copies = [
            parameter.detach().expand(count, *parameter.shape).clone().requires_grad_()
            for parameter in self._parameters
        ]
        losses = self._objective.units(copies, rows)
        given = torch.autograd.grad(losses.sum(), copies, allow_unused=True)
        return flat([_there(part, like) for part, like in zip(given, copies, strict=True)], count)

    def _leave(self, mean: Tensor) -> None:
        """Set each parameter's gradient to its part of ``mean (d,)`` plus R's gradient."""
        parts = torch.split(mean, [parameter.numel() for parameter in self._parameters])
        common = self._common()
        for parameter, part, own in zip(self._parameters, parts, common, strict=True):
            gradient = part.reshape(parameter.shape)
            if own is not None:
                gradient = gradient + own.detach().double()
            parameter.grad = gradient.to(parameter.dtype)

    def _common(self) -> Sequence[Tensor | None]:
        if self._objective is None or self._objective.common is None:
            return [None] * len(self._parameters)
        value = self._objective.common(self._parameters)
        gradients: Sequence[Tensor | None] = torch.autograd.grad(value, list(self._parameters), allow_unused=True)
        return gradients


def clipped(gradients: Tensor, clip: float) -> Tensor:
    """Rows of ``gradients (b, d)`` float64, shortened to length ``clip`` at most; NaN and infinity count as 0."""
    finite = torch.nan_to_num(gradients, nan=0.0, posinf=0.0, neginf=0.0)
    norms: Tensor = torch.linalg.vector_norm(finite, dim=1)
    return finite * (clip * WITHIN / norms.clamp(min=clip * WITHIN)).unsqueeze(1)


def flat(parts: Sequence[Tensor], count: int) -> Tensor:
    """``(count, d)`` float64, of tensors that hold ``count`` gradients each."""
    return torch.cat([part.detach().reshape(count, -1).double() for part in parts], dim=1)


def _there(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient
