"""FedTPG against the equations of its paper written out: the generator number by number, one class at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import fedtpg, make_method
from promptfed.shared.methods.core.interface import (
    ClientContext,
    ClientUpdate,
    MethodError,
    ServerContext,
    name_features,
)
from promptfed.shared.methods.core.training import batches, learning_rate
from promptfed.shared.methods.fedtpg import FedTPG
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit, wide_step
from tests.support import literal

Make = Callable[..., ClientContext]
FORMS = ("relu", "geglu")


def method(**hyper: Any) -> FedTPG:
    made = make_method({"name": "fedtpg", "m": 3} | hyper)
    assert isinstance(made, FedTPG)
    return made


def server_context(d_t: int = 112, d_e: int = 96) -> ServerContext:
    shape = BackboneShape(d_t=d_t, d_e=d_e, context_length=32)
    return ServerContext(TrainingSpec(), shape, None, (), seed=3, rounds=4)


def some_theta(tried: FedTPG, d_t: int = 112, d_e: int = 96) -> Tensors:
    """As it starts, with every number moved so that none is missed: biases from zero, norms from the identity."""
    draws = torch.Generator().manual_seed(2)
    start = tried.initial_state(server_context(d_t, d_e), initial_draws(3))
    return {name: value + torch.randn(value.shape, generator=draws) * 0.1 for name, value in start.items()}


def literal_norm(row: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm of one vector."""
    mean = row.sum() / len(row)
    spread = ((row - mean) ** 2).sum() / len(row)
    return (row - mean) / torch.sqrt(spread + 1e-5) * weight + bias


def literal_gelu(x: Tensor) -> Tensor:
    """x·Φ(x)."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def literal_context(theta: Tensors, classes: Tensor, heads: int, feedforward: str) -> Tensor:
    """f_θ(T)/√d_t (Eq. 1-2), for one query, one head and one class after the other."""

    def affine(name: str, row: Tensor) -> Tensor:
        return theta[f"{name}.weight"] @ row + theta[f"{name}.bias"]

    def norm(name: str, row: Tensor) -> Tensor:
        return literal_norm(row, theta[f"{name}.weight"], theta[f"{name}.bias"])

    normed = [norm("norm_classes", row) for row in classes]
    keys, values = [affine("to_key", row) for row in normed], [affine("to_value", row) for row in normed]
    vectors = []
    for row in theta["queries"]:
        query = affine("to_query", norm("norm_queries", row))
        size = len(query) // heads
        mixed = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = [torch.dot(query[part], key[part]) / math.sqrt(size) for key in keys]
            total = sum(torch.exp(score) for score in scores)
            mixed.append(
                sum(torch.exp(score) / total * value[part] for score, value in zip(scores, values, strict=True))
            )
        x = affine("to_output", torch.cat(mixed))
        hidden = affine("widen", norm("norm_hidden", x))
        if feedforward == "relu":
            hidden = torch.maximum(hidden, torch.zeros(()))
        else:
            half = len(hidden) // 2
            hidden = hidden[:half] * literal_gelu(hidden[half:])
        vectors.append((x + affine("narrow", hidden)) / math.sqrt(len(x)))
    return torch.stack(vectors)


def literal_names(backbone: Backbone, names: tuple[str, ...]) -> Tensor:
    """T: the tower's own features of ``[SOS] name [EOT]``, one by one."""
    tokenizer, rows = literal.tokenizer_of(backbone.model_name), []
    for name in names:
        words = tokenizer.encode(name.replace("_", " "))
        ids = torch.zeros(1, backbone.context_length, dtype=torch.long)
        ids[0, : len(words) + 2] = torch.tensor([tokenizer.sot_token_id, *words, tokenizer.eot_token_id])
        feature = backbone.model.encode_text(ids)[0]
        rows.append(feature / feature.norm())
    return torch.stack(rows)


def assert_equal_gradients(found: Tensors, wanted: Tensors, start: Tensors | None = None) -> None:
    """Each tensor's, on its own scale. Adding a vector to all keys changes no softmax: that bias has only rounding.

    Where they are steps from a ``start``, its numbers were rounded each time that they moved.
    """
    largest = max(float(one.abs().max()) for one in wanted.values())
    assert set(found) == set(wanted)
    for name, one in wanted.items():
        scale = largest if name == "to_key.bias" else float(one.abs().max())
        assert scale > 0, name
        stored = torch.finfo(one.dtype).eps * float(start[name].abs().max()) if start else 0.0
        assert float((found[name] - one).abs().max()) <= 1e-4 * scale + 2 * stored, name


@pytest.mark.parametrize("feedforward", FORMS)
@pytest.mark.parametrize("heads", [1, 4])
def test_the_generator_equals_the_equations(feedforward: str, heads: int) -> None:
    tried = method(feedforward=feedforward, heads=heads)
    theta = some_theta(tried, d_t=24, d_e=16)
    classes = torch.nn.functional.normalize(torch.randn(5, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
    fast, slow = ({name: value.clone().requires_grad_() for name, value in theta.items()} for _ in range(2))
    found, wanted = tried.context_of(fast, classes), literal_context(slow, classes, heads, feedforward)
    assert found.shape == (3, 24)
    assert float((found - wanted).detach().abs().max()) <= 1e-5 * max(1.0, float(wanted.detach().abs().max()))
    weights = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    names = list(theta)
    gradients = torch.autograd.grad((found * weights).sum(), [fast[name] for name in names])
    literally = torch.autograd.grad((wanted * weights).sum(), [slow[name] for name in names])
    assert_equal_gradients(dict(zip(names, gradients, strict=True)), dict(zip(names, literally, strict=True)))


def test_only_a_scaled_start_divides_the_output(backbone: Backbone) -> None:
    scaled, classes = method(), name_features(backbone, NAMES)
    theta = some_theta(scaled)
    wanted = scaled.context_of(theta, classes) * math.sqrt(backbone.d_t)
    for start in ("xavier", "normal"):
        assert torch.allclose(method(start=start).context_of(theta, classes), wanted, atol=1e-5)


def literal_training(context: ClientContext, start: Tensors, feedforward: str) -> Tensors:
    """E epochs of Algorithm 1 with SGD by hand, the class names' features taken anew in every step."""
    training, names = context.training, context.class_names
    sizes = [value.numel() for value in start.values()]
    draws = generator(context.seed, context.round, context.phase, context.client, "batches")
    orders = list(batches(len(context.train), training.batch_size, training.epochs, draws))

    def parts(row: Tensor) -> Tensors:
        split = torch.split(row, sizes)
        return {name: value.view_as(start[name]) for name, value in zip(start, split, strict=True)}

    def gradient(row: Tensor, step: int) -> Tensor:
        row, rows = row.clone().requires_grad_(), orders[step]
        prompt = literal_context(parts(row), literal_names(context.backbone, names), 4, feedforward)
        features, labels = context.train.features()[rows], context.train.labels[rows]
        loss = literal.context_loss(context.backbone, prompt, list(names), features, labels)
        return torch.autograd.grad(loss, row)[0]

    rate = learning_rate(training, context.round, context.rounds)
    whole = torch.cat([value.flatten() for value in start.values()])
    return parts(literal.sgd(whole, gradient, len(orders), rate, training.momentum, training.weight_decay))


@pytest.mark.parametrize("feedforward", FORMS)
def test_training_equals_the_equations(feedforward: str, backbone: Backbone, make_context: Make) -> None:
    context = make_context(
        5, round=2, batch_size=3, learning_rate=0.05, momentum=0.9, weight_decay=1e-3, schedule="cosine"
    )
    tried = method(feedforward=feedforward)
    start = some_theta(tried)
    result, wanted = tried.train(context, start, {}), literal_training(context, start, feedforward)
    assert result.private == {}
    moved = {name: value - start[name] for name, value in result.update.items()}
    assert_equal_gradients(moved, {name: value - start[name] for name, value in wanted.items()}, start)


def test_gradients_equal_the_equations_at_77_tokens(wide_backbone: Backbone, make_context: Make) -> None:
    backbone = wide_backbone
    context = wide_step(make_context, backbone, torch.Generator().manual_seed(4))
    tried = method(m=16)
    start = some_theta(tried, backbone.d_t, backbone.d_e)
    result = tried.train(context, start, {})
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    prompt = literal_context(leaves, literal_names(backbone, NAMES), 4, "relu")
    loss = literal.context_loss(backbone, prompt, list(NAMES), context.train.features(), context.train.labels)
    assert result.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    # At a rate of 1 without momentum a step is the gradient.
    assert_equal_gradients({name: start[name] - value for name, value in result.update.items()}, wanted)


@pytest.mark.parametrize("feedforward", FORMS)
def test_the_order_of_the_classes_does_not_matter(feedforward: str, backbone: Backbone, make_context: Make) -> None:
    tried = method(feedforward=feedforward)
    theta, context = some_theta(tried), make_context()
    order = [3, 0, 4, 2, 1]
    shuffled = replace(
        context,
        class_names=tuple(NAMES[index] for index in order),
        train=MadeUpSplit(context.train.features(), torch.tensor([order.index(int(y)) for y in context.train.labels])),
    )
    one = tried.context_of(theta, name_features(backbone, context.class_names))
    other = tried.context_of(theta, name_features(backbone, shuffled.class_names))
    assert float((one - other).abs().max()) <= 1e-5 * max(1.0, float(one.abs().max()))
    rows = torch.arange(10)
    scores = tried.classifier(context, theta, {}).logits(context.train, rows)
    again = tried.classifier(shuffled, theta, {}).logits(context.train, rows)
    assert float((scores[:, order] - again).abs().max()) <= 1e-5 * float(scores.abs().max())
    first, second = (tried.train(one, theta, {}).update for one in (context, shuffled))
    for name, value in first.items():
        assert float((value - second[name]).abs().max()) <= 1e-5


def test_clients_have_class_sets_of_their_own_and_one_generator(backbone: Backbone, make_context: Make) -> None:
    """Sets of other names and sizes train the same tensors, whose mean is uniform."""
    tried = method()
    theta, updates = some_theta(tried), []
    for name, own in [("a", NAMES[:2]), ("b", NAMES[2:])]:
        context = make_context(6)
        labels = torch.arange(6) % len(own)
        context = replace(context, client=name, class_names=own, train=MadeUpSplit(context.train.features(), labels))
        updates.append(ClientUpdate(name, 0.5, tried.train(context, theta, {}).update))
    (phase,) = tried.phases(1, 4)
    merged = tried.aggregate(theta, phase, iter(updates), weighted_mean, server_context())
    assert set(merged) == set(theta)
    for name, value in merged.items():
        first, second = (update.tensors[name] for update in updates)
        assert torch.equal(value, ((first.double() + second.double()) / 2).float())
        assert name == "to_key.bias" or not torch.equal(first, second)
    assert tried.label_space(NAMES, NAMES[:2]) == NAMES[:2], "a client's softmax is over its own classes"


def test_prompts_depend_on_the_classes_and_are_the_same_wherever_they_are_made(
    backbone: Backbone, make_context: Make
) -> None:
    tried = method()
    theta = some_theta(tried)
    features = name_features(backbone, NAMES)
    made = tried.context_of(theta, features)
    assert torch.equal(made, tried.context_of(theta, features))
    novel = tried.context_of(theta, name_features(backbone, ("paintbrush", "anvil")))
    assert novel.shape == made.shape
    assert float((novel - made).abs().max()) > 1e-3
    context = make_context()
    with torch.no_grad():
        text = backbone.encode_prompts(made, backbone.class_prompts(NAMES, 3))
    wanted = backbone.logit_scale * context.train.features() @ text.T
    found = tried.classifier(context, theta, {}).logits(context.train, torch.arange(10))
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_names_are_encoded_bare_and_once(
    backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[list[str]] = []
    encode_text = Backbone.encode_text

    def counted(self: Backbone, names: list[str], **options: Any) -> Tensor:
        texts.append(names)
        return encode_text(self, names, **options)

    monkeypatch.setattr(Backbone, "encode_text", counted)
    tried, context = method(), replace(make_context(6), class_names=("big_sun", "small moon"))
    context = replace(context, train=MadeUpSplit(context.train.features(), torch.arange(6) % 2))
    theta = some_theta(tried)
    for round in (1, 2):
        theta = tried.train(replace(context, round=round), theta, {}).update
        tried.classifier(context, theta, {})
    assert texts == [["big sun", "small moon"]]


@pytest.mark.parametrize("start", ["scaled", "normal"])
def test_contexts_start_near_the_size_of_word_embeddings(start: str, backbone: Backbone) -> None:
    for feedforward in FORMS:
        tried = method(m=4, feedforward=feedforward, start=start)
        theta = tried.initial_state(server_context(), initial_draws(0))
        made = tried.context_of(theta, name_features(backbone, NAMES))
        assert 0.01 < float(made.std()) < 0.08
        assert float(theta["queries"].std()) == pytest.approx(0.02, rel=0.1)
        again = tried.initial_state(server_context(), initial_draws(0))
        assert all(torch.equal(theta[name], again[name]) for name in theta)


@pytest.mark.parametrize(("feedforward", "widths"), [("relu", (112, 112)), ("geglu", (896, 448))])
def test_shapes(feedforward: str, widths: tuple[int, int]) -> None:
    tried = method(m=4, feedforward=feedforward)
    theta = tried.initial_state(server_context(), initial_draws(0))
    assert (theta["widen.weight"].shape[0], theta["narrow.weight"].shape[1]) == widths
    assert theta["to_key.weight"].shape == (112, 96)
    assert theta["queries"].shape == (4, 112)


def test_what_does_not_fit_the_backbone_is_refused() -> None:
    with pytest.raises(MethodError, match="5 heads do not divide the text tower's width of 112"):
        method(heads=5).dims(server_context())
    with pytest.raises(MethodError, match="at most m = 29"):
        method(m=30).dims(server_context())
    bare = replace(server_context(), shape=BackboneShape(d_e=96))
    with pytest.raises(MethodError, match="needs a text tower"):
        method().dims(bare)


def pairwise(vectors: Tensor) -> float:
    """The mean cosine of all pairs, one pair at a time."""
    pairs = [(a, b) for i, a in enumerate(vectors) for b in vectors[:i]]
    return sum(float(torch.dot(a, b) / (a.norm() * b.norm())) for a, b in pairs) / len(pairs)


def test_the_vectors_of_a_task_differ_from_the_start(backbone: Backbone) -> None:
    """With weights of N(0, 0.02²) they are one vector m times; Xavier's draws, scaled or not, tell them apart."""
    classes = name_features(backbone, NAMES)
    alike = {}
    for kind in ("normal", "xavier", "scaled"):
        tried = method(m=4, start=kind)
        made = tried.context_of(tried.initial_state(server_context(), initial_draws(3)), classes)
        alike[kind] = pairwise(made)
        assert fedtpg.mean_cosine(made) == pytest.approx(alike[kind], abs=1e-6)
    assert alike["normal"] > 0.999
    assert alike["xavier"] < 0.98
    assert alike["scaled"] == pytest.approx(alike["xavier"], abs=1e-5), "the same vectors, shorter"


def test_a_scaled_step_moves_the_context_as_far_as_a_learned_one(backbone: Backbone) -> None:
    """One step of the layers that make the context, against the same step of the context itself."""
    tried, classes = method(m=4), name_features(backbone, NAMES)
    theta = {
        name: value.requires_grad_() for name, value in tried.initial_state(server_context(), initial_draws(3)).items()
    }
    made, wanted = (
        tried.context_of(theta, classes),
        torch.randn(4, backbone.d_t, generator=torch.Generator().manual_seed(1)),
    )
    (made * wanted).sum().backward()  # the gradient of the context is `wanted`
    stepped = {
        name: value.detach() - 0.01 * (value.grad if name in fedtpg.OUTPUTS else 0) for name, value in theta.items()
    }
    moved = tried.context_of(stepped, classes) - made.detach()
    assert 0.3 < float(moved.norm() / (0.01 * wanted).norm()) < 3


def test_a_client_reports_how_alike_its_vectors_are(make_context: Make, backbone: Backbone) -> None:
    tried, context = method(m=4), make_context(6, learning_rate=0.1)
    result = tried.train(context, tried.initial_state(server_context(), initial_draws(3)), {})
    made = tried.context_of(result.update, name_features(backbone, NAMES))
    assert result.metrics["context_cosine"] == pytest.approx(pairwise(made), abs=1e-5)
    assert set(result.metrics) <= set(tried.metrics), "what a method does not declare never leaves its client"
    single = method(m=1)
    alone = single.train(context, single.initial_state(server_context(), initial_draws(3)), {})
    assert "context_cosine" not in alone.metrics


def test_xavier_draws_have_xavier_s_bounds() -> None:
    state = method(start="xavier").initial_state(server_context(), initial_draws(3))
    for name in ("to_query", "to_key", "to_output", "widen"):
        weight = state[f"{name}.weight"]
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.95 * bound < float(weight.abs().max()) <= bound
    assert float(state["queries"].std()) == pytest.approx(0.02, rel=0.15)


def test_each_nonlinearity_has_a_width() -> None:
    assert set(fedtpg.WIDTHS) == set(FORMS)
