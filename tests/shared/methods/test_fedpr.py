"""FedPR: the projection by hand, steps against Adam's own, and what stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.fedpr import FedPR, projection
from promptfed.shared.methods.fedvpt import PROMPTS
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import TorchDraws
from tests.support import literal_visual as literal
from tests.support.equality import assert_values
from tests.support.literal import cross_entropy
from tests.support.visual_clients import NAMES, client_context, filled, server_context, small_backbone, split_of

ADAM = {"optimizer": "adam", "learning_rate": 0.05, "weight_decay": 0.0, "epochs": 3, "batch_size": 2}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method(**hyper: Any) -> FedPR:
    made = make_method({"name": "fedpr", "m": 2} | hyper)
    assert isinstance(made, FedPR)
    return made


def payload_of(m: int = 2) -> Tensors:
    return filled({PROMPTS.name: (3, m, 32)}, 5, 0.3)


def test_the_projection_by_hand() -> None:
    away = projection(torch.tensor([[1.0, 0.0]]), 0.5)
    assert away(torch.tensor([[3.0, 4.0]])).tolist() == [[0.0, 4.0]]
    assert projection(torch.tensor([[1.0, 0.0]]), 1.0)(torch.tensor([[3.0, 4.0]])).tolist() == [[3.0, 4.0]]
    draws = torch.Generator().manual_seed(0)
    few, many = torch.randn(8, 64, generator=draws), torch.randn(50, 64, generator=draws)
    assert float((projection(few, 0.8)(few)).norm() / few.norm()) < 1e-6, "all of what eight hold"
    left = float((projection(many, 0.8)(many)).norm() / many.norm())
    values = torch.linalg.svdvals(many.double()).square()
    assert left == pytest.approx(float((values[12:].sum() / values.sum()).sqrt()), rel=1e-4), "the twelve largest go"


@pytest.mark.parametrize("m", [2, 6])
def test_what_the_global_prompts_hold_stays(backbone: Backbone, m: int) -> None:
    tried, payload = method(m=m), payload_of(m)
    context = client_context(backbone, 4, round=2, **ADAM)
    after, before = tried.train(context, payload, {}).update[PROMPTS.name], payload[PROMPTS.name]
    assert float((after - before).abs().max()) > 1e-3
    for new, old in zip(after, before, strict=True):
        assert torch.allclose(new @ old.T, old @ old.T, atol=1e-5)
    first = tried.train(client_context(backbone, 4, round=1, **ADAM), payload, {}).update[PROMPTS.name]
    assert not torch.allclose(first[0] @ before[0].T, before[0] @ before[0].T, atol=1e-3), "not so in round 1"


def test_without_projection_and_length_it_is_adam_on_fedvpt_deep(backbone: Backbone) -> None:
    context = client_context(backbone, 4, round=2, **ADAM)
    found = method(rho=1.0, normalise=False).train(context, payload_of(), {}).update[PROMPTS.name]
    plain = make_method({"name": "fedvpt_deep", "m": 2})
    assert_values(found, plain.train(context, payload_of(), {}).update[PROMPTS.name])


def literal_steps(backbone: Backbone, prompts: Tensor, steps: int, normalise: bool) -> Tensor:
    """Adam by hand over all images, its step through (I − QQᵀ)/√(ρ·d)."""
    split = split_of(backbone, 3)
    text = torch.stack([backbone.encode_text([f"a photo of a {name.replace('_', ' ')}."])[0] for name in NAMES])
    start, first, second = prompts.clone(), torch.zeros_like(prompts), torch.zeros_like(prompts)
    for number in range(1, steps + 1):
        leaf = prompts.clone().requires_grad_()
        losses = [
            cross_entropy(backbone.logit_scale * text @ literal.image_feature(backbone, leaf, image), int(label))
            for image, label in zip(split.pixels, split.labels, strict=True)
        ]
        [slope] = torch.autograd.grad(torch.stack(losses).mean(), [leaf])
        first = 0.9 * first + 0.1 * slope
        second = 0.999 * second + 0.001 * slope.square()
        step = -0.05 * (first / (1 - 0.9**number)) / ((second / (1 - 0.999**number)).sqrt() + 1e-8)
        moved = []
        for block, own in enumerate(start):
            inverse = torch.linalg.inv(own @ own.T)
            part = step[block] - step[block] @ own.T @ inverse @ own
            moved.append(part / (0.8 * 32) ** 0.5 if normalise else part)
        prompts = prompts + torch.stack(moved)
    return prompts


@pytest.mark.parametrize("normalise", [True, False])
def test_adams_step_is_projected_and_not_the_gradient(backbone: Backbone, normalise: bool) -> None:
    training = ADAM | {"batch_size": 3}
    context = client_context(backbone, 3, round=2, **training)
    found = method(normalise=normalise).train(context, payload_of(), {}).update[PROMPTS.name]
    wanted = literal_steps(backbone, payload_of()[PROMPTS.name], 3, normalise)
    assert float((found - wanted).abs().max()) < 2e-3 * float((wanted - payload_of()[PROMPTS.name]).abs().max())


def test_it_starts_and_serves_as_fedvpt_deep(backbone: Backbone) -> None:
    server, tried = server_context(backbone, "a"), method()
    start = tried.initial_state(server, TorchDraws().manual_seed(1))
    plain = make_method({"name": "fedvpt_deep", "m": 2})
    assert start[PROMPTS.name].equal(plain.initial_state(server, TorchDraws().manual_seed(1))[PROMPTS.name])
    context = client_context(backbone, 3)
    shown = [one.classifier(context, start, {}).logits(context.train, torch.arange(3)) for one in (tried, plain)]
    assert shown[0].equal(shown[1])
    linear = method(head="linear").train(client_context(backbone, 4, round=2, **ADAM), payload_of(), {})
    assert "head_weight" in linear.private
    resolved = resolve_spec({"name": "f", "method": {"name": "fedpr"}})
    assert (resolved.training.optimizer, resolved.training.weight_decay) == ("adam", 0.0)
