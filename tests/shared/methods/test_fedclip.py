"""FedCLIP against its adapter written out, coordinate by coordinate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, ServerContext
from promptfed.shared.methods.fedclip import attended
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES
from tests.support import literal, literal_fast_pt
from tests.support.equality import assert_values

Make = Callable[..., ClientContext]
PARTS = ("adapter_w1", "adapter_b1", "adapter_w2", "adapter_b2")


def server(d_e: int) -> ServerContext:
    return ServerContext(TrainingSpec(), BackboneShape(d_t=8, d_e=d_e), NAMES, (), seed=3, rounds=4)


def start(backbone: Backbone) -> Tensors:
    return make_method({"name": "fedclip"}).initial_state(server(backbone.d_e), initial_draws(3))


def literally(adapter: Tensors, feature: Tensor) -> Tensor:
    """a(I) ⊙ I, normalised, one coordinate at a time."""
    hidden = [
        torch.tanh((w * feature).sum() + b) for w, b in zip(adapter["adapter_w1"], adapter["adapter_b1"], strict=True)
    ]
    scores = [
        (w * torch.stack(hidden)).sum() + b for w, b in zip(adapter["adapter_w2"], adapter["adapter_b2"], strict=True)
    ]
    total = sum(torch.exp(score) for score in scores)
    weighed = torch.stack([torch.exp(score) / total * one for score, one in zip(scores, feature, strict=True)])
    return weighed / weighed.square().sum().sqrt()


def loss_by_hand(context: ClientContext, adapter: Tensors, some: Tensor) -> Tensor:
    texts = [literal_fast_pt.whole_text(context.backbone, context.template, name) for name in NAMES]
    losses = []
    for index in some.tolist():
        adapted = literally(adapter, context.train.raw_features()[index])
        logits = torch.stack([context.backbone.logit_scale * torch.dot(adapted, text) for text in texts])
        losses.append(literal.cross_entropy(logits, int(context.train.labels[index])))
    return torch.stack(losses).mean()


def test_the_adapter_weighs_coordinates(backbone: Backbone, make_context: Make) -> None:
    features = make_context(3).train.features()
    adapter = {name: one * 20 for name, one in start(backbone).items()}  # far from uniform
    found = attended(adapter, features)
    assert_values(found, torch.stack([literally(adapter, one) for one in features]))
    assert float((found - features).abs().max()) > 0.1
    zero = {name: torch.zeros_like(one) for name, one in adapter.items()}
    assert_values(attended(zero, features), features)


def test_training_equals_the_equations(backbone: Backbone, make_context: Make) -> None:
    context = make_context(6, round=2, epochs=2, batch_size=4, learning_rate=0.05, momentum=0.9, weight_decay=1e-3)
    payload = start(backbone)
    found = make_method({"name": "fedclip"}).train(context, payload, {}).update
    draws = generator(3, 2, "train", "hospital-a", "batches")
    weights = {name: one.clone() for name, one in payload.items()}
    speed = {name: torch.zeros_like(one) for name, one in payload.items()}
    for _ in range(2):
        for some in torch.split(torch.randperm(6, generator=draws), 4):
            live = {name: weights[name].clone().requires_grad_() for name in PARTS}
            gradients = torch.autograd.grad(loss_by_hand(context, live, some), list(live.values()))
            for name, gradient in zip(PARTS, gradients, strict=True):
                speed[name] = 0.9 * speed[name] + gradient + 1e-3 * weights[name]
                weights[name] = weights[name] - 0.05 * speed[name]
    for name in PARTS:
        moved, wanted = found[name] - payload[name], weights[name] - payload[name]
        size = float(wanted.abs().max())
        assert size > 1e-4
        assert_values(moved / size, wanted / size, 1e-4)


def test_the_classifier_scores_adapted_features(backbone: Backbone, make_context: Make) -> None:
    context, adapter = make_context(5), start(backbone)
    found = make_method({"name": "fedclip"}).classifier(context, adapter, {})
    texts = torch.stack([literal_fast_pt.whole_text(backbone, context.template, name) for name in NAMES])
    rows = torch.tensor([4, 0, 3])
    wanted = torch.stack([literally(adapter, context.train.raw_features()[row]) for row in rows]) @ texts.T
    assert_values(found.logits(context.train, rows), backbone.logit_scale * wanted)


def test_raw_features_are_adapted_unless_told_otherwise(backbone: Backbone, make_context: Make) -> None:
    """tanh of W₁I saturates or not by the length of I, so that the two train differently at any rate."""
    context, adapter = make_context(5, learning_rate=0.05), start(backbone)
    rows = torch.arange(5)
    texts = torch.stack([literal_fast_pt.whole_text(backbone, context.template, name) for name in NAMES])
    normal = make_method({"name": "fedclip", "features": "normalized"})
    wanted = torch.stack([literally(adapter, feature) for feature in context.train.features()]) @ texts.T
    assert_values(normal.classifier(context, adapter, {}).logits(context.train, rows), backbone.logit_scale * wanted)
    updates = [make_method({"name": "fedclip", **more}).train(context, adapter, {}).update["adapter_w1"]
               for more in ({}, {"features": "raw"}, {"features": "normalized"})]  # fmt: skip
    assert updates[0].equal(updates[1])
    assert not updates[0].equal(updates[2])


def test_it_starts_near_the_template_and_learns(backbone: Backbone, make_context: Make) -> None:
    context = make_context(20, epochs=30, batch_size=5, optimizer="adam", learning_rate=0.01)
    method, payload = make_method({"name": "fedclip"}), start(backbone)
    features = context.train.features()
    near = attended(payload, features)
    assert float((near * features).sum(dim=1).min()) > 0.95
    first = float(loss_by_hand(context, payload, torch.arange(20)))
    assert method.train(context, payload, {}).metrics["loss"] < 0.5 * first
