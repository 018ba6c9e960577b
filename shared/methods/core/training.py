"""The local training loop: seeded batches, a fresh optimizer in each task, a cosine schedule over rounds.

Differentially private gradients are clipped for each unit over all trained tensors together, summed and noised.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import unwrap
from itertools import repeat
from typing import TYPE_CHECKING, Any

from promptfed.shared.methods.core.interface import ClientContext, MethodError
from promptfed.shared.methods.core.objectives import Objective, Protection, UnprotectedError
from promptfed.shared.seeds import generator
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors.lazy import F, torch
from promptfed.shared.tensors.memory import in_parts
from promptfed.shared.tensors.transfer import sent_to

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.optim.optimizer import ParamsT

    from promptfed.shared.clip import Backbone


NUMBERS_PER_TEXT = 1 << 13  # of copies times trained numbers at once; bounds memory and does not affect the result
WITHIN = 1 - 1e-6  # factor of the clip: rounding to float32 may add this to a norm
log = logging.getLogger("promptfed.training")
NO_ROOM = (
    "the device has no room for a step with one image: lower training.batch_size, take a smaller "
    "backbone, or let fewer clients share the GPU"
)
Loss = Callable[["Tensor"], "Tensor"]


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
        protection, q = self._protection, self.event.q
        chosen = torch.from_numpy(protection.stream.poisson_sample(protection.units, q))
        total = self._summed(chosen)
        noise = torch.from_numpy(protection.stream.normals(self._size)) * (
            protection.noise_multiplier * protection.clip
        )
        self._leave((total + sent_to(noise, self._device)) / (q * protection.units))

    def _summed(self, chosen: Tensor) -> Tensor:
        """``(d,)`` Σ of the clipped gradients, of fewer units together where the device lacks the memory."""

        def summed(most: int) -> Tensor:
            self._most = most
            total = torch.zeros(self._size, dtype=torch.float64, device=self._device)
            for units in self._chunks(chosen):
                total += clipped(self._of_units(units), self._protection.clip).sum(dim=0)
            return total

        return in_parts(summed, self._most, lambda most: None, torch.OutOfMemoryError(NO_ROOM))

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
            gradients = torch.autograd.grad(self._loss(rows), self._parameters, allow_unused=True)
            return flat([_there(part, like) for part, like in zip(gradients, self._parameters, strict=True)], 1)
        copies = [
            parameter.detach().expand(count, *parameter.shape).clone().requires_grad_()
            for parameter in self._parameters
        ]
        losses = self._objective.units(copies, rows)
        gradients = torch.autograd.grad(losses.sum(), copies, allow_unused=True)
        return flat([_there(part, like) for part, like in zip(gradients, copies, strict=True)], count)

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


@dataclass(frozen=True)
class Group:
    """Tensors with their own learning rate, which the spec's cosine scales unless it is ``constant``."""

    parameters: Sequence[Tensor]
    learning_rate: float
    constant: bool = False


class TaskCancelled(Exception):
    """The client was told to stop during training; the task's results are discarded."""


def leaf(start: Tensor, backbone: Backbone) -> Tensor:
    """A copy of ``start`` on the backbone's device that takes gradients."""
    return start.to(backbone.device).clone().requires_grad_()


def leaves(start: Mapping[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    """`leaf` of each tensor, by name."""
    return {name: leaf(tensor, backbone) for name, tensor in start.items()}


def make_optimizer(
    parameters: ParamsT, training: TrainingSpec, learning_rate: float, *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """The spec's optimizer over ``parameters``, which may be in groups. "SGD" here has momentum and weight decay.

    ``fused``: one operation steps all of them, on a device that has it.
    """
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    momentum = {"momentum": training.momentum} if training.optimizer == "sgd" else {}
    optimizer: torch.optim.Optimizer = eager(kinds[training.optimizer])(
        parameters, lr=learning_rate, weight_decay=training.weight_decay, fused=fused, **momentum
    )
    return optimizer


@cache
def eager(kind: type[Any]) -> type[Any]:
    """torch's optimizer ``kind`` with the same steps, but without what torch wraps around them for its compiler.

    The compiler is not used, and its import at the first step takes two seconds.
    """
    plain = {name: unwrap(getattr(kind, name)) for name in ("step", "zero_grad", "add_param_group")}
    return type(kind.__name__, (kind,), plain | {"step": torch.no_grad()(plain["step"])})


def learning_rate(training: TrainingSpec, round: int, rounds: int) -> float:
    """The rate of ``round`` (from 1): constant, or a half cosine over all rounds, η/2·(1 + cos(π(r−1)/R))."""
    if training.schedule == "constant":
        return training.learning_rate
    return training.learning_rate / 2 * (1 + math.cos(math.pi * (round - 1) / rounds))


def batches(
    count: int, batch_size: int, epochs: int | None, draws: Generator, device: torch.device | None = None
) -> Iterator[Tensor]:
    """Indices ``(B,)`` of each batch: every epoch a new order, the last batch of an epoch may be smaller.

    ``epochs`` None: without end. ``device``: where the order of an epoch is sent; it is drawn on the CPU.
    """
    for _ in repeat(None) if epochs is None else repeat(None, epochs):
        order = torch.randperm(count, generator=draws)
        yield from torch.split(order if device is None else sent_to(order, device), batch_size)


def _with_next(parts: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each part, with the one that follows."""
    part = next(parts, None)
    while part is not None:
        following = next(parts, None)
        yield part, following
        part = following


def train(
    context: ClientContext,
    parameters: Sequence[Tensor],
    loss: Loss,
    *,
    epochs: int | None = None,
    groups: Sequence[Group] = (),
    objective: Objective | None = None,
    reads_images: bool = False,
) -> float:
    """Minimise ``loss(indices (B,))`` over ``parameters``, which are changed in place.

    Indices are on the backbone's device, or on the CPU where the loss ``reads_images`` or patches from the split. On a
    GPU, steps that do the same operations each time are replayed (`promptfed.shared.tensors.replay`).

    ``epochs`` overrides the spec's; ``groups`` are trained in addition to ``parameters``, which may be empty. Returns
    the mean loss over the samples of the last epoch. If the task is protected, gradients are private and NaN is
    returned. They are those of ``objective``'s units or, without one, of ``loss`` for one image at a time, which must
    then read only that image.

    Raises:
        UnprotectedError: the task is protected, and this would be trained without.
        MethodError: the client has no training images, or the loss is no longer finite.
        TaskCancelled: the task was withdrawn meanwhile.
    """

    if context.protection is not None:
        return _protected(context, parameters, loss, objective, epochs, groups, reads_images)

    def backward(indices: Tensor) -> Tensor:
        value = loss(indices)
        torch.autograd.backward(value)
        return value

    return _minimise(context, parameters, backward, epochs, groups, reads_images)


def _minimise(
    context: ClientContext,
    parameters: Sequence[Tensor],
    backward: Loss,
    epochs: int | None,
    groups: Sequence[Group],
    reads_images: bool,
) -> float:
    """The loop; ``backward(indices (B,))`` leaves the gradients with the parameters and returns the loss."""
    training, count, device = context.training, len(context.train), context.backbone.device
    optimizer, _ = _optimizer(context, parameters, groups)

    def step(indices: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = _in_memory(context, optimizer, partial(backward, indices), len(indices))
        optimizer.step()
        if context.label_loss is not None:
            context.label_loss.step()
        return value.detach()

    draws = generator(context.seed, context.round, context.phase, context.client, "batches")
    losses = _Losses(context, math.ceil(count / training.batch_size))
    epochs = training.epochs if epochs is None else epochs
    steps = epochs * math.ceil(count / training.batch_size)
    taken = step
    if replays(device) and not reads_images:
        from promptfed.shared.tensors.replay import Replayed  # imports torch, which a coordinator does without

        size = min(training.batch_size, count)
        taken = Replayed(step, optimizer, device, size, epochs * (count // size))
    soon = getattr(context.train, "soon", None)  # of images that are read beside the step before
    parts = batches(count, training.batch_size, epochs, draws, None if reads_images else device)
    for number, (indices, following) in enumerate(_with_next(parts)):
        if context.cancelled():
            raise TaskCancelled
        context.progress(number / steps)
        if soon is not None and following is not None and reads_images:
            soon(following)
        losses.add(taken(indices), len(indices))
    losses.read()
    return losses.total / losses.images


def _in_memory(
    context: ClientContext, optimizer: torch.optim.Optimizer, backward: Callable[[], Tensor], count: int
) -> Tensor:
    """``backward()`` of a batch of ``count``, with fewer images' activations at once if the device lacks the memory.

    They are computed again in the backward pass, so that loss and gradients are those of the whole batch. Later steps
    begin with the number that has worked. Raises MethodError if one image is too many.
    """
    backbone = context.backbone

    def hold(images: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        if context.label_loss is not None:
            context.label_loss.leaf.grad = None
        backbone.held_images = images
        log.warning("the device ran out of memory: a step holds %d images' activations at once now", images)

    return in_parts(
        lambda images: backward(),
        min(backbone.held_images or count, count),
        hold,
        MethodError(f"OutOfMemoryError: {NO_ROOM}"),
    )


def replays(device: torch.device) -> bool:
    """Whether a device records what it does, to do it again."""
    return device.type == "cuda"


class _Losses:
    """The losses of a task. They stay on the device for an epoch: reading each would make a GPU wait in every step.

    ``total``: the sum over the ``images`` of the epoch, as far as it was read.
    """

    def __init__(self, context: ClientContext, steps_per_epoch: int):
        self.total, self.images = 0.0, 0
        self._context, self._steps_per_epoch = context, steps_per_epoch
        self._steps = 0
        self._unread: list[tuple[Tensor, int]] = []

    def add(self, value: Tensor, count: int) -> None:
        """The mean loss of the next step's ``count`` images."""
        self._unread.append((value, count))
        if (self._steps + len(self._unread)) % self._steps_per_epoch == 0:
            self.read()

    def read(self) -> None:
        """Add up what was not read yet. Raises MethodError if it is not finite."""
        if not self._unread:
            return
        values = torch.stack([value for value, _ in self._unread]).tolist()
        for value, (_, count) in zip(values, self._unread, strict=True):
            if self._steps % self._steps_per_epoch == 0:
                self.total, self.images = 0.0, 0
            self._steps += 1
            self.total += value * count
            self.images += count
            if not math.isfinite(self.total):
                text = f"the loss is not finite in step {self._steps} of round {self._context.round}"
                raise MethodError(f"{text}: lower training.learning_rate")
        self._unread.clear()


def _protected(
    context: ClientContext,
    parameters: Sequence[Tensor],
    loss: Loss,
    objective: Objective | None,
    epochs: int | None,
    groups: Sequence[Group],
    reads_images: bool,
) -> float:
    """The same loop with private gradients. Nothing else in it depends on data, so it does not check the loss."""
    assert context.protection is not None
    if epochs is not None:
        raise UnprotectedError("a training loop of other epochs than the spec's was not accounted for")
    optimizer, tensors = _optimizer(context, parameters, groups)
    count, classes = len(context.train), len(context.class_names)
    if context.label_loss is not None:
        tensors = [*tensors, context.label_loss.leaf]
        objective = None if objective is None else context.label_loss.among(objective)
    texts = context.backbone.texts_at_once
    gradients = PrivateGradients(context.protection, tensors, loss, objective, count, classes, texts, reads_images)
    for _ in range(gradients.event.count):
        if context.cancelled():
            raise TaskCancelled
        gradients.step()
        optimizer.step()
        if context.label_loss is not None:
            context.label_loss.step()
    return math.nan


def _optimizer(
    context: ClientContext, parameters: Sequence[Tensor], groups: Sequence[Group]
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """A new optimizer and its parameters. Raises MethodError without images."""
    training = context.training
    context.expect_images()
    everything = [*parameters, *(parameter for group in groups for parameter in group.parameters)]
    context.count_trained(sum(parameter.numel() for parameter in everything))
    parameter_groups: list[dict[str, Any]] = [{"params": list(parameters)}] if parameters else []
    parameter_groups += [{"params": list(group.parameters), "lr": group_rate(context, group)} for group in groups]
    rate, fused = learning_rate(training, context.round, context.rounds), context.backbone.device.type == "cuda"
    optimizer = make_optimizer(parameter_groups, training, rate, fused=fused or None)
    return optimizer, everything


def group_rate(context: ClientContext, group: Group) -> float:
    """The group's rate in this round."""
    if group.constant:
        return group.learning_rate
    scale = learning_rate(context.training, context.round, context.rounds) / context.training.learning_rate
    return group.learning_rate * scale


class ClassificationLoss:
    """The loss of logits under the labels of a client's training images, which are among ``class_names``."""

    def __init__(self, context: ClientContext):
        self._own = context.label_loss

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of ``logits (B, C)`` under the ``labels`` of the same images."""
        return F.cross_entropy(logits, labels) if self._own is None else self.each(logits, labels).mean()

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Losses ``(B,)`` of ``logits (B, C)`` under the ``labels`` of the same images."""
        if self._own is None:
            return F.cross_entropy(logits, labels, reduction="none")
        return self._own.losses(logits, labels)
