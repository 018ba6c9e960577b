"""FedPGP and FedTPG against their equations written out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import fedpgp, fedtpg, make_method
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.text_features import name_features
from promptfed.shared.methods.fedpgp import FedPGP
from promptfed.shared.methods.fedtpg import FedTPG
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit, Make
from tests.support import literal
from tests.support.equality import assert_moved_equally

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
    context: pf.ClientContext, p_global: Tensor, p_personal: Tensor, rows: Tensor, hyper: fedpgp.FedPGPHyper
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


def paper_loss(context: pf.ClientContext, hyper: fedpgp.FedPGPHyper) -> literal.Loss:
    """Of all that a task of Algorithm 1 trains."""

    def loss(now: Tensors, rows: Tensor) -> Tensor:
        p_global = now["global_context"]
        personal = p_global + now["D"] if "D" in now else literal_product(p_global, now["U"], now["V"])
        return literal_loss(context, p_global, personal, rows, hyper)

    return loss


def literal_product(p_global: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """p_G + U·V (Eq. 10), one row and one rank at a time."""
    rows = []
    for i in range(len(p_global)):
        row = p_global[i]
        for k in range(len(v)):
            row = row + u[i, k] * v[k]
        rows.append(row)
    return torch.stack(rows)


OPTIONS = [
    {}, {"mu": 3.0, "tau_con": 0.2}, {"pairs": "positive_only"}, {"pairs": "negative_only"}, {"full_rank": True},
    {"mu": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_equals_the_equations(options: dict[str, Any], backbone: Backbone, make_context: Make) -> None:
    context = make_context(
        5, round=2, epochs=1, batch_size=3, learning_rate=0.05, momentum=0.9, weight_decay=5e-4, schedule="cosine"
    )
    tried = method(**options)
    start = {"global_context": global_context(backbone)} | tried.adaptation(context, {})
    result = tried.train(context, {"global_context": start["global_context"]}, {})
    assert set(result.update) == {"global_context"}
    wanted = literal.training(context, start, paper_loss(context, tried.hyper))
    assert_moved_equally(result.update | result.private, wanted, start)


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


def test_beside_the_templates_words_the_start_is_everybodys(backbone: Backbone, make_context: Make) -> None:
    """The adaptation is zero, and its first gradient is not; no draw of a client's or a seed's decides the end."""
    context = make_context()
    tried = make_method({"name": "fedpgp"})
    assert isinstance(tried, FedPGP)
    starts = [tried.adaptation(replace(context, client=name), {}) for name in ("hospital-a", "hospital-b")]
    starts.append(tried.adaptation(context.with_terms(seed=7), {}))
    assert all(torch.equal(starts[0]["U"], start["U"]) for start in starts)
    assert not starts[0]["V"].any()
    assert float(starts[0]["U"].abs().min()) > 0


def test_classifies_with_the_personal_context(backbone: Backbone, make_context: Make) -> None:
    tried, payload, rows = method(), {"global_context": global_context(backbone)}, torch.arange(4)
    context = make_context()
    trained = tried.train(context.with_terms(training=TrainingSpec(learning_rate=0.5)), payload, {}).private

    def scores(context: pf.ClientContext, private: Tensors) -> Tensor:
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
    server = pf.ServerContext(TrainingSpec(), BackboneShape(d_t=24, d_e=8, context_length=77), NAMES, (), 3, 4)
    narrow = replace(server, shape=BackboneShape(d_t=24, d_e=8, context_length=18))
    with pytest.raises(pf.MethodError, match="at most m = 15"):
        tried.dims(narrow)


# FedTPG against the equations of its paper written out: the generator number by number, one class at a time.


FORMS = ("relu", "geglu")


def method_of_fedtpg(**hyper: Any) -> FedTPG:
    made = make_method({"name": "fedtpg", "m": 3} | hyper)
    assert isinstance(made, FedTPG)
    return made


def server_context(d_t: int = 112, d_e: int = 96) -> pf.ServerContext:
    shape = BackboneShape(d_t=d_t, d_e=d_e, context_length=32)
    return pf.ServerContext(TrainingSpec(), shape, None, (), seed=3, rounds=4)


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
    tried = method_of_fedtpg(feedforward=feedforward, heads=heads)
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
    scaled, classes = method_of_fedtpg(), name_features(backbone, NAMES)
    theta = some_theta(scaled)
    wanted = scaled.context_of(theta, classes) * math.sqrt(backbone.d_t)
    for start in ("xavier", "normal"):
        assert torch.allclose(method_of_fedtpg(start=start).context_of(theta, classes), wanted, atol=1e-5)


def generated_loss(context: pf.ClientContext, feedforward: str) -> literal.Loss:
    """Of the generated context, the class names' features taken anew in every step."""
    plain = literal.plain_loss(context)

    def loss(theta: Tensors, rows: Tensor) -> Tensor:
        classes = literal_names(context.backbone, context.class_names)
        return plain({"context": literal_context(theta, classes, 4, feedforward)}, rows)

    return loss


@pytest.mark.parametrize("feedforward", FORMS)
def test_training_equals_the_equations_of_fedtpg(feedforward: str, backbone: Backbone, make_context: Make) -> None:
    context = make_context(
        5, round=2, batch_size=3, learning_rate=0.05, momentum=0.9, weight_decay=1e-3, schedule="cosine"
    )
    tried = method_of_fedtpg(feedforward=feedforward)
    start = some_theta(tried)
    result, wanted = (
        tried.train(context, start, {}),
        literal.training(context, start, generated_loss(context, feedforward)),
    )
    assert result.private == {}
    moved = {name: value - start[name] for name, value in result.update.items()}
    assert_equal_gradients(moved, {name: value - start[name] for name, value in wanted.items()}, start)


def test_prompts_depend_on_the_classes_and_not_on_where_they_are_made(backbone: Backbone, make_context: Make) -> None:
    tried = method_of_fedtpg()
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


def test_names_are_encoded_bare_once(backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[list[str]] = []
    encode_text = Backbone.encode_text

    def counted(self: Backbone, names: list[str], **options: Any) -> Tensor:
        texts.append(names)
        return encode_text(self, names, **options)

    monkeypatch.setattr(Backbone, "encode_text", counted)
    tried, context = method_of_fedtpg(), replace(make_context(6), class_names=("big_sun", "small moon"))
    context = replace(context, train=MadeUpSplit(context.train.features(), torch.arange(6) % 2))
    theta = some_theta(tried)
    for round in (1, 2):
        theta = tried.train(replace(context, round=round), theta, {}).update
        tried.classifier(context, theta, {})
    assert texts == [["big sun", "small moon"]]


@pytest.mark.parametrize("start", ["scaled", "normal"])
def test_contexts_start_near_the_size_of_word_embeddings(start: str, backbone: Backbone) -> None:
    for feedforward in FORMS:
        tried = method_of_fedtpg(m=4, feedforward=feedforward, start=start)
        theta = tried.initial_state(server_context(), initial_draws(0))
        made = tried.context_of(theta, name_features(backbone, NAMES))
        assert 0.01 < float(made.std()) < 0.08
        assert float(theta["queries"].std()) == pytest.approx(0.02, rel=0.1)
        again = tried.initial_state(server_context(), initial_draws(0))
        assert all(torch.equal(theta[name], again[name]) for name in theta)


@pytest.mark.parametrize(("feedforward", "widths"), [("relu", (112, 112)), ("geglu", (896, 448))])
def test_shapes(feedforward: str, widths: tuple[int, int]) -> None:
    tried = method_of_fedtpg(m=4, feedforward=feedforward)
    theta = tried.initial_state(server_context(), initial_draws(0))
    assert (theta["widen.weight"].shape[0], theta["narrow.weight"].shape[1]) == widths
    assert theta["to_key.weight"].shape == (112, 96)
    assert theta["queries"].shape == (4, 112)


def test_what_does_not_fit_the_backbone_is_refused() -> None:
    with pytest.raises(pf.MethodError, match="5 heads do not divide the text tower's width of 112"):
        method_of_fedtpg(heads=5).dims(server_context())
    with pytest.raises(pf.MethodError, match="at most m = 29"):
        method_of_fedtpg(m=30).dims(server_context())
    bare = replace(server_context(), shape=BackboneShape(d_e=96))
    with pytest.raises(pf.MethodError, match="needs a text tower"):
        method_of_fedtpg().dims(bare)


def pairwise(vectors: Tensor) -> float:
    """The mean cosine of all pairs, one pair at a time."""
    pairs = [(a, b) for i, a in enumerate(vectors) for b in vectors[:i]]
    return sum(float(torch.dot(a, b) / (a.norm() * b.norm())) for a, b in pairs) / len(pairs)


def test_the_vectors_of_a_task_differ_from_the_start(backbone: Backbone) -> None:
    """With weights of N(0, 0.02²) they are one vector m times; Xavier's draws, scaled or not, tell them apart."""
    classes = name_features(backbone, NAMES)
    alike = {}
    for kind in ("normal", "xavier", "scaled"):
        tried = method_of_fedtpg(m=4, start=kind)
        made = tried.context_of(tried.initial_state(server_context(), initial_draws(3)), classes)
        alike[kind] = pairwise(made)
        assert fedtpg.mean_cosine(made) == pytest.approx(alike[kind], abs=1e-6)
    assert alike["normal"] > 0.999
    assert alike["xavier"] < 0.98
    assert alike["scaled"] == pytest.approx(alike["xavier"], abs=1e-5), "the same vectors, shorter"


def test_a_client_reports_how_alike_its_vectors_are(make_context: Make, backbone: Backbone) -> None:
    tried, context = method_of_fedtpg(m=4), make_context(6, learning_rate=0.1)
    result = tried.train(context, tried.initial_state(server_context(), initial_draws(3)), {})
    made = tried.context_of(result.update, name_features(backbone, NAMES))
    assert result.metrics["context_cosine"] == pytest.approx(pairwise(made), abs=1e-5)
    assert set(result.metrics) <= set(tried.metrics), "what a method does not declare never leaves its client"
    single = method_of_fedtpg(m=1)
    alone = single.train(context, single.initial_state(server_context(), initial_draws(3)), {})
    assert "context_cosine" not in alone.metrics


def test_xavier_draws_have_xavier_s_bounds() -> None:
    state = method_of_fedtpg(start="xavier").initial_state(server_context(), initial_draws(3))
    for name in ("to_query", "to_key", "to_output", "widen"):
        weight = state[f"{name}.weight"]
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.95 * bound < float(weight.abs().max()) <= bound
    assert float(state["queries"].std()) == pytest.approx(0.02, rel=0.15)
