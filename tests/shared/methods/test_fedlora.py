"""FedLoRA against open_clip's own towers with changed attention, and its four ways of making products one."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientUpdate, MeasuresUpdates, Method, MethodError
from promptfed.shared.methods.zero_shot import ZeroShot
from promptfed.shared.seeds import initial_draws
from promptfed.shared.tensors import Tensors
from tests.support.equality import assert_gradients, assert_values
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone

RATE = 0.05


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method_of(**options: Any) -> Method:
    return make_method({"name": "fedlora", "dropout": 0.0, **options})


def task(backbone: Backbone, **changes: Any) -> Any:
    return client_context(backbone, **({"epochs": 2, "learning_rate": RATE, "optimizer": "sgd"} | changes))


def state_of(method: Method, backbone: Backbone) -> Tensors:
    state = method.initial_state(server_context(backbone, "a"), initial_draws(3))
    draws = torch.Generator().manual_seed(8)
    return {name: tensor + torch.randn(tensor.shape, generator=draws) * 0.1 for name, tensor in state.items()}


def changed_copy(backbone: Backbone, factors: Tensors, gamma: float) -> Any:
    """A copy of open_clip's model whose attention is W + γ·B·A, with gradients to the factors."""
    model = deepcopy(backbone.model)
    for tower, blocks in (("visual", model.visual.transformer.resblocks), ("text", model.transformer.resblocks)):
        if f"{tower}_a" not in factors:
            continue
        a, b = factors[f"{tower}_a"], factors[f"{tower}_b"]
        for place in range(len(a)):
            attention = blocks[len(blocks) - len(a) + place].attn
            parts = [gamma * b[place, i] @ a[place, i] for i in range(a.shape[1])]
            weight = attention.in_proj_weight.detach() + torch.cat(parts[:3])
            del attention.in_proj_weight
            attention.in_proj_weight = weight
            if len(parts) > 3:
                output = attention.out_proj.weight.detach() + parts[3]
                del attention.out_proj.weight
                attention.out_proj.weight = output
    return model


def literal_logits(backbone: Backbone, factors: Tensors, pixels: Tensor, gamma: float) -> Tensor:
    model = changed_copy(backbone, factors, gamma)
    ids = backbone.tokens([f"a photo of a {name.replace('_', ' ')}." for name in NAMES])
    image, text = model.encode_image(pixels), model.encode_text(ids)
    return backbone.logit_scale * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"matrices": "qkvo", "scaling": "rank", "alpha": 2.0},
        {"blocks": "last_k", "k": 1},
        {"towers": "text"},
        {"towers": "visual", "checkpoint": 2},
    ],
)
def test_training_is_descent_on_open_clip_s_towers_with_changed_attention(backbone: Backbone, options: Any) -> None:
    method, context = method_of(**options), task(backbone)
    state = state_of(method, backbone)
    gamma = options.get("alpha", 1.0) / (2 if options.get("scaling") == "rank" else math.sqrt(2))
    found = method.train(context, state, {}).update
    factors = {name: tensor.clone() for name, tensor in state.items()}
    torch.backends.mha.set_fastpath_enabled(False)  # its kernel knows no gradient towards a tensor in a weight's place
    try:
        for _ in range(2):
            leaves = {name: factor.detach().requires_grad_() for name, factor in factors.items()}
            logits = literal_logits(backbone, leaves, context.train.pixels, gamma)
            slopes = torch.autograd.grad(F.cross_entropy(logits, context.train.labels), list(leaves.values()))
            factors = {
                name: (leaf - RATE * slope).detach() for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
            }
        for name, factor in factors.items():
            assert_gradients(found[name] - state[name], factor - state[name])
        with torch.no_grad():
            wanted = literal_logits(backbone, state, context.train.pixels, gamma)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    merged = method.classifier(context, state, {}).logits(context.train, torch.arange(6))
    assert_values(merged, wanted)


def test_the_start_is_zero_shot_and_one_for_all(backbone: Backbone) -> None:
    method, context, rows = method_of(), task(backbone), torch.arange(6)
    server = server_context(backbone, "a")
    state = method.initial_state(server, initial_draws(3))
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "visual_a": (3, 3, 2, 32),
        "visual_b": (3, 3, 32, 2),
        "text_a": (2, 3, 2, 24),
        "text_b": (2, 3, 24, 2),
    }
    assert float(state["visual_a"].abs().max()) <= 32**-0.5
    assert not bool(state["text_b"].any())
    template = ZeroShot(ZeroShot.Hyper()).classifier(context, {}, {}).logits(context.train, rows)
    assert_values(method.classifier(context, state, {}).logits(context.train, rows), template)
    assert all(tensor.equal(state[name]) for name, tensor in method.initial_state(server, initial_draws(9)).items())


def test_dropout_s_masks_follow_from_the_task(backbone: Backbone) -> None:
    method, context = method_of(dropout=0.5), task(backbone)
    state = state_of(method, backbone)
    first, again = (method.train(context, state, {}).update for _ in range(2))
    assert all(first[name].equal(again[name]) for name in first)
    without = method_of().train(context, state, {}).update
    assert not first["visual_b"].equal(without["visual_b"])
    parts = [method_of(dropout=0.5, checkpoint=size).train(context, state, {}).update for size in (6, 2)]
    assert_values(parts[0]["visual_b"], first["visual_b"], 1e-6)
    assert not parts[1]["visual_b"].equal(first["visual_b"]), "each part has masks of its own"
    rows = torch.arange(6)
    scores = [one.classifier(context, state, {}).logits(context.train, rows) for one in (method, method_of())]
    assert scores[0].equal(scores[1]), "evaluations have no dropout"


def scalars(a: float, b: float) -> Tensors:
    return {"text_a": torch.zeros(1, 3, 1, 1) + a, "text_b": torch.zeros(1, 3, 1, 1) + b}


def aggregated(backbone: Backbone, kind: str, rounds: int = 1) -> Tensors:
    """Two clients whose factors are 1, 1 and 3, 3: the mean product is 5."""
    method = method_of(towers="text", r=1, aggregation=kind)
    server, state = server_context(backbone, "a", "b"), scalars(1.0, 1.0)
    for number in range(1, rounds + 1):
        [phase] = method.phases(number, 4)
        sent = [{spec.name: scalars(x, x)[spec.name] for spec in phase.up} for x in (1.0, 3.0)]
        counted = [ClientUpdate(name, 0.5, update) for name, update in zip("ab", sent, strict=True)]
        state = method.aggregate(state, phase, counted, weighted_mean, server)
    return state


def product(state: Tensors) -> float:
    return float(state["text_b"][0, 0] @ state["text_a"][0, 0])


def test_the_average_of_factors_is_not_the_average_of_products(backbone: Backbone) -> None:
    assert product(aggregated(backbone, "average")) == pytest.approx(4.0)
    assert product(aggregated(backbone, "svd")) == pytest.approx(5.0)
    alternating = aggregated(backbone, "alternate")
    assert product(alternating) == pytest.approx(2.0), "A is common, so the mean of B is exact"
    assert product(aggregated(backbone, "alternate", 2)) == pytest.approx(4.0)
    method = method_of(towers="text", r=1)
    [phase] = method.phases(1, 4)
    counted = [ClientUpdate(name, 0.5, scalars(x, x)) for name, x in (("a", 1.0), ("b", 3.0))]
    server, before = server_context(backbone, "a", "b"), scalars(1.0, 1.0)
    assert isinstance(method, MeasuresUpdates)
    after, measured = method.aggregate_measured(before, phase, iter(counted), weighted_mean, server)
    assert measured.phase == {"product_error": pytest.approx(0.2)}
    plain = method.aggregate(before, phase, iter(counted), weighted_mean, server)
    assert all(after[name].equal(tensor) for name, tensor in plain.items())
    alone = [ClientUpdate("a", 1.0, scalars(1.0, 1.0))]
    _, other = method.aggregate_measured(before, phase, alone, weighted_mean, server)
    assert other.phase == {"product_error": 0.0}, "of these updates alone"
    exact = method_of(towers="text", r=1, aggregation="svd")
    assert isinstance(exact, MeasuresUpdates)
    assert exact.aggregate_measured(before, phase, iter(counted), weighted_mean, server)[1].phase == {}


def test_a_mean_that_is_known_already_needs_no_update(backbone: Backbone) -> None:
    """Of a secure sum or a noised mean the coordinator has no update to hand over; FedLoRA's error needed one."""
    method = method_of(towers="text", r=1)
    [phase] = method.phases(1, 4)
    mean = scalars(2.0, 3.0)
    after = method.aggregate(scalars(1.0, 1.0), phase, (), lambda updates: mean, server_context(backbone, "a", "b"))
    assert all(after[name].equal(tensor) for name, tensor in mean.items())


def moved(state: Tensors, seed: int) -> Tensors:
    draws = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=draws) for name, tensor in state.items()}


def test_the_nearest_product_of_rank_r(backbone: Backbone) -> None:
    method, server = method_of(aggregation="svd"), server_context(backbone, "a", "b", "c")
    [phase] = method.phases(1, 4)
    assert not phase.mean
    states = [moved(state_of(method, backbone), seed) for seed in range(3)]
    alone = method.aggregate({}, phase, [ClientUpdate("a", 1.0, states[0])], weighted_mean, server)
    for tower in ("visual", "text"):
        assert_values(alone[f"{tower}_b"] @ alone[f"{tower}_a"], states[0][f"{tower}_b"] @ states[0][f"{tower}_a"])
    updates = [
        ClientUpdate(name, share, state) for name, share, state in zip("abc", (0.5, 0.3, 0.2), states, strict=True)
    ]
    found = method.aggregate({}, phase, updates, weighted_mean, server)
    turned = method.aggregate({}, phase, updates[::-1], weighted_mean, server)
    mean = sum(
        (u.weight * u.tensors["text_b"].double() @ u.tensors["text_a"].double() for u in updates), torch.zeros(())
    )
    u, sizes, v = torch.linalg.svd(mean)
    best = u[..., :2] * sizes[..., None, :2] @ v[..., :2, :]
    assert_values(found["text_b"] @ found["text_a"], best.float())
    assert_values(turned["text_b"], found["text_b"])


def test_a_frozen_a_is_drawn_by_everybody_and_half_travels(backbone: Backbone) -> None:
    method, context, server = method_of(aggregation="freeze_a"), task(backbone), server_context(backbone, "a")
    state = method.initial_state(server, initial_draws(3))
    assert set(state) == {"visual_b", "text_b"}
    found = method.train(context, state, {}).update
    both = method_of(aggregation="alternate")
    whole = both.initial_state(server, initial_draws(3))
    assert set(both.train(context, whole, {}).update) == {"visual_b", "text_b"}
    for name, factor in both.train(context, whole, {}).update.items():
        assert found[name].equal(factor), "the A that is drawn is the one that would have travelled"


def test_sizes(backbone: Backbone) -> None:
    shape = shape_of(backbone)
    with pytest.raises(MethodError, match="text tower, and this backbone's is not of the plain kind"):
        method_of().check_backbone(shape.model_copy(update={"heads_t": None}))
    method_of(towers="visual").check_backbone(shape.model_copy(update={"heads_t": None}))
    server = server_context(backbone, "a")
    for options, wanted in (
        ({"blocks": "last_k", "k": 3}, "text tower has 2 blocks"),
        ({"r": 25}, "more than the width 24"),
    ):
        with pytest.raises(MethodError, match=wanted):
            method_of(**options).dims(server)
    assert method_of(towers="text").needs.cached_features
    assert not method_of().needs.cached_features
