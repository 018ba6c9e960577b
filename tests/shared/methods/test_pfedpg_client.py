"""pFedPG's client half on both kinds of backbone: local training, the client's own head, and its predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.methods.core.heads import BIAS, CLASSES, WEIGHT, LinearHead
from promptfed.shared.methods.core.interface import ClientContext
from promptfed.shared.methods.core.training import batches
from promptfed.shared.seeds import generator
from tests.shared.methods.conftest import NAMES
from tests.support.equality import assert_values
from tests.support.small_pfedpg import method_of, noise, roster, start, step
from tests.support.terms import training_terms
from tests.support.textless import textless_backbone


@dataclass
class Pictures:
    """Noise with labels, as preprocessed images."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def features(self) -> Tensor:
        raise AssertionError("visual prompts change the features: none may be cached")

    def raw_features(self) -> Tensor:
        raise AssertionError("visual prompts change the features: none may be cached")

    def images(self, indices: Tensor) -> Tensor:
        return self.pixels[indices]


@pytest.fixture
def textless() -> Backbone:
    return textless_backbone()


@pytest.fixture(params=["clip", "timm"])
def any_backbone(request: pytest.FixtureRequest) -> Backbone:
    found: Backbone = request.getfixturevalue("backbone" if request.param == "clip" else "textless")
    return found


def task(backbone: Backbone, count: int = 10, **training: Any) -> ClientContext:
    height, width = backbone.image_size
    pictures = Pictures(noise(count, 3, height, width), torch.arange(count) % len(NAMES))
    return ClientContext(
        backbone=backbone,
        class_names=NAMES,
        template="a photo of a {}.",
        terms=training_terms({"epochs": 2, "batch_size": 4, "learning_rate": 0.05} | training),
        client="birch",
        domain=None,
        peers=(),
        round=2,
        phase="train",
        train=pictures,
    )


def logits(backbone: Backbone, images: Tensor, P: Tensor, weight: Tensor, bias: Tensor, projected: bool) -> Tensor:
    features = backbone.encode_images_prompted(images, P.unsqueeze(0), pooled=not projected, normalize=False)
    return torch.stack(
        [torch.stack([torch.dot(w, f) + b for w, b in zip(weight, bias, strict=True)]) for f in features]
    )


@pytest.mark.parametrize("projected", [False, True])
def test_training_equals_sgd_written_out_and_sends_just_the_change(any_backbone: Backbone, projected: bool) -> None:
    method = method_of(projected=projected)
    context = task(any_backbone, weight_decay=0.01, momentum=0.9)
    served = noise(5, any_backbone.d_v, scale=0.1)
    kept = served.clone()
    found = method.train(context, {"prompts": served}, {})
    assert served.equal(kept)

    width = any_backbone.d_e if projected else any_backbone.d_v
    head = LinearHead.start(context, width)
    values = [served.clone(), head.weight.clone(), head.bias.clone()]
    velocity = [torch.zeros_like(value) for value in values]
    order = batches(10, 4, 2, generator(3, 2, "train", "birch", "batches"))
    for rows in order:
        leaves = [value.clone().requires_grad_() for value in values]
        scores = logits(any_backbone, context.train.images(rows), *leaves, projected)
        loss = F.cross_entropy(scores, context.train.labels[rows])
        for k, gradient in enumerate(torch.autograd.grad(loss, leaves)):
            velocity[k] = 0.9 * velocity[k] + gradient + 0.01 * values[k]
            values[k] = values[k] - 0.05 * velocity[k]
    assert set(found.update) == {"delta"}
    assert set(found.private) == {"adapted_prompts", WEIGHT, BIAS, CLASSES}
    assert_values(found.private["adapted_prompts"], values[0])
    assert_values(found.private[WEIGHT], values[1])
    assert_values(found.private[BIAS], values[2])
    assert found.update["delta"].equal(found.private["adapted_prompts"] - served), "ΔP is P̃ − P to the last bit"
    assert found.metrics["delta_norm"] == pytest.approx(float(found.update["delta"].norm()))
    assert all(parameter.grad is None for parameter in any_backbone.model.parameters())


def test_the_next_round_goes_on_with_the_clients_own_head_and_the_prompts_that_are_served(textless: Backbone) -> None:
    method, context = method_of(), task(textless, epochs=1)
    first = method.train(context, {"prompts": noise(5, 24, scale=0.1)}, {})
    served = noise(5, 24, seed=5, scale=0.1)
    frozen = context.with_terms(training=context.training.model_copy(update={"learning_rate": 1e-12}))
    second = method.train(frozen, {"prompts": served}, first.private)
    assert_values(second.private[WEIGHT], first.private[WEIGHT])
    assert_values(second.private["adapted_prompts"], served)


def test_it_classifies_with_the_generated_prompts_and_beside_them_with_the_adapted(any_backbone: Backbone) -> None:
    method, context = method_of(), task(any_backbone)
    trained = method.train(context, {"prompts": noise(5, any_backbone.d_v, scale=0.1)}, {}).private
    generated = noise(5, any_backbone.d_v, seed=7, scale=0.1)
    rows = torch.tensor([3, 1, 8])
    made = {"": method.classifier(context, {"prompts": generated}, trained)}
    made |= method.variants(context, {"prompts": generated}, trained)
    for variant, used in {"": generated, "adapted": trained["adapted_prompts"]}.items():
        with torch.no_grad():
            wanted = logits(any_backbone, context.train.images(rows), used, trained[WEIGHT], trained[BIAS], False)
        assert_values(made[variant].logits(context.train, rows), wanted)
    assert not made[""].logits(context.train, rows).equal(made["adapted"].logits(context.train, rows))
    some = replace(context, class_names=NAMES[1:3], label_space=NAMES)
    chosen = method.classifier(some, {"prompts": generated}, trained).logits(context.train, rows)
    assert_values(chosen, made[""].logits(context.train, rows)[:, 1:3])


def test_before_its_first_training_a_client_has_the_seeded_head_and_nothing_adapted(textless: Backbone) -> None:
    method, context = method_of(), task(textless)
    payload = {"prompts": noise(5, 24, scale=0.1)}
    rows = torch.arange(10)
    head = LinearHead.start(context, 24)
    with torch.no_grad():
        wanted = logits(textless, context.train.images(rows), payload["prompts"], head.weight, head.bias, False)
    assert_values(method.classifier(context, payload, {}).logits(context.train, rows), wanted)
    assert method.variants(context, payload, {}) == {}


def test_training_and_server_steps_together_fit_the_clients(textless: Backbone) -> None:
    """A client's loss with newly generated prompts falls from round to round: the loop closes."""
    method = method_of(generator_learning_rate=0.01)
    server = replace(roster("birch"), shape=shape_of(textless))
    state, private = start(method, server), {}
    losses = []
    for round in range(1, 7):
        context = replace(task(textless, epochs=5, learning_rate=0.1), round=round)
        payload = method.payload(state, None, server.clients[0], server)
        result = method.train(context, payload, private)
        private = result.private
        state = step(method, state, {"birch": result.update["delta"]}, server)
        losses.append(result.metrics["loss"])
    assert losses[-1] < 0.7 * losses[0], losses
