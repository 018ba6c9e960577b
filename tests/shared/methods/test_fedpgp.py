"""FedPGP against the equations of its paper written out, one image, one class and one prompt at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import fedpgp, make_method
from promptfed.shared.methods.core.interface import ClientContext, MethodError, ServerContext
from promptfed.shared.methods.core.training import batches, learning_rate
from promptfed.shared.methods.fedpgp import FedPGP
from promptfed.shared.seeds import generator
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit, wide_step
from tests.support import literal

Make = Callable[..., ClientContext]
M, B = 4, 2


def method(**hyper: Any) -> FedPGP:
    made = make_method({"name": "fedpgp", "m": M, "b": B} | hyper)
    assert isinstance(made, FedPGP)
    return made


def global_context(backbone: Backbone) -> Tensor:
    return torch.randn(M, backbone.d_t, generator=torch.Generator().manual_seed(1)) * 0.02


def similarity(a: Tensor, b: Tensor) -> Tensor:
    """The cosine of two vectors."""
    return torch.dot(a, b) / (a.norm() * b.norm())


def literal_loss(
    context: ClientContext, p_global: Tensor, p_personal: Tensor, rows: Tensor, hyper: fedpgp.FedPGPHyper
) -> Tensor:
    """Eq. 2, 12 and 13: every text passes the tower by itself, the template's (constant) ones too."""
    backbone, names = context.backbone, list(context.class_names)
    features, labels = context.train.features()[rows], context.train.labels[rows]
    value = literal.context_loss(backbone, p_personal, names, features, labels)
    words = backbone.embed_words("a photo of a")
    for name in names:
        z_global = literal.text_feature(backbone, p_global, name)
        z_clip = literal.text_feature(backbone, words, name)
        z_personal = literal.text_feature(backbone, p_personal, name)
        positive, negative = similarity(z_global, z_clip), similarity(z_global, z_personal)
        if hyper.pairs == "positive_only":
            term = 1 - positive
        elif hyper.pairs == "negative_only":
            term = negative
        else:
            up, away = torch.exp(positive / hyper.tau_con), torch.exp(negative / hyper.tau_con)
            term = -torch.log(up / (up + away))
        value = value + hyper.mu * term / len(names)
    return value


def literal_training(context: ClientContext, start: Tensors, hyper: fedpgp.FedPGPHyper) -> Tensors:
    """E epochs of Algorithm 1 from ``start``, with SGD by hand over all trained numbers in one row."""
    sizes = {name: value.numel() for name, value in start.items()}
    draws = generator(context.seed, context.round, context.phase, context.client, "batches")
    orders = list(batches(len(context.train), context.training.batch_size, context.training.epochs, draws))

    def parts(row: Tensor) -> Tensors:
        split = torch.split(row, list(sizes.values()))
        return {name: value.view_as(start[name]) for name, value in zip(sizes, split, strict=True)}

    def gradient(row: Tensor, step: int) -> Tensor:
        row = row.clone().requires_grad_()
        now = parts(row)
        p_global = now["global_context"]
        personal = p_global + now["D"] if "D" in now else literal_product(p_global, now["U"], now["V"])
        return torch.autograd.grad(literal_loss(context, p_global, personal, orders[step], hyper), row)[0]

    rate = learning_rate(context.training, context.round, context.rounds)
    whole = torch.cat([value.flatten() for value in start.values()])
    trained = literal.sgd(whole, gradient, len(orders), rate, context.training.momentum, context.training.weight_decay)
    return parts(trained)


def literal_product(p_global: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """p_G + U·V (Eq. 10), one row and one rank at a time."""
    rows = []
    for i in range(len(p_global)):
        row = p_global[i]
        for k in range(len(v)):
            row = row + u[i, k] * v[k]
        rows.append(row)
    return torch.stack(rows)


def assert_moved_equally(found: Tensor, wanted: Tensor, start: Tensor) -> None:
    """What training did is compared, not where it started from: that is the larger part."""
    moved, literally = found - start, wanted - start
    scale = float(literally.abs().max())
    assert scale > 1e-5
    assert float((moved - literally).abs().max()) <= 1e-4 * scale


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mu": 3.0, "tau_con": 0.2},
        {"pairs": "positive_only"},
        {"pairs": "negative_only"},
        {"full_rank": True},
        {"mu": 0.0},
    ],
    ids=str,
)
def test_training_equals_the_equations(options: dict[str, Any], backbone: Backbone, make_context: Make) -> None:
    context = make_context(
        5, round=2, epochs=1, batch_size=3, learning_rate=0.05, momentum=0.9, weight_decay=5e-4, schedule="cosine"
    )
    tried = method(**options)
    start = {"global_context": global_context(backbone)} | tried.adaptation(context, {})
    result = tried.train(context, {"global_context": start["global_context"]}, {})
    wanted = literal_training(context, start, tried.hyper)
    found = result.update | result.private
    assert set(result.update) == {"global_context"}
    assert set(found) == set(wanted)
    for name, value in found.items():
        assert_moved_equally(value, wanted[name], start[name])


def test_gradients_equal_the_equations_at_77_tokens(wide_backbone: Backbone, make_context: Make) -> None:
    """One step from the same numbers: where the context is as long as CLIP's, and several tokens stand for a name."""
    backbone = wide_backbone
    draws = torch.Generator().manual_seed(4)
    context = wide_step(make_context, backbone, draws)
    tried = method(m=16)
    start = {"global_context": torch.randn(16, backbone.d_t, generator=draws) * 0.02} | tried.adaptation(context, {})
    result = tried.train(context, {"global_context": start["global_context"]}, {})
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    personal = literal_product(leaves["global_context"], leaves["U"], leaves["V"])
    loss = literal_loss(context, leaves["global_context"], personal, torch.arange(3), tried.hyper)
    wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert result.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, value in (result.update | result.private).items():
        # At a rate of 1 without momentum a step is the gradient, up to rounding of numbers of 0.02.
        found, scale = start[name] - value, float(wanted[name].abs().max())
        assert float((found - wanted[name]).abs().max()) <= 1e-4 * scale


def test_the_private_start_is_the_clients_own(backbone: Backbone, make_context: Make) -> None:
    context, tried = make_context(), method(b=8, m=16)
    first, again = tried.adaptation(context, {}), tried.adaptation(context, {})
    other = tried.adaptation(replace(context, client="hospital-b"), {})
    assert {name: tuple(value.shape) for name, value in first.items()} == {"U": (16, 8), "V": (8, backbone.d_t)}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["V"], other["V"])
    everything = torch.cat([value.flatten() for value in first.values()])
    assert float(everything.std()) == pytest.approx(0.02, rel=0.06)
    assert float(first["U"].abs().min()) > 0
    assert tried.adaptation(context, {"U": other["U"], "V": other["V"]})["V"] is other["V"]


def test_private_state_carries_on_and_the_payload_is_left_alone(backbone: Backbone, make_context: Make) -> None:
    tried, payload = method(), {"global_context": global_context(backbone)}
    context = make_context(batch_size=5, learning_rate=0.05)
    first = tried.train(context, payload, {})
    second = tried.train(replace(context, round=2), payload, first.private)
    assert torch.equal(payload["global_context"], global_context(backbone))
    assert not torch.equal(second.private["V"], first.private["V"])
    fresh = tried.train(replace(context, round=2), payload, {})
    assert not torch.equal(second.update["global_context"], fresh.update["global_context"])


def test_classifies_with_the_personal_context(backbone: Backbone, make_context: Make) -> None:
    tried, payload, rows = method(), {"global_context": global_context(backbone)}, torch.arange(4)
    context = make_context()
    trained = tried.train(context.with_terms(training=TrainingSpec(learning_rate=0.5)), payload, {}).private

    def scores(context: ClientContext, private: Tensors) -> Tensor:
        return tried.classifier(context, payload, private).logits(context.train, rows)

    def literally(p: Tensor) -> Tensor:
        with torch.no_grad():
            texts = torch.stack([literal.text_feature(backbone, p, name) for name in NAMES])
            return backbone.logit_scale * context.train.features()[rows] @ texts.T

    start = tried.adaptation(context, {})
    p_global = payload["global_context"]
    for found, wanted in [
        (scores(context, trained), literally(literal_product(p_global, trained["U"], trained["V"]))),
        (scores(context, {}), literally(literal_product(p_global, start["U"], start["V"]))),
    ]:
        assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    empty = MadeUpSplit(torch.empty(0, backbone.d_e), torch.empty(0, dtype=torch.long))
    evaluator = tried.classifier(replace(context, train=empty), payload, {})
    assert float((evaluator.logits(context.train, rows) - literally(p_global)).abs().max()) <= 1e-5 * 100


def test_constant_features_are_computed_once_and_the_prompted_texts_in_one_batch(
    backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[list[str]] = []
    batches: list[tuple[int, ...]] = []
    encode_text, encode_prompts = Backbone.encode_text, Backbone.encode_prompts

    def counted_texts(self: Backbone, names: list[str], **options: Any) -> Tensor:
        texts.append(names)
        return encode_text(self, names, **options)

    def counted_prompts(self: Backbone, stack: Tensor, *arguments: Any, **options: Any) -> Tensor:
        batches.append(tuple(stack.shape))
        return encode_prompts(self, stack, *arguments, **options)

    monkeypatch.setattr(Backbone, "encode_text", counted_texts)
    monkeypatch.setattr(Backbone, "encode_prompts", counted_prompts)
    tried, payload = method(), {"global_context": global_context(backbone)}
    context = replace(make_context(6, batch_size=3, epochs=2), template="a rare photo of a {}.")
    first = tried.train(context, payload, {})
    tried.train(replace(context, round=2), payload, first.private)
    assert texts == [[f"a rare photo of a {name}." for name in NAMES]]
    assert batches == [(2, M, backbone.d_t)] * 8


def test_a_context_that_leaves_no_room() -> None:
    tried = method(m=16)
    server = ServerContext(TrainingSpec(), BackboneShape(d_t=24, d_e=8, context_length=77), NAMES, (), 3, 4)
    narrow = replace(server, shape=BackboneShape(d_t=24, d_e=8, context_length=18))
    with pytest.raises(MethodError, match="at most m = 15"):
        tried.dims(narrow)
