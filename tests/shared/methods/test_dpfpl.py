"""DP-FPL: factors, loss and steps against the equations written out; the paper's noise and the sound one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.base import ClientContext
from promptfed.shared.methods.core.private_context import LOCAL
from promptfed.shared.methods.core.training import make_optimizer
from promptfed.shared.methods.dpfpl import DPFPL, factorised
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import generator
from promptfed.shared.spec import SpecError
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES
from tests.shared.methods.test_private_training import protected
from tests.support import literal, literal_private

Make = Callable[..., ClientContext]
M, B, RATE = 4, 2, 0.5


def method(**hyper: object) -> DPFPL:
    made = make_method({"name": "dpfpl", "m": M, "b": B} | hyper)
    assert isinstance(made, DPFPL)
    return made


def start(backbone: Backbone) -> tuple[Tensor, Tensor]:
    """A shared context and a private one."""
    draws = torch.Generator().manual_seed(1)
    return tuple(torch.randn(M, backbone.d_t, generator=draws) * 0.1 for _ in range(2))  # type: ignore[return-value]


def own_factors(local: Tensor, context: ClientContext) -> tuple[Tensor, Tensor, Tensor]:
    return factorised(local, B, generator(context.seed, "dpfpl", context.client, context.round, "factors"))


def literal_loss(context: ClientContext, parts: list[Tensor], rows: list[int]) -> Tensor:
    """The mean cross-entropy of p_G + u·v + r, its numbers one by one."""
    shared, u, v, r = parts
    whole = torch.stack(
        [
            torch.stack([shared[i, j] + sum(u[i, k] * v[k, j] for k in range(B)) + r[i, j] for j in range(r.shape[1])])
            for i in range(M)
        ]
    )
    features, labels = context.train.features()[rows], context.train.labels[rows]
    return literal.context_loss(context.backbone, whole, list(NAMES), features, labels)


def test_factors_are_one_power_step_and_leave_nothing_out() -> None:
    local = torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    u, v, r = factorised(local, 3, torch.Generator().manual_seed(3))
    torch.testing.assert_close(u @ v + r, local)
    torch.testing.assert_close(u.T @ u, torch.eye(3), rtol=0, atol=1e-6)
    torch.testing.assert_close(u.T @ r, torch.zeros(3, 9), rtol=0, atol=1e-5)
    reached = local @ torch.randn(9, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64).float()
    torch.testing.assert_close(u @ (u.T @ reached), reached, rtol=1e-4, atol=1e-4)
    whole = factorised(local, 64, torch.Generator().manual_seed(3))
    torch.testing.assert_close(whole[2], torch.zeros(5, 9), rtol=0, atol=1e-5)


def test_a_step_descends_all_four_tensors_and_only_the_shared_one_leaves(
    backbone: Backbone, make_context: Make
) -> None:
    context = make_context(3, batch_size=3, epochs=1, learning_rate=RATE, momentum=0.0, weight_decay=0.0)
    shared, local = start(backbone)
    found = method().train(context, {"global_context": shared}, {LOCAL: local})
    parts = [part.clone().requires_grad_() for part in (shared, *own_factors(local, context))]
    value = literal_loss(context, parts, [0, 1, 2])
    slopes = torch.autograd.grad(value, parts)
    wanted = [part.detach() - RATE * slope for part, slope in zip(parts, slopes, strict=True)]
    assert found.metrics["loss"] == pytest.approx(float(value.detach()), rel=1e-5)
    assert set(found.update) == {"global_context"}
    torch.testing.assert_close(found.update["global_context"], wanted[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.private[LOCAL], wanted[1] @ wanted[2] + wanted[3], rtol=1e-4, atol=1e-6)


def test_the_paper_s_noise_is_on_the_factors_alone_and_clips_the_batch(backbone: Backbone, make_context: Make) -> None:
    context = make_context(3, batch_size=3, epochs=1, learning_rate=RATE, momentum=0.0, weight_decay=0.0)
    shared, local = start(backbone)
    noisy = method(paper_noise=0.7, paper_clip=0.01)
    found = noisy.train(context, {"global_context": shared}, {LOCAL: local})
    parts = [part.clone().requires_grad_() for part in (shared, *own_factors(local, context))]
    slopes = torch.autograd.grad(literal_loss(context, parts, [0, 1, 2]), parts)
    assert all(float(slope.norm()) > 0.01 for slope in slopes[:3]), "all are clipped"
    draws = generator(context.seed, "dpfpl", context.client, context.round, "paper's noise")
    moved = [slope * 0.01 / slope.norm() for slope in slopes[:3]] + [slopes[3]]
    for place in (1, 2):
        moved[place] = moved[place] + 0.7 * 0.01 * torch.randn(moved[place].shape, generator=draws)
    wanted = [part.detach() - RATE * step for part, step in zip(parts, moved, strict=True)]
    torch.testing.assert_close(found.update["global_context"], wanted[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.private[LOCAL], wanted[1] @ wanted[2] + wanted[3], rtol=1e-4, atol=1e-6)


def test_the_sound_mode_is_dp_sgd_over_all_four_tensors_in_one_norm(backbone: Backbone, make_context: Make) -> None:
    context = make_context(5, epochs=2, batch_size=2, learning_rate=0.05)
    shared, local = start(backbone)
    given = protected(context, SeededNoise(7).stream())
    found = method().train(given, {"global_context": shared}, {LOCAL: local})

    def unit_loss(theta: list[Tensor], unit: int) -> Tensor:
        rows = slice(unit, unit + 1)
        whole = theta[0] + theta[1] @ theta[2] + theta[3]
        features, labels = context.train.features()[rows], context.train.labels[rows]
        return literal.context_loss(backbone, whole, list(NAMES), features, labels)

    wanted = literal_private.private_sgd(
        [shared, *own_factors(local, context)],
        unit_loss,  # type: ignore[arg-type]
        None,
        lambda theta: make_optimizer(theta, context.training, 0.05),
        SeededNoise(7).stream(),
        units=5,
        batch=2,
        epochs=2,
        clip=0.3,
        z=1.0,
    )
    moved = float((wanted[0] - shared).abs().max())
    assert float((found.update["global_context"] - wanted[0]).abs().max()) <= 1e-3 * moved
    whole = wanted[1] @ wanted[2] + wanted[3]
    assert float((found.private[LOCAL] - whole).abs().max()) <= 1e-3 * float((whole - local).abs().max())


def test_who_has_trained_classifies_with_both_and_an_evaluator_with_the_shared_one(
    backbone: Backbone, make_context: Make
) -> None:
    context, tried = make_context(4), method()
    shared, local = start(backbone)
    payload: Tensors = {"global_context": shared}
    rows = torch.arange(4)
    both = tried.classifier(context, payload, {LOCAL: local}).logits(context.train, rows)
    alone = tried.classifier(context, {"global_context": shared + local}, {LOCAL: torch.zeros_like(local)})
    torch.testing.assert_close(both, alone.logits(context.train, rows))
    first, again = (tried.local_context(context, {}) for _ in range(2))
    assert torch.equal(first, again)


def test_the_paper_s_noise_beside_the_sound_one_is_refused() -> None:
    spec = {
        "name": "eyes",
        "method": {"name": "dpfpl", "paper_noise": 1.0},
        "privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0},
    }
    with pytest.raises(SpecError, match="paper_noise is a reproduction that no accountant counts"):
        resolve_spec(spec)
    resolve_spec(spec | {"method": {"name": "dpfpl"}})
