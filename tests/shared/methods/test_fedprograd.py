"""FedProGrad against ProGrad's equations written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.interface.base import ClientContext
from promptfed.shared.methods.core.training import batches
from promptfed.shared.methods.fedprograd import projected
from promptfed.shared.seeds import generator
from promptfed.shared.spec.spec import SpecError
from tests.shared.methods.conftest import NAMES
from tests.shared.methods.test_text_baselines import assert_moved_equally, start_context
from tests.support import literal

Make = Callable[..., ClientContext]
M = 4


@pytest.mark.parametrize(("weight", "wanted"), [(1.0, [1.0, 0.0]), (0.5, [1.0, -0.5])])
def test_what_is_against_the_template_is_taken_away(weight: float, wanted: list[float]) -> None:
    found, conflict = projected(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 2.0]), weight)
    assert conflict
    assert torch.allclose(found, torch.tensor(wanted))


@pytest.mark.parametrize("other", [[0.0, -2.0], [0.0, 0.0], [1.0, 1.0]])
def test_what_is_not_against_it_stays(other: list[float]) -> None:
    given = torch.tensor([1.0, -1.0])
    found, conflict = projected(given, torch.tensor(other), 1.0)
    assert not conflict
    assert torch.equal(found, given)


def test_gradients_so_small_that_their_squares_vanish() -> None:
    found, conflict = projected(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1e-30]), 1.0)
    assert conflict
    assert torch.allclose(found, torch.tensor([1.0, 0.0]))


def both_losses(context: ClientContext, learned: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """CE and Σ_c p⁰ (log p⁰ − log p), one image and one class at a time."""
    backbone = context.backbone
    words = backbone.embed_words("a photo of a")
    own = [literal.text_feature(backbone, learned, name) for name in NAMES]
    with torch.no_grad():
        known = [literal.text_feature(backbone, words, name) for name in NAMES]
    entropies, divergences = [], []
    for row in rows.tolist():
        image = context.train.features()[row]
        logits = torch.stack([backbone.logit_scale * torch.dot(image, text) for text in own])
        before = torch.softmax(torch.stack([backbone.logit_scale * torch.dot(image, text) for text in known]), 0)
        entropies.append(literal.cross_entropy(logits, int(context.train.labels[row])))
        terms = [before[c] * (before[c].log() - literal.cross_entropy(logits, c).neg()) for c in range(len(NAMES))]
        divergences.append(sum(terms))
    return torch.stack(entropies).mean(), torch.stack(divergences).mean()


def literal_step(context: ClientContext, weight: Tensor, rows: Tensor, factor: float, mode: str) -> tuple[Tensor, bool]:
    learned = weight.clone().requires_grad_()
    entropy, divergence = both_losses(context, learned, rows)
    g_ce = torch.autograd.grad(entropy, learned, retain_graph=True)[0]
    g_kl = torch.autograd.grad(divergence, learned)[0]
    if mode == "penalty":
        return g_ce + factor * g_kl, False
    product = sum(float(a) * float(b) for a, b in zip(g_ce.flatten(), g_kl.flatten(), strict=True))
    if product >= 0:
        return g_ce, False
    length = sum(float(b) ** 2 for b in g_kl.flatten()) ** 0.5
    return g_ce - factor * (product / length) * (g_kl / length), True


@pytest.mark.parametrize(("mode", "weight"), [("project", 1.0), ("project", 0.6), ("penalty", 1.0)])
def test_training_equals_the_equations(mode: str, weight: float, backbone: Backbone, make_context: Make) -> None:
    context = make_context(8, epochs=2, batch_size=4, learning_rate=0.05, momentum=0.9, weight_decay=5e-4)
    start = start_context(backbone)
    tried = make_method({"name": "fedprograd", "m": M, "mode": mode, "weight": weight})
    found = tried.train(context, {"context": start}, {})
    draws = generator(context.seed, context.round, context.phase, context.client, "batches")
    orders, conflicts = list(batches(8, 4, 2, draws)), []

    def gradient(value: Tensor, step: int) -> Tensor:
        made, conflict = literal_step(context, value, orders[step], weight, mode)
        conflicts.append(conflict)
        return made

    wanted = literal.sgd(start, gradient, len(orders), 0.05, 0.9, 5e-4)
    assert_moved_equally(found.update, {"context": wanted}, {"context": start})
    if mode == "project":
        assert found.metrics["conflicting_steps"] == sum(conflicts) / 4
        assert any(conflicts), "else nothing was projected here"


def test_without_weight_it_is_promptfl(backbone: Backbone, make_context: Make) -> None:
    context, payload = make_context(8, batch_size=3, epochs=2, learning_rate=0.05), {"context": start_context(backbone)}
    plain = make_method({"name": "promptfl", "m": M}).train(context, payload, {})
    for mode in ("project", "penalty"):
        found = make_method({"name": "fedprograd", "m": M, "weight": 0.0, "mode": mode}).train(context, payload, {})
        assert_moved_equally(found.update, plain.update, payload)
        assert found.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-6)


def test_the_template_is_read_once(backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    encode = Backbone.encode_text

    def counted(self: Backbone, names: list[str], **options: Any) -> Tensor:
        asked.append(names)
        return encode(self, names, **options)

    monkeypatch.setattr(Backbone, "encode_text", counted)
    context = replace(make_context(6, batch_size=3, epochs=2), template="a most rare photo of a {}.")
    make_method({"name": "fedprograd", "m": M}).train(context, {"context": start_context(backbone)}, {})
    assert len(asked) == 1


def test_options() -> None:
    spec = resolve_spec({"name": "x", "method": {"name": "fedprograd"}})
    assert (spec.method["weight"], spec.method["mode"], spec.method["m"]) == (1.0, "project", 16)
    with pytest.raises(SpecError, match=r"method\.mode"):
        resolve_spec({"name": "x", "method": {"name": "fedprograd", "mode": "add"}})
