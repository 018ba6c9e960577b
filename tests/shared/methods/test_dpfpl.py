"""DP-FPL: factors, loss and steps against the equations written out; the paper's noise and the sound one."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.interface.base import ClientContext
from promptfed.shared.methods.core.private_context import LOCAL
from promptfed.shared.methods.core.training import batches, learning_rate, make_optimizer
from promptfed.shared.methods.dpfpl import DPFPL, exact_factors, orthonormal_factors, step_along
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import generator
from promptfed.shared.spec.spec import SpecError, TrainingSpec
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
    return tuple(torch.randn(M, backbone.d_t, generator=draws) * 0.1 for _ in range(2))


def literal_loss(context: ClientContext, shared: Tensor, local: Tensor, rows: list[int]) -> Tensor:
    """The mean cross-entropy of p_G + p_L, its numbers one by one."""
    whole = torch.stack(
        [torch.stack([a + b for a, b in zip(*pair, strict=True)]) for pair in zip(shared, local, strict=True)]
    )
    features, labels = context.train.features()[rows], context.train.labels[rows]
    return literal.context_loss(context.backbone, whole, list(NAMES), features, labels)


def columns_made_orthonormal(columns: list[Tensor]) -> list[Tensor]:
    """Gram-Schmidt, one column after another."""
    made: list[Tensor] = []
    for column in columns:
        rest = column.clone()
        for other in made:
            rest = rest - torch.dot(other, rest) * other
        made.append(rest / rest.norm())
    return made


def literal_factors(local: Tensor, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """u and v in float64 by Gram-Schmidt, both orthonormal."""
    exact = local.detach().double()
    start = torch.randn(exact.shape[1], B, generator=draws, dtype=torch.float64)
    left = columns_made_orthonormal([exact @ start[:, k] for k in range(B)])
    right = columns_made_orthonormal([exact.T @ column for column in left])
    return torch.stack(left, dim=1), torch.stack(right)


def literal_step(
    gradient: Tensor, u: Tensor, v: Tensor, of_u: Tensor | None = None, of_v: Tensor | None = None
) -> Tensor:
    """The released update, number by number; without noisy gradients the factors' own, by the chain rule."""
    of_u = gradient @ v.T if of_u is None else of_u
    of_v = u.T @ gradient if of_v is None else of_v
    (m, b), width = u.shape, v.shape[1]
    made = torch.zeros(m, width, dtype=torch.float64)
    for i in range(m):
        for j in range(width):
            along = sum(of_u[i, k] * v[k, j] + u[i, k] * of_v[k, j] for k in range(b))
            again = sum(u[i, k] * u[h, k] * of_u[h, n] * v[n, j] for k in range(b) for h in range(m) for n in range(b))
            made[i, j] = (along + again) / 10
    return made


def gradients(context: ClientContext, shared: Tensor, local: Tensor, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients with respect to both contexts, in float64."""
    leaves = [shared.clone().requires_grad_(), local.clone().requires_grad_()]
    value = literal_loss(context, leaves[0], leaves[1], rows)
    of_shared, of_local = torch.autograd.grad(value, leaves)
    return value.detach(), of_shared.double(), of_local.double()


def random_problem(seed: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A whole gradient ``(5, 9)``, orthonormal factors of rank 3, and what they were made of."""
    draws = torch.Generator().manual_seed(seed)
    local, gradient = (torch.randn(5, 9, generator=draws, dtype=torch.float64) for _ in range(2))
    u, v, _ = orthonormal_factors(local, 3, draws)
    return gradient, u, v, local


def test_both_factors_are_orthonormal_and_leave_nothing_out() -> None:
    local = torch.randn(5, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    u, v, r = orthonormal_factors(local, 3, torch.Generator().manual_seed(3))
    torch.testing.assert_close(u @ v + r, local, rtol=0, atol=1e-12)
    torch.testing.assert_close(u.T @ u, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(v @ v.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)
    reached = local @ torch.randn(9, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(u @ (u.T @ reached), reached, rtol=0, atol=1e-9)
    torch.testing.assert_close((u.T @ local) @ v.T @ v, u.T @ local, rtol=0, atol=1e-9)
    for rank in (1, 64):
        u, v, r = orthonormal_factors(local, rank, torch.Generator().manual_seed(3))
        assert u.shape == (5, min(rank, 5))
        assert v.shape == (min(rank, 5), 9)
        torch.testing.assert_close(u @ v + r, local, rtol=0, atol=1e-12)


def test_the_step_is_the_tangent_projection_plus_twice_the_part_in_both_factors() -> None:
    """With a minus before its third term the sum would be the projection; the released code has a plus."""
    gradient, u, v, _ = random_problem()
    left, right = u @ u.T, v.T @ v
    projected = gradient @ right + left @ gradient - left @ gradient @ right
    left_basis, right_basis = torch.eye(5).double(), torch.eye(9).double()
    tangent = [torch.outer(row, part) for row in left_basis for part in v]
    tangent += [torch.outer(column, row) for column in u.T for row in right_basis]
    spanned = torch.stack(tangent).flatten(1).T
    nearest = (spanned @ (torch.linalg.pinv(spanned) @ gradient.flatten())).reshape(5, 9)
    torch.testing.assert_close(projected, nearest, rtol=0, atol=1e-10)
    wanted = (projected + 2 * left @ gradient @ right) / 10
    found = step_along(u, v, gradient @ v.T, u.T @ gradient)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, literal_step(gradient, u, v), rtol=0, atol=1e-12)


def test_the_step_has_at_most_twice_the_rank_and_is_no_longer_than_three_tenths_of_the_gradient() -> None:
    for seed in range(5):
        draws = torch.Generator().manual_seed(seed)
        local, gradient = (torch.randn(12, 20, generator=draws, dtype=torch.float64) for _ in range(2))
        u, v, _ = orthonormal_factors(local, 2, draws)
        made = step_along(u, v, gradient @ v.T, u.T @ gradient)
        assert int(torch.linalg.matrix_rank(made)) == 4
        assert float(made.norm()) <= 0.3 * float(gradient.norm())
        assert float((made * gradient).sum()) > 0, "it descends"


def test_the_step_does_not_depend_on_the_factors_bases() -> None:
    gradient, u, v, _ = random_problem()
    turned = [torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(k)).double()).Q for k in (5, 6)]
    other_u, other_v = u @ turned[0], turned[1] @ v
    wanted = step_along(u, v, gradient @ v.T, u.T @ gradient)
    found = step_along(other_u, other_v, gradient @ other_v.T, other_u.T @ gradient)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_training_is_the_released_update_with_new_factors_in_every_step(backbone: Backbone, make_context: Make) -> None:
    """Three steps with momentum and decay: the loss, the shared and the private context by a literal slow version."""
    context = make_context(7, batch_size=3, epochs=1, learning_rate=RATE, momentum=0.9, weight_decay=0.01)
    shared, local = start(backbone)
    found = method().train(context, {"global_context": shared}, {LOCAL: local})
    places = generator(context.seed, context.round, context.phase, context.client, "batches")
    draws = generator(context.seed, "dpfpl", context.client, context.round, "factors")
    rate = learning_rate(context.training, context.round, context.rounds)
    theta = [shared, local]
    speed, total = [torch.zeros(M, backbone.d_t, dtype=torch.float64) for _ in range(2)], 0.0
    for rows in batches(7, 3, 1, places):
        u, v = literal_factors(theta[1], draws)
        value, *slopes = gradients(context, theta[0], theta[1], rows.tolist())
        slopes[1] = literal_step(slopes[1], u, v)
        total += float(value) * len(rows)
        speed = [0.9 * old + slope + 0.01 * part for old, slope, part in zip(speed, slopes, theta, strict=True)]
        theta = [(part - rate * step).float() for part, step in zip(theta, speed, strict=True)]
    assert found.metrics["loss"] == pytest.approx(total / 7, rel=1e-5)
    assert set(found.update) == {"global_context"}
    for made, wanted, before in zip(
        (found.update["global_context"], found.private[LOCAL]), theta, (shared, local), strict=True
    ):
        moved = float((wanted - before).abs().max())
        assert float((made - wanted).abs().max()) <= 1e-4 * moved + 1e-6


def test_one_task_s_factors_are_an_option(backbone: Backbone, make_context: Make) -> None:
    """`factorise=every_task`: a step descends p_G, u, v and r, each by its own gradient."""
    context = make_context(3, batch_size=3, epochs=1, learning_rate=RATE, momentum=0.0, weight_decay=0.0)
    shared, local = start(backbone)
    found = method(factorise="every_task").train(context, {"global_context": shared}, {LOCAL: local})
    u, v, r = exact_factors(local, B, generator(context.seed, "dpfpl", context.client, context.round, "factors"))
    torch.testing.assert_close(u.T @ r, torch.zeros(B, local.shape[1]), rtol=0, atol=1e-6)
    value, of_shared, whole = gradients(context, shared, local, [0, 1, 2])
    wanted = (u - RATE * whole @ v.T.double()) @ (v - RATE * u.T.double() @ whole) + r - RATE * whole
    assert found.metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    torch.testing.assert_close(found.update["global_context"].double(), shared - RATE * of_shared, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.private[LOCAL].double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("factorise", ["every_step", "every_task"])
def test_the_paper_s_noise_is_on_the_factors_alone_and_clips_the_batch(
    factorise: str, backbone: Backbone, make_context: Make
) -> None:
    context = make_context(3, batch_size=3, epochs=1, learning_rate=RATE, momentum=0.0, weight_decay=0.0)
    shared, local = start(backbone)
    noisy = method(paper_epsilon=20.0, paper_clip=0.01, factorise=factorise)
    found = noisy.train(context, {"global_context": shared}, {LOCAL: local})
    factors = generator(context.seed, "dpfpl", context.client, context.round, "factors")
    u, v, r = (orthonormal_factors if factorise == "every_step" else exact_factors)(local, B, factors)
    _, of_shared, whole = gradients(context, shared, local, [0, 1, 2])
    slopes = [of_shared, whole @ v.T.double(), u.T.double() @ whole]
    assert all(float(slope.norm()) > 0.01 for slope in slopes), "all are clipped"
    draws = generator(context.seed, "dpfpl", context.client, context.round, "paper's noise")
    moved = [slope * 0.01 / slope.norm() for slope in slopes]
    std = math.sqrt(context.rounds * math.log(1e5)) / 20.0 * 0.01 / 3
    moved[1:] = [slope + std * torch.randn(slope.shape, generator=draws) for slope in moved[1:]]
    if factorise == "every_step":
        wanted = local - RATE * literal_step(whole, u.double(), v.double(), *moved[1:])
    else:
        wanted = (u - RATE * moved[1]) @ (v - RATE * moved[2]) + r - RATE * whole
    torch.testing.assert_close(found.update["global_context"].double(), shared - RATE * moved[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.private[LOCAL].double(), wanted, rtol=1e-4, atol=1e-6)


def test_the_paper_s_noise_has_the_scale_of_its_formula() -> None:
    """√(R·ln(1/δ))·C/(ε·B), measured: an ε, so twice as much of it is half the noise."""
    context = SimpleNamespace(
        seed=3, client="north", round=1, rounds=100, protection=None, training=TrainingSpec(batch_size=32)
    )
    measured = {}
    for epsilon in (0.2, 0.4):
        noise = method(paper_epsilon=epsilon, paper_clip=10.0)._noise(context)
        assert noise is not None
        zeros = [torch.zeros(3), torch.zeros(400, 100), torch.zeros(100, 400)]
        shared, *factors = noise(zeros)
        assert not shared.any()
        measured[epsilon] = [float(part.std()) for part in factors]
        wanted = math.sqrt(100 * math.log(1e5)) * 10 / (epsilon * 32)
        assert measured[epsilon] == pytest.approx([wanted, wanted], rel=0.02)
    assert measured[0.2] == pytest.approx([2 * value for value in measured[0.4]], rel=0.03)


def test_a_clipped_batch_s_gradient_can_move_by_twice_the_clip_with_one_image() -> None:
    """2C bounds it, and is reached: the formula's C/B is no sensitivity of what is clipped here."""
    context = SimpleNamespace(
        seed=3, client="north", round=1, rounds=1, protection=None, training=TrainingSpec(batch_size=32)
    )
    clip, images = 0.5, 32
    noise = method(paper_epsilon=1e6, paper_clip=clip)._noise(context)
    assert noise is not None
    draws, reached = torch.Generator().manual_seed(1), 0.0
    for length in (0.01, 1.0, 1e4):
        each = torch.randn(images, 6, generator=draws)
        other = each.clone()
        each[0], other[0] = length * torch.ones(6) * images, -length * torch.ones(6) * images
        clipped = [noise([part.mean(0).reshape(2, 3)] * 3)[0] for part in (each, other)]
        assert all(float(part.norm()) <= clip * (1 + 1e-6) for part in clipped)
        reached = max(reached, float((clipped[0] - clipped[1]).norm()))
        assert reached <= 2 * clip * (1 + 1e-6)
    assert reached == pytest.approx(2 * clip, rel=1e-3)
    assert reached > clip / images


def test_the_sound_mode_is_dp_sgd_over_the_shared_context_and_the_factors_in_one_norm(
    backbone: Backbone, make_context: Make
) -> None:
    """The update of the private context is made of the private gradients of its factors alone."""
    context = make_context(5, epochs=2, batch_size=2, learning_rate=0.05)
    shared, local = start(backbone)
    found = method().train(protected(context, SeededNoise(7).stream()), {"global_context": shared}, {LOCAL: local})
    theta = [shared.clone().requires_grad_(), local.clone().requires_grad_()]
    optimizer = make_optimizer(theta, context.training, learning_rate(context.training, context.round, context.rounds))
    stream, draws = SeededNoise(7).stream(), generator(context.seed, "dpfpl", context.client, context.round, "factors")
    shapes = [(M, backbone.d_t), (M, B), (B, backbone.d_t)]
    sizes = [math.prod(shape) for shape in shapes]
    for _ in range(2 * 3):
        u, v, _ = orthonormal_factors(theta[1], B, draws)
        chance, total = stream.uniforms(5), torch.zeros(sum(sizes), dtype=torch.float64)
        for unit in range(5):
            if chance[unit] <= 2 / 5:
                _, of_shared, whole = gradients(context, theta[0].detach(), theta[1].detach(), [unit])
                row = torch.cat(
                    [of_shared.flatten(), (whole @ v.T.double()).flatten(), (u.T.double() @ whole).flatten()]
                )
                total += row * min(1.0, 0.3 * (1 - 1e-6) / float(row.norm()))
        mean = (total + torch.from_numpy(stream.normals(sum(sizes))) * 0.3) / 2
        parts = [part.view(shape) for part, shape in zip(torch.split(mean, sizes), shapes, strict=True)]
        theta[0].grad = parts[0].float()
        theta[1].grad = literal_step(torch.zeros_like(local), u.double(), v.double(), *parts[1:]).float()
        optimizer.step()
    for made, wanted, before in zip(
        (found.update["global_context"], found.private[LOCAL]), theta, (shared, local), strict=True
    ):
        moved = float((wanted.detach() - before).abs().max())
        assert float((made - wanted.detach()).abs().max()) <= 1e-3 * moved


def test_the_sound_mode_trains_all_four_tensors_where_factors_are_made_once(
    backbone: Backbone, make_context: Make
) -> None:
    context = make_context(5, epochs=2, batch_size=2, learning_rate=0.05)
    shared, local = start(backbone)
    given = protected(context, SeededNoise(7).stream())
    found = method(factorise="every_task").train(given, {"global_context": shared}, {LOCAL: local})

    def unit_loss(theta: list[Tensor], unit: int) -> Tensor:
        rows = slice(unit, unit + 1)
        whole = theta[0] + theta[1] @ theta[2] + theta[3]
        features, labels = context.train.features()[rows], context.train.labels[rows]
        return literal.context_loss(backbone, whole, list(NAMES), features, labels)

    factors = generator(context.seed, "dpfpl", context.client, context.round, "factors")
    wanted = literal_private.private_sgd(
        [shared, *exact_factors(local, B, factors)],
        unit_loss,
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
        "method": {"name": "dpfpl", "paper_epsilon": 0.4},
        "privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0},
    }
    with pytest.raises(SpecError, match="paper_epsilon is a reproduction that no accountant counts"):
        resolve_spec(spec)
    resolve_spec(spec | {"method": {"name": "dpfpl"}})


def test_the_old_name_of_the_paper_s_noise_is_refused_with_the_new_one() -> None:
    with pytest.raises(SpecError, match="the released code's --noise is an ε; give it as paper_epsilon"):
        resolve_spec({"name": "eyes", "method": {"name": "dpfpl", "paper_noise": 0.4}})
