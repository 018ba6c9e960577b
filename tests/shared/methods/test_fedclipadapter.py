"""FedCLIPAdapter against its network written out, unit by unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.adapters import blended
from promptfed.shared.methods.core.interface import ClientContext, Fixed, ServerContext
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES
from tests.support import literal, literal_fast_pt
from tests.support.equality import assert_values

Make = Callable[..., ClientContext]
SIDES = {"image": ("image",), "text": ("text",), "both": ("image", "text")}
RATE, ALPHA, BETA, REDUCTION = 0.2, 0.4, 0.3, 16


def settings(sides: str) -> dict[str, object]:
    return {"name": "fedclipadapter", "sides": sides, "alpha": ALPHA, "beta": BETA, "reduction": REDUCTION}


def server(d_e: int) -> ServerContext:
    return ServerContext(TrainingSpec(), BackboneShape(d_t=8, d_e=d_e), NAMES, (), seed=3, rounds=4)


def start(backbone: Backbone, sides: str) -> Tensors:
    return make_method(settings(sides)).initial_state(server(backbone.d_e), initial_draws(3))


def positive(value: Tensor) -> Tensor:
    return value if bool(value > 0) else torch.zeros_like(value)


def literally(adapters: Tensors, side: str, vector: Tensor, share: float) -> Tensor:
    """The normalised blend of one feature, one hidden unit after the other."""
    if f"{side}_w1" not in adapters:
        return vector
    hidden = torch.stack([positive((row * vector).sum()) for row in adapters[f"{side}_w1"]])
    adapted = torch.stack([positive((row * hidden).sum()) for row in adapters[f"{side}_w2"]])
    mixed = share * adapted + (1 - share) * vector
    return mixed / mixed.square().sum().sqrt()


def logits_by_hand(context: ClientContext, adapters: Tensors, rows: Tensor) -> Tensor:
    whole = [literal_fast_pt.whole_text(context.backbone, context.template, name) for name in NAMES]
    texts = torch.stack([literally(adapters, "text", text, BETA) for text in whole])
    images = [literally(adapters, "image", context.train.features()[row], ALPHA) for row in rows.tolist()]
    return context.backbone.logit_scale * torch.stack(images) @ texts.T


@pytest.mark.parametrize("sides", SIDES)
def test_training_equals_the_equations(backbone: Backbone, make_context: Make, sides: str) -> None:
    context = make_context(5, round=2, epochs=1, batch_size=3, learning_rate=RATE, momentum=0.9, weight_decay=1e-3)
    payload = start(backbone, sides)
    assert list(payload) == [f"{side}_{part}" for side in SIDES[sides] for part in ("w1", "w2")]
    found = make_method(settings(sides)).train(context, payload, {}).update
    draws = generator(3, 2, "train", "hospital-a", "batches")
    weights = {name: tensor.clone() for name, tensor in payload.items()}
    speed = {name: torch.zeros_like(tensor) for name, tensor in payload.items()}
    for rows in torch.split(torch.randperm(5, generator=draws), 3):
        live = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        logits = logits_by_hand(context, live, rows)
        labels = context.train.labels[rows].tolist()
        losses = [literal.cross_entropy(scores, label) for scores, label in zip(logits, labels, strict=True)]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(live.values()))
        for name, gradient in zip(live, gradients, strict=True):
            speed[name] = 0.9 * speed[name] + gradient + 1e-3 * weights[name]
            inputs = backbone.d_e if name.endswith("w1") else backbone.d_e // REDUCTION
            weights[name] = weights[name] - RATE / inputs**0.5 * speed[name]
    for name, tensor in found.items():
        moved, wanted = tensor - payload[name], weights[name] - payload[name]
        size = float(wanted.abs().max())
        assert size > 1e-5
        assert_values(moved / size, wanted / size, 1e-3)


@pytest.mark.parametrize("sides", SIDES)
def test_the_classifier_scores_blended_features(backbone: Backbone, make_context: Make, sides: str) -> None:
    context, rows = make_context(5), torch.tensor([4, 0, 3])
    adapters = {name: 5 * tensor for name, tensor in start(backbone, sides).items()}  # far from zero-shot
    found = make_method(settings(sides)).classifier(context, adapters, {})
    wanted = logits_by_hand(context, adapters, rows)
    assert_values(found.logits(context.train, rows), wanted)
    plain = TemplateClassifier(context).logits(context.train, rows)
    assert float((wanted - plain).abs().max()) > 0.1
    assert isinstance(found, Fixed) == (sides == "text")
    if isinstance(found, Fixed):
        weights = found.weights()
        assert weights is not None
        features = context.train.features()[rows]
        assert_values(backbone.logit_scale * features @ weights["class_weights"].T, wanted)


def test_with_a_share_of_zero_it_is_zero_shot(backbone: Backbone, make_context: Make) -> None:
    context, rows = make_context(5), torch.arange(5)
    method = make_method(settings("both") | {"alpha": 0.0, "beta": 0.0})
    found = method.classifier(context, start(backbone, "both"), {}).logits(context.train, rows)
    assert_values(found, TemplateClassifier(context).logits(context.train, rows))


def test_the_length_of_a_feature_changes_nothing(backbone: Backbone, make_context: Make) -> None:
    weights, split = list(start(backbone, "image").values()), make_context(5).train
    assert_values(blended(weights, split.raw_features(), 0.4), blended(weights, split.features(), 0.4))


def test_the_start() -> None:
    state = make_method({"name": "fedclipadapter"}).initial_state(server(512), initial_draws(3))
    assert float(abs(state["image_w1"]).max()) <= 512**-0.5
    assert 0.9 * 128**-0.5 < float(abs(state["image_w2"]).max()) <= 128**-0.5
