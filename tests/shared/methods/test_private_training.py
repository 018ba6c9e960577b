"""Differentially private training: the mechanism against itself written out, and what refuses to be protected."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface import (
    ClientContext,
    Objective,
    Protection,
    ServerContext,
    UnprotectedError,
)
from promptfed.shared.methods.core.training import PrivateGradients, clipped, make_optimizer, train
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.privacy.noise import NoiseStream, SeededNoise
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES
from tests.support import literal, literal_private

Make = Callable[..., ClientContext]
M = 4
TEXT = [
    {"name": "promptfl", "m": M},
    {"name": "promptfl_prox", "m": M},
    {"name": "promptfl_ft", "m": M},
    {"name": "fedkgcoop", "m": M},
    {"name": "fedpgp", "m": M, "b": 2},
    {"name": "fedpgp", "m": M, "full_rank": True},
    {"name": "fedcocoop", "m": M},
    {"name": "fedclip"},
    {"name": "fedtaskres"},
    {"name": "fedclipadapter", "sides": "both"},
    {"name": "fedtpg", "m": M},
    {"name": "promptfolio", "m": M},
    {"name": "promptfl_per", "m": M},
]
COPIED = TEXT[:11]  # whose gradients come from batches of copies


class Silent(NoiseStream):
    """Takes every unit and adds nothing."""

    def __init__(self) -> None:
        super().__init__(bytes(32))

    def poisson_sample(self, count: int, q: float) -> NDArray[np.int64]:
        return np.arange(count)

    def normals(self, count: int) -> NDArray[np.float64]:
        return np.zeros(count)


def protected(context: ClientContext, stream: NoiseStream, clip: float = 0.3, z: float = 1.0) -> ClientContext:
    training = context.training
    own = Protection(clip, z, len(context.train), training.batch_size, training.epochs, stream)
    return replace(context, protection=own)


def start_of(settings: dict[str, Any], backbone: Backbone) -> Tensors:
    method = make_method(settings)
    context = ServerContext(
        TrainingSpec(), BackboneShape(d_t=backbone.d_t, d_e=backbone.d_e), NAMES, (), seed=3, rounds=4
    )
    return method.initial_state(context, initial_draws(3))


@pytest.mark.parametrize("settings", TEXT, ids=lambda one: "-".join(str(value) for value in one.values()))
def test_without_clip_and_noise_a_full_batch_is_the_plain_one(
    settings: dict[str, Any], backbone: Backbone, make_context: Make
) -> None:
    """Σ g_i/B + ∇R is the plain gradient, whatever the method."""
    context, start = make_context(6, epochs=1, batch_size=6, learning_rate=0.05), start_of(settings, backbone)
    assert type(make_method(settings)).can_protect()
    plain = make_method(settings).train(context, start, {})
    quiet = make_method(settings).train(protected(context, Silent(), clip=1e9), start, {})
    for name, value in quiet.update.items():
        moved = plain.update[name] - start[name]
        scale = max(float(moved.abs().max()), 1e-5)  # a key's bias has no gradient at all
        stored = torch.finfo(value.dtype).eps * float(value.abs().max())  # both are rounded to what a number can hold
        assert float((value - plain.update[name]).abs().max()) <= 2e-4 * scale + stored, name
    for name, value in quiet.private.items():
        assert torch.allclose(value, plain.private[name], rtol=1e-4, atol=1e-6), name
    assert math.isnan(quiet.metrics["loss"])


@pytest.mark.parametrize("settings", COPIED, ids=lambda one: "-".join(str(value) for value in one.values()))
def test_the_order_of_a_payload_s_tensors_does_not_matter(
    settings: dict[str, Any], backbone: Backbone, make_context: Make
) -> None:
    context, start = make_context(6, epochs=1, batch_size=6, learning_rate=0.05), start_of(settings, backbone)
    updates = [
        make_method(settings).train(protected(context, Silent()), dict(sorted(start.items(), reverse=reverse)), {})
        for reverse in (False, True)
    ]
    for name, value in updates[0].update.items():
        assert torch.allclose(value, updates[1].update[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("settings", COPIED, ids=lambda one: "-".join(str(value) for value in one.values()))
def test_each_copy_is_moved_by_its_own_unit_alone(
    settings: dict[str, Any], backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Objective, list[Tensor]]] = []

    def step(gradients: PrivateGradients) -> None:
        assert gradients._objective is not None
        seen.append((gradients._objective, list(gradients._parameters)))
        for parameter in gradients._parameters:
            parameter.grad = torch.zeros_like(parameter)

    monkeypatch.setattr(PrivateGradients, "step", step)
    context = protected(make_context(6, batch_size=6), Silent())
    make_method(settings).train(context, start_of(settings, backbone), {})
    objective, parameters = seen[0]
    copies = [one.detach().expand(3, *one.shape).clone().requires_grad_() for one in parameters]
    losses = objective.units(copies, torch.tensor([4, 0, 2]))
    for unit in range(3):
        found = torch.autograd.grad(losses[unit], copies, retain_graph=True, allow_unused=True)
        moved = [part for part in found if part is not None]
        others = [other for other in range(3) if other != unit]
        assert max(float(part[unit].abs().max()) for part in moved) > 0
        assert all(float(part[others].abs().max()) == 0 for part in moved)


@pytest.mark.parametrize(
    ("count", "batch", "epochs", "optimizer"),
    [(7, 3, 2, "sgd"), (7, 7, 1, "adam"), (5, 32, 2, "adamw"), (9, 1, 1, "sgd")],
)
def test_promptfl_equals_dp_sgd_written_out(
    count: int, batch: int, epochs: int, optimizer: str, backbone: Backbone, make_context: Make
) -> None:
    """Empty samples (9, 1), q = 1, last batches, momentum, decay, Adam: from the same draws the same context."""
    context = make_context(count, epochs=epochs, batch_size=batch, learning_rate=0.05, optimizer=optimizer)
    start = start_of({"name": "promptfl_prox", "m": M}, backbone)["context"]
    method = make_method({"name": "promptfl_prox", "m": M, "mu": 0.5})
    found = method.train(protected(context, SeededNoise(7).stream()), {"context": start}, {}).update["context"]

    def unit_loss(theta: Any, unit: int) -> Tensor:
        rows = slice(unit, unit + 1)
        return literal.context_loss(
            backbone, theta[0], list(NAMES), context.train.features()[rows], context.train.labels[rows]
        )

    wanted = literal_private.private_sgd(
        [start],
        unit_loss,
        lambda theta: 0.25 * (theta[0] - start).square().sum(),
        lambda theta: make_optimizer(theta, context.training, 0.05),
        SeededNoise(7).stream(),
        units=count,
        batch=batch,
        epochs=epochs,
        clip=0.3,
        z=1.0,
    )[0]
    moved = wanted - start
    # Adam divides by the root of a gradient's square, which magnifies what float32 rounds.
    assert float((found - wanted).abs().max()) <= 1e-3 * float(moved.abs().max())
    other = method.train(protected(context, SeededNoise(8).stream()), {"context": start}, {}).update["context"]
    assert float((other - wanted).abs().max()) > 0.1 * float(moved.abs().max())


def test_gradients_are_clipped_over_all_tensors_and_bad_numbers_count_as_nothing() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.nan, 2.0], [1e30, -1e30], [math.inf, 0.1], [0.1, 0.1]]).double()
    found = clipped(rows, 1.0)
    assert bool((found.norm(dim=1) <= 1.0).all())
    assert torch.allclose(found[0], torch.tensor([0.6, 0.8]).double(), atol=2e-6)
    assert found[1].tolist() == [0, 0]
    assert found[2].tolist() == pytest.approx([0, 1], abs=2e-6)
    assert found[3].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=2e-6)
    assert found[4].tolist() == pytest.approx([0, 0.1])
    assert found[5].tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("batch", [1, 8])
def test_where_no_gradient_is_the_step_is_noise_of_the_said_size_even_for_an_empty_sample(batch: int) -> None:
    """Units of zero gradient: what is left is z·C·ξ/(q·n), however many were sampled."""
    theta = torch.zeros(100_000, requires_grad=True)
    objective = Objective(lambda copies, rows: copies[0].sum(dim=1) * 0.0)
    protection = Protection(0.5, 2.0, 8, batch, 1, SeededNoise(5).stream())
    gradients = PrivateGradients(protection, [theta], lambda rows: theta.sum() * 0, objective, 8, 5, 512)
    for _ in range(12):
        theta.grad = None  # what an earlier step has left is no answer of this one
        gradients.step()
        assert theta.grad is not None
        drawn = theta.grad.double() * (min(batch, 8) / (2.0 * 0.5))
        assert abs(float(drawn.mean())) < 5 / math.sqrt(theta.numel())
        assert float(drawn.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / theta.numel()))


def test_a_device_without_room_for_all_copies_takes_fewer() -> None:
    target = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    asked: list[int] = []

    def gradient(room: int) -> Tensor:
        def units(copies: Any, rows: Tensor) -> Tensor:
            asked.append(len(rows))
            if len(rows) > room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return ((copies[0] - target[rows]) ** 2).sum(dim=1)

        theta = torch.zeros(3, requires_grad=True)
        protection = Protection(0.5, 1.0, 8, 8, 1, SeededNoise(5).stream())
        PrivateGradients(protection, [theta], lambda rows: theta.sum(), Objective(units), 8, 5, 64).step()
        assert theta.grad is not None
        return theta.grad

    whole = gradient(8)
    assert asked == [8]
    assert torch.allclose(gradient(3), whole)
    assert asked == [8, 8, 6, 3, 3, 2]
    with pytest.raises(torch.OutOfMemoryError):
        gradient(0)


def test_what_was_not_accounted_for_is_refused(make_context: Make) -> None:
    theta = torch.zeros(3, requires_grad=True)

    def loss(rows: Tensor) -> Tensor:
        return theta.sum()

    context = protected(make_context(6, batch_size=3), SeededNoise(1).stream())
    train(context, [theta], loss)
    with pytest.raises(UnprotectedError, match="second training loop"):
        train(context, [theta], loss)
    fresh = protected(make_context(6), SeededNoise(1).stream())
    with pytest.raises(UnprotectedError, match="other epochs"):
        train(fresh, [theta], loss, epochs=3)
    other = replace(fresh, train=make_context(7).train)
    with pytest.raises(UnprotectedError, match="7 units to train on instead of the 6"):
        train(other, [theta], loss)


def test_every_method_protects_or_says_why_not_and_a_subclass_speaks_for_itself() -> None:
    for kind in METHODS.values():
        assert kind.can_protect() or kind.unprotected
    assert not METHODS["plan"].can_protect()

    class Changed(PromptFL):
        name = "changed"

    assert not Changed.can_protect()
