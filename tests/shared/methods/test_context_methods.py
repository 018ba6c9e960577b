"""PromptFL, PromptFL+Prox, CoOp and zero-shot against their equations written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import (
    ClientContext,
    ClientUpdate,
    MethodError,
    NeedsBackbone,
    ServerContext,
)
from promptfed.shared.methods.core.training import TaskCancelled, batches, learning_rate
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from tests.shared.methods.conftest import NAMES, MadeUpSplit
from tests.support import literal
from tests.support.equality import assert_values

Make = Callable[..., ClientContext]


def server_context(d_t: int | None = 128) -> ServerContext:
    return ServerContext(TrainingSpec(), BackboneShape(d_t=d_t, d_e=96), NAMES, (), seed=3, rounds=4)


def start_of(method_name: str, backbone: Backbone, m: int = 4) -> Tensor:
    method = make_method({"name": method_name, "m": m})
    return torch.randn(m, backbone.d_t, generator=torch.Generator().manual_seed(1)) * 0.02 if method else torch.empty(0)


def batch_orders(context: ClientContext) -> list[Tensor]:
    draws = generator(context.seed, context.round, context.phase, context.client, "batches")
    return list(batches(len(context.train), context.training.batch_size, context.training.epochs, draws))


def literal_training(context: ClientContext, start: Tensor, mu: float) -> Tensor:
    """The local training of PromptFL(+Prox) with loops, and SGD by hand."""
    orders = batch_orders(context)
    features, labels = context.train.features(), context.train.labels

    def gradient(weight: Tensor, step: int) -> Tensor:
        weight = weight.clone().requires_grad_()
        loss = literal.context_loss(context.backbone, weight, list(NAMES), features[orders[step]], labels[orders[step]])
        for row, base in zip(weight, start, strict=True):
            loss = loss + mu / 2 * torch.dot(row - base, row - base)
        return torch.autograd.grad(loss, weight)[0]

    rate = learning_rate(context.training, context.round, context.rounds)
    return literal.sgd(start, gradient, len(orders), rate, context.training.momentum, context.training.weight_decay)


@pytest.mark.parametrize(("name", "mu"), [("promptfl", 0.0), ("promptfl_prox", 0.7)])
def test_training_equals_the_equations(name: str, mu: float, backbone: Backbone, make_context: Make) -> None:
    settings = {"name": name, "m": 4} | ({"mu": mu} if mu else {})
    context = make_context(
        10, round=2, epochs=2, batch_size=4, learning_rate=0.01, momentum=0.9, weight_decay=5e-4, schedule="cosine"
    )
    start = start_of("promptfl", backbone)
    result = make_method(settings).train(context, {"context": start}, {})
    wanted = literal_training(context, start, mu)
    # Compare what training did, not where it started: the start is the larger part of the context.
    moved, literally = result.update["context"] - start, wanted - start
    assert float(literally.abs().max()) > 1e-4
    assert_values(moved / literally.abs().max(), literally / literally.abs().max(), 1e-4)
    assert result.private == {}


def test_prox_pulls_towards_the_global_context(backbone: Backbone, make_context: Make) -> None:
    context = make_context(20, epochs=5, batch_size=5, learning_rate=0.05)
    start = start_of("promptfl", backbone)
    distance = {
        mu: float((make_method({"name": "promptfl_prox", "m": 4, "mu": mu})
                   .train(context, {"context": start}, {}).update["context"] - start).norm())
        for mu in (0.0, 5.0)
    }  # fmt: skip
    free = make_method({"name": "promptfl", "m": 4}).train(context, {"context": start}, {}).update["context"]
    assert distance[0.0] == pytest.approx(float((free - start).norm()), rel=1e-5)
    assert distance[5.0] < 0.8 * distance[0.0]


def test_training_is_reproducible_and_changes_with_the_round(backbone: Backbone, make_context: Make) -> None:
    method, payload = make_method({"name": "promptfl", "m": 4}), {"context": start_of("promptfl", backbone)}
    first, again = (method.train(make_context(batch_size=3), payload, {}).update["context"] for _ in range(2))
    later = method.train(make_context(batch_size=3, round=2), payload, {}).update["context"]
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert torch.equal(payload["context"], start_of("promptfl", backbone)), "the payload must not be changed in place"


def test_coop_keeps_its_context_and_sends_nothing(backbone: Backbone, make_context: Make) -> None:
    method = make_method({"name": "coop", "m": 4})
    context = make_context(batch_size=5, learning_rate=0.05)
    first = method.train(context, {}, {})
    assert first.update == {}
    start = torch.randn(4, backbone.d_t, generator=initial_draws(context.seed)) * 0.02
    assert_values(first.private["context"], literal_training(context, start, 0.0))
    second = method.train(make_context(batch_size=5, learning_rate=0.05, round=2), {}, first.private)
    assert not torch.equal(second.private["context"], first.private["context"])
    indices = torch.arange(10)
    trained = method.classifier(context, {}, second.private).logits(context.train, indices)
    untrained = method.classifier(context, {}, {}).logits(context.train, indices)
    assert not torch.equal(trained, untrained)


def test_coop_starts_where_promptfl_starts(backbone: Backbone, make_context: Make) -> None:
    shared = make_method({"name": "promptfl", "m": 4}).initial_state(server_context(backbone.d_t), initial_draws(3))[
        "context"
    ]
    context = make_context()
    coop = make_method({"name": "coop", "m": 4}).classifier(context, {}, {}).logits(context.train, torch.arange(10))
    promptfl = make_method({"name": "promptfl", "m": 4}).classifier(context, {"context": shared}, {})
    assert torch.equal(coop, promptfl.logits(context.train, torch.arange(10)))


def test_classifier_scores_are_scaled_cosines(backbone: Backbone, make_context: Make) -> None:
    context, prompt = make_context(), start_of("promptfl", backbone)
    found = make_method({"name": "promptfl", "m": 4}).classifier(context, {"context": prompt}, {})
    with torch.no_grad():
        texts = torch.stack([literal.text_feature(backbone, prompt, name) for name in NAMES])
    wanted = backbone.logit_scale * context.train.features()[2:5] @ texts.T
    assert_values(found.logits(context.train, torch.tensor([2, 3, 4])), wanted)


def test_zero_shot_scores_the_template(backbone: Backbone, make_context: Make) -> None:
    context = make_context()
    method = make_method({"name": "zero_shot"})
    with torch.no_grad():
        words = backbone.embed_words("a photo of a")
        texts = torch.stack([literal.text_feature(backbone, words, name) for name in NAMES])
    wanted = backbone.logit_scale * context.train.features() @ texts.T
    assert_values(method.classifier(context, {}, {}).logits(context.train, torch.arange(10)), wanted)
    assert method.phases(1, 1) == ()
    assert method.initial_state(server_context(), initial_draws(0)) == {}


def test_aggregate_is_the_weighted_mean(backbone: Backbone) -> None:
    method = make_method({"name": "promptfl", "m": 4})
    draws = torch.Generator().manual_seed(0)
    contexts = [torch.randn(4, backbone.d_t, generator=draws) for _ in range(3)]
    weights = [0.5, 0.3, 0.2]
    updates = [ClientUpdate(f"c{i}", w, {"context": c}) for i, (w, c) in enumerate(zip(weights, contexts, strict=True))]
    phase = method.phases(1, 4)[0]
    state = method.aggregate({"context": contexts[0]}, phase, iter(updates), weighted_mean, server_context())
    wanted = sum(w * c.double() for w, c in zip(weights, contexts, strict=True)).float()
    assert torch.equal(state["context"], wanted)
    assert state["context"].dtype == torch.float32


def test_context_of_words_comes_last(backbone: Backbone) -> None:
    method = make_method({"name": "promptfl", "m": 6, "context_init": "a photo of a"})
    with pytest.raises(NeedsBackbone, match="initial-state"):
        method.initial_state(server_context(), initial_draws(3))
    made = method.initial_state_with(backbone, server_context(), initial_draws(3))["context"]
    words = backbone.embed_words("a photo of a")
    assert made.shape == (6, backbone.d_t)
    assert torch.equal(made[2:], words.float())
    assert float(made[:2].abs().max()) > 0
    too_long = make_method({"name": "promptfl", "m": 2, "context_init": "a photo of a"})
    with pytest.raises(MethodError, match="raise m"):
        too_long.initial_state_with(backbone, server_context(), initial_draws(3))


def test_initial_context_has_the_stated_spread() -> None:
    method = make_method({"name": "promptfl", "m": 64})
    values = method.initial_state(server_context(512), initial_draws(0))["context"]
    assert values.shape == (64, 512)
    assert float(values.std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float(values.mean())) < 0.001
    with pytest.raises(MethodError, match="text tower"):
        method.initial_state(server_context(None), initial_draws(0))


def test_cosine_schedule_runs_over_the_rounds() -> None:
    cosine = TrainingSpec(schedule="cosine", learning_rate=0.4)
    assert [learning_rate(cosine, r, 4) for r in (1, 2, 3, 4)] == pytest.approx(
        [0.2 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    )
    assert learning_rate(TrainingSpec(learning_rate=0.4), 3, 4) == 0.4


def test_batches_cover_every_epoch_once() -> None:
    found = list(batches(10, 4, 3, torch.Generator().manual_seed(0)))
    assert [len(batch) for batch in found] == [4, 4, 2] * 3
    epochs = [torch.cat(found[3 * k : 3 * k + 3]).tolist() for k in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_training_stops_when_cancelled_or_broken(backbone: Backbone, make_context: Make) -> None:
    from dataclasses import replace

    method, payload = make_method({"name": "promptfl", "m": 4}), {"context": start_of("promptfl", backbone)}
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(TaskCancelled):
        method.train(replace(make_context(batch_size=2), cancelled=cancelled), payload, {})
    assert len(asked) == 3
    with pytest.raises(MethodError, match="learning_rate"):
        method.train(make_context(batch_size=2), {"context": torch.full_like(payload["context"], math.nan)}, {})
    empty = replace(make_context(), train=MadeUpSplit(torch.empty(0, backbone.d_e), torch.empty(0, dtype=torch.long)))
    with pytest.raises(MethodError, match="no training images"):
        method.train(empty, payload, {})
