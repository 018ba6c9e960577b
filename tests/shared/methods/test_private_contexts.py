"""PromptFolio and Prompt+PER against their equations written out, one class and one image at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, promptfolio
from promptfed.shared.methods.core.interface import ClientContext, ClientUpdate, HasVariants, ServerContext
from promptfed.shared.methods.promptfl import LOCAL, PrivateContextMethod
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit, wide_step
from tests.shared.methods.test_text_baselines import Loss, assert_moved_equally, literal_training
from tests.support import literal

Make = Callable[..., ClientContext]
M = 4
EACH = ("promptfolio", "promptfl_per")


def method(name: str, **hyper: Any) -> PrivateContextMethod:
    made = make_method({"name": name, "m": M} | hyper)
    assert isinstance(made, PrivateContextMethod)
    return made


def start_of(tried: PrivateContextMethod, context: ClientContext) -> Tensors:
    """A shared context, drawn here, and the private one that the method starts with."""
    draws = torch.Generator().manual_seed(1)
    shared = torch.randn(tried.shared_length, context.backbone.d_t, generator=draws) * 0.02
    return {tried.shared.name: shared, LOCAL: tried.local_context(context, {})}


def texts(backbone: Backbone, context: Tensor, names: tuple[str, ...]) -> list[Tensor]:
    return [literal.text_feature(backbone, context, name) for name in names]


def entropy_of(context: ClientContext, features: list[Tensor], rows: Tensor) -> Tensor:
    """Mean cross-entropy of the images in ``rows`` against one vector for each class."""
    losses = []
    for row in rows.tolist():
        image = context.train.features()[row]
        logits = torch.stack([context.backbone.logit_scale * torch.dot(image, text) for text in features])
        losses.append(literal.cross_entropy(logits, int(context.train.labels[row])))
    return torch.stack(losses).mean()


def folio_loss(context: ClientContext, theta: float) -> Loss:
    """(2.1) with the classes one by one."""

    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        shared = texts(context.backbone, tensors["global_context"], context.class_names)
        local = texts(context.backbone, tensors[LOCAL], context.class_names)
        return entropy_of(context, [(1 - theta) * g + theta * z for g, z in zip(shared, local, strict=True)], rows)

    return loss


def per_loss(context: ClientContext) -> Loss:
    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        whole = torch.stack([*tensors["context"], *tensors[LOCAL]])
        return entropy_of(context, texts(context.backbone, whole, context.class_names), rows)

    return loss


def literally(tried: PrivateContextMethod, context: ClientContext) -> Loss:
    if isinstance(tried, promptfolio.PromptFolio):
        return folio_loss(context, tried.hyper.theta)
    return per_loss(context)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("promptfolio", {}),
    ("promptfolio", {"theta": 0.8}),
    ("promptfl_per", {}),
    ("promptfl_per", {"shared_tokens": 3}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_training_equals_the_equations(
    name: str, options: dict[str, Any], backbone: Backbone, make_context: Make
) -> None:
    context = make_context(5, round=2, epochs=1, batch_size=3, learning_rate=0.05, schedule="cosine")
    tried = method(name, **options)
    start = start_of(tried, context)
    found = tried.train(context, {tried.shared.name: start[tried.shared.name]}, {})
    rate = 0.05 / 2 * (1 + 0.5**0.5)  # the second of four rounds of a half cosine
    wanted = literal_training(context, start, literally(tried, context), rate)
    assert set(found.update) == {tried.shared.name}
    assert set(found.private) == {LOCAL}
    assert_moved_equally(found.update | found.private, wanted, start)


@pytest.mark.parametrize(
    ("name", "options"),
    [("promptfolio", {}), ("promptfl_per", {})],
    ids=str,
)
def test_gradients_and_loss_equal_the_equations_at_77_tokens(
    name: str, options: dict[str, Any], wide_backbone: Backbone, make_context: Make
) -> None:
    draws = torch.Generator().manual_seed(4)
    context = wide_step(make_context, wide_backbone, draws)
    tried = method(name, **options)
    start = start_of(tried, context)
    result = tried.train(context, {tried.shared.name: start[tried.shared.name]}, {})
    leaves = {key: value.clone().requires_grad_() for key, value in start.items()}
    loss = literally(tried, context)(leaves, torch.arange(3))
    wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert result.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for key, value in (result.update | result.private).items():
        scale = float(wanted[key].abs().max())
        assert float((start[key] - value - wanted[key]).abs().max()) <= 1e-4 * scale


def test_the_mixture_is_not_normalised_again() -> None:
    text = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    image = torch.tensor([0.6, 0.8])
    assert float(image @ promptfolio.mixed(text, 0.2)[0]) == pytest.approx(0.64)


def test_both_forms_of_the_mixtures_logits_agree(backbone: Backbone, make_context: Make) -> None:
    """(2.2): the mixture's logits are the mixture of the logits."""
    context, tried, rows = make_context(), method("promptfolio"), torch.arange(10)
    start = start_of(tried, context)
    payload = {"global_context": start["global_context"]}
    found = tried.classifier(context, payload, {LOCAL: start[LOCAL]}).logits(context.train, rows)
    ends = [
        method("promptfolio", theta=theta)
        .classifier(context, payload, {LOCAL: start[LOCAL]})
        .logits(context.train, rows)
        for theta in (0.0, 1.0)
    ]
    assert float((found - (0.6 * ends[0] + 0.4 * ends[1])).abs().max()) <= 1e-5 * float(found.abs().max())


def test_a_share_of_nothing_is_promptfl_and_of_all_trains_the_private_one_alone(
    backbone: Backbone, make_context: Make
) -> None:
    context = make_context(6, batch_size=3, learning_rate=0.05, epochs=2, weight_decay=0.01, momentum=0.0)
    none, all_of_it = method("promptfolio", theta=0.0), method("promptfolio", theta=1.0)
    start = start_of(none, context)
    payload = {"global_context": start["global_context"]}
    plain = make_method({"name": "promptfl", "m": M}).train(context, {"context": start["global_context"]}, {})
    decayed = (1 - 0.05 * 0.01) ** 4
    first = none.train(context, payload, {})
    assert_moved_equally(
        {"a": first.update["global_context"]}, {"a": plain.update["context"]}, {"a": start["global_context"]}
    )
    assert torch.allclose(first.private[LOCAL], start[LOCAL] * decayed, atol=1e-9)
    second = all_of_it.train(context, payload, {})
    assert torch.allclose(second.update["global_context"], start["global_context"] * decayed, atol=1e-9)
    assert not torch.allclose(second.private[LOCAL], start[LOCAL] * decayed, atol=1e-5)


@pytest.mark.parametrize("name", EACH)
def test_all_clients_start_from_one_private_context(name: str, make_context: Make) -> None:
    context, tried = make_context(), method(name, m=16)
    first = tried.local_context(context, {})
    assert torch.equal(first, tried.local_context(replace(context, client="hospital-b"), {}))
    assert float(first.std()) == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(first, tried.local_context(context.with_terms(seed=4), {}))
    kept = torch.ones_like(first)
    assert tried.local_context(context, {LOCAL: kept}) is kept


@pytest.mark.parametrize("name", EACH)
def test_who_classifies_with_what(name: str, backbone: Backbone, make_context: Make) -> None:
    """A trainer with both contexts, trained or as they start; an evaluator with the shared one; ``global`` as it."""
    context, tried, rows = make_context(), method(name), torch.arange(4)
    assert tried.personal
    start = start_of(tried, context)
    shared, payload = start[tried.shared.name], {tried.shared.name: start[tried.shared.name]}
    features = context.train.features()[rows]
    none = replace(context, train=MadeUpSplit(torch.empty(0, backbone.d_e), torch.empty(0, dtype=torch.long)))

    def logits(vectors: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return backbone.logit_scale * features @ torch.stack(vectors).T

    def both(local: Tensor) -> Tensor:
        with torch.no_grad():
            alone = texts(backbone, shared, NAMES)
            own = texts(backbone, local, NAMES)
            joined = texts(backbone, torch.cat([shared, local]), NAMES) if name == "promptfl_per" else []
        if name == "promptfolio":
            return logits([0.6 * a + 0.4 * b for a, b in zip(alone, own, strict=True)])
        return logits(joined)

    trained = {LOCAL: torch.randn(start[LOCAL].shape, generator=torch.Generator().manual_seed(9)) * 0.1}
    assert isinstance(tried, HasVariants)
    alone = logits(texts(backbone, shared, NAMES))
    for found, wanted in [
        (tried.classifier(context, payload, trained), both(trained[LOCAL])),
        (tried.classifier(context, payload, {}), both(start[LOCAL])),
        (tried.classifier(none, payload, {}), alone),
        (tried.variants(context, payload, trained)["global"], alone),
    ]:
        scored = found.logits(context.train, rows)
        assert float((scored - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    assert tried.variants(none, payload, {}) == {}


def test_the_mean_touches_the_shared_rows_alone(make_context: Make) -> None:
    tried = method("promptfl_per")
    (phase,) = tried.phases(1, 4)
    updates = [
        ClientUpdate(name, 0.5, {"context": torch.full((2, 3), value)}) for name, value in (("a", 1.0), ("b", 3.0))
    ]
    server = ServerContext(TrainingSpec(), BackboneShape(d_t=3, d_e=3), NAMES, (), 3, 4)

    def mean(given: Any) -> Tensors:
        return {"context": sum(update.weight * update.tensors["context"] for update in given)}

    after = tried.aggregate({"context": torch.zeros(2, 3)}, phase, updates, mean, server)
    assert torch.equal(after["context"], torch.full((2, 3), 2.0))
