"""pFedMoAP and Prompt+AMP: whose contexts go to whom, and their losses against the equations written out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, pfedmoap, resolve_spec
from promptfed.shared.methods.core.client_rows import ClientRowsMethod
from promptfed.shared.methods.core.interface import ClientContext, ClientInfo, ClientUpdate, MethodError, ServerContext
from promptfed.shared.methods.pfedmoap import Gate, PFedMoAP, PFedMoAPHyper
from promptfed.shared.methods.promptfl import PromptFLAMP, mixing_weights
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, SpecError, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, Make
from tests.shared.methods.test_text_baselines import start_context
from tests.support import literal
from tests.support.equality import assert_moved_equally

M = 4


def moap(**hyper: Any) -> PFedMoAP:
    made = make_method({"name": "pfedmoap", "m": M} | hyper)
    assert isinstance(made, PFedMoAP)
    return made


def amp(**hyper: Any) -> PromptFLAMP:
    made = make_method({"name": "promptfl_amp", "m": M} | hyper)
    assert isinstance(made, PromptFLAMP)
    return made


def roster(*names: str, inactive: tuple[str, ...] = (), evaluators: tuple[str, ...] = ()) -> ServerContext:
    clients = tuple(
        ClientInfo(name, "evaluator" if name in evaluators else "trainer", 1, NAMES, active=name not in inactive)
        for name in sorted(names)
    )
    shape = BackboneShape(d_t=2, d_e=16, context_length=77)
    return ServerContext(TrainingSpec(), shape, NAMES, clients, seed=3, rounds=4)


def pool(rows: list[list[float]], answered: list[int] | None = None) -> Tensors:
    """A state of contexts of one vector of two numbers."""
    return {
        "context": torch.tensor([[9.0, 9.0]]),
        "client_contexts": torch.tensor(rows).unsqueeze(1),
        "answered": torch.tensor(answered or [1] * len(rows)),
    }


def of(context: ServerContext, name: str) -> ClientInfo:
    return next(client for client in context.clients if client.name == name)


FOUR = pool([[0, 0], [3, 0], [0, 1], [5, 5]])


def test_the_nearest_contexts_of_others_are_the_experts() -> None:
    context = roster("a", "b", "c", "d")
    payload = moap(m=1, experts=1).payload(FOUR, None, of(context, "a"), context)
    assert payload["experts"].tolist() == [[[0.0, 1.0]]]
    assert payload["context"].tolist() == [[9.0, 9.0]]
    two = moap(m=1, experts=2).payload(FOUR, None, of(context, "d"), context)["experts"]
    assert two.tolist() == [[[3.0, 0.0]], [[0.0, 1.0]]]
    all_of_them = moap(m=1, experts=9).payload(FOUR, None, of(context, "a"), context)["experts"]
    assert len(all_of_them) == 3, "one's own is never among them"


def test_ties_go_by_name() -> None:
    context = roster("a", "b", "c", "d")
    state = pool([[0, 0], [0, 1], [1, 0], [0, -1]])
    found = moap(m=1, experts=2).payload(state, None, of(context, "a"), context)["experts"]
    assert found.tolist() == [[[0.0, 1.0]], [[1.0, 0.0]]]


def test_who_gets_no_experts_and_whose_context_is_none() -> None:
    names = ("a", "b", "c", "d")
    tried = moap(m=1)
    context = roster(*names, inactive=("c",))
    found = tried.payload(FOUR, None, of(context, "a"), context)["experts"]
    assert found.tolist() == [[[3.0, 0.0]], [[5.0, 5.0]]], "a withdrawn client's row goes to nobody"
    silent = pool([[0, 0], [3, 0], [0, 0], [5, 5]], [1, 2, 0, 2])
    context = roster(*names)
    assert tried.payload(silent, None, of(context, "c"), context)["experts"].shape == (0, 1, 2)
    assert len(tried.payload(silent, None, of(context, "a"), context)["experts"]) == 2
    context = roster(*names, evaluators=("d",))
    assert tried.payload(FOUR, None, of(context, "d"), context)["experts"].shape == (0, 1, 2)
    stranger = ClientInfo("nobody", "evaluator", 0, ())
    assert tried.payload(FOUR, None, stranger, replace(context, clients=()))["experts"].shape == (0, 1, 2)


@pytest.mark.parametrize("kind", [moap, amp])
def test_rows_come_stay_and_go(kind: Callable[..., ClientRowsMethod]) -> None:
    tried = kind(m=1)
    context = roster("a", "c")
    state = tried.initial_state(context, initial_draws(3))
    assert (tuple(state["client_contexts"].shape), state["answered"].tolist()) == ((2, 1, 2), [0, 0])
    (phase,) = tried.phases(1, 4)
    assert not phase.mean
    updates = [ClientUpdate("c", 1.0, {"context": torch.tensor([[1.0, 2.0]])})]

    def mean(given: Any) -> Tensors:
        return {"context": sum(update.weight * update.tensors["context"] for update in given)}

    after = tried.aggregate(state, phase, updates, mean, context)
    assert after["answered"].tolist() == [0, 1]
    assert after["client_contexts"].tolist() == [[[0, 0]], [[1, 2]]]
    wider = roster("a", "b", "c")
    joined = tried.join(after, of(wider, "b"), wider)
    assert joined["answered"].tolist() == [0, 0, 1]
    assert joined["client_contexts"].tolist() == [[[0, 0]], [[0, 0]], [[1, 2]]]
    again = tried.aggregate(joined, phase, [replace(updates[0], client="a")], mean, wider)
    assert again["answered"].tolist() == [2, 0, 1]
    forgotten = tried.forget(again, of(wider, "c"), wider)
    assert forgotten["answered"].tolist() == [2, 0, 0]
    assert forgotten["client_contexts"][2].tolist() == [[0, 0]]
    assert again["answered"].tolist() == [2, 0, 1], "states are not changed in place"
    assert tried.forget(forgotten, of(wider, "c"), wider) is forgotten
    assert not tried.one_payload
    text = " ".join(one.what for one in tried.disclosures if one.to == "sites")
    assert "this client's last" in text
    assert "two sites" in text


def test_pfedmoaps_context_is_the_mean_and_amps_stays_the_start() -> None:
    context = roster("a", "b")
    updates = [
        ClientUpdate(name, 0.5, {"context": torch.tensor([[value, 0.0]])}) for name, value in (("a", 1.0), ("b", 3.0))
    ]

    def mean(given: Any) -> Tensors:
        return {"context": sum(update.weight * update.tensors["context"] for update in given)}

    for tried, wanted in ((moap(m=1), 2.0), (amp(m=1), 9.0)):
        (phase,) = tried.phases(1, 4)
        state = pool([[0, 0], [0, 0]], [0, 0])
        assert float(tried.aggregate(state, phase, iter(updates), mean, context)["context"][0, 0]) == wanted


# pFedMoAP's gate


def literal_logits(
    image: Tensor, texts: list[list[Tensor]], gate: Tensors, hyper: PFedMoAPHyper, scale: float
) -> Tensor:
    """(3.1) and (3.2) of one image; ``texts[e][c]``, the own context's first; heads, experts and entries one by one."""
    g = len(gate["query.bias"])
    width = g // hyper.heads

    def pi(vector: Tensor) -> Tensor:
        return torch.stack([vector[i * len(vector) // g] for i in range(g)])

    def linear(part: str, vector: Tensor) -> Tensor:
        return torch.stack([torch.dot(row, vector) for row in gate[f"{part}.weight"]]) + gate[f"{part}.bias"]

    query, scores = linear("query", pi(image)), []
    for c in range(len(texts[0])):
        keys = [linear("key", pi(texts[e][c])) for e in range(len(texts))]
        values = [linear("value", pi(texts[e][c])) for e in range(len(texts))]
        parts = []
        for head in range(hyper.heads):
            span = slice(head * width, (head + 1) * width)
            raw = torch.stack([hyper.gate_scaling * torch.dot(query[span], key[span]) for key in keys])
            shares = torch.exp(raw - raw.max()) / torch.exp(raw - raw.max()).sum()
            parts.append(sum(shares[e] * values[e][span] for e in range(len(texts))))
        mixed, feature = linear("output", torch.cat(parts)), pi(image)
        scores.append(torch.dot(feature, mixed) + hyper.local_weight * torch.dot(image, texts[0][c]))
    return scale * torch.stack(scores)


def test_the_gate_by_hand() -> None:
    hyper = PFedMoAPHyper(heads=1, gate_width=2)
    parameters = {f"{part}.weight": torch.eye(2) for part in ("query", "key", "value", "output")}
    parameters |= {f"{part}.bias": torch.zeros(2) for part in ("query", "key", "value", "output")}
    texts = torch.tensor([[[0.6, 0.8]], [[1.0, 0.0]]])
    gate = Gate(parameters, hyper, scale=1.0)
    image = torch.tensor([[1.0, 0.0]])
    own, other = math.exp(6) / (math.exp(6) + math.exp(10)), math.exp(10) / (math.exp(6) + math.exp(10))
    assert (own, other) == (pytest.approx(0.017986, abs=1e-6), pytest.approx(0.982014, abs=1e-6))
    assert float(image[0] @ gate.mixed(image, texts)[0, 0]) == pytest.approx(0.992806, abs=1e-6)
    assert float(gate.logits(image, texts)) == pytest.approx(1.292806, abs=1e-6)


def gated(backbone: Backbone, make_context: Make, **hyper: Any) -> tuple[PFedMoAP, ClientContext, Tensors, Tensors]:
    context = make_context(5, epochs=1, batch_size=3, learning_rate=0.05)
    tried = moap(gate_width=16, heads=4, **hyper)
    draws = torch.Generator().manual_seed(6)
    experts = torch.randn(3, M, backbone.d_t, generator=draws) * 0.05
    gate = {f"gate.{name}": value for name, value in tried._gate(context, {}).parameters.items()}
    return tried, context, {"context": start_context(backbone), "experts": experts}, gate


@pytest.mark.parametrize("options", [{}, {"local_weight": 0.0, "gate_scaling": 3.0}], ids=str)
def test_training_of_experts_is_the_equations(options: dict[str, Any], backbone: Backbone, make_context: Make) -> None:
    tried, context, payload, gate = gated(backbone, make_context, gate_learning_rate=0.05, **options)
    with torch.no_grad():
        others = [[literal.text_feature(backbone, expert, name) for name in NAMES] for expert in payload["experts"]]

    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        own = [literal.text_feature(backbone, tensors["context"], name) for name in NAMES]
        parameters = {name.removeprefix("gate."): value for name, value in tensors.items() if name != "context"}
        losses = []
        for row in rows.tolist():
            image = context.train.features()[row]
            logits = literal_logits(image, [own, *others], parameters, tried.hyper, backbone.logit_scale)
            losses.append(literal.cross_entropy(logits, int(context.train.labels[row])))
        return torch.stack(losses).mean()

    start = {"context": payload["context"], **gate}
    found = tried.train(context, payload, gate)
    assert set(found.update) == {"context"}
    wanted = literal.training(context, start, loss, 0.05)
    moved = {name: value for name, value in found.private.items() if name != "own_context"}
    for name, value in {**found.update, **moved}.items():
        scale = float((wanted[name] - start[name]).abs().max())
        # The gate's numbers, of 0.25 at most, are rounded to 1.5e-8 each time that they move. A key's bias shifts the
        # scores of all experts alike, and has no gradient.
        assert scale > 1e-5 or name == "gate.key.bias"
        assert float((value - wanted[name]).abs().max()) <= 1e-4 * scale + 6e-8, name
    assert torch.equal(found.private["own_context"], found.update["context"])


def test_the_gate_has_a_rate_of_its_own_which_no_cosine_scales(backbone: Backbone, make_context: Make) -> None:
    tried, context, payload, gate = gated(backbone, make_context, gate_learning_rate=0.05)
    plain = context.with_terms(training=TrainingSpec(batch_size=5, momentum=0.0, weight_decay=0.0, learning_rate=1e-9))
    cosine = plain.training.model_copy(update={"schedule": "cosine"})
    last = replace(plain.with_terms(training=cosine), round=4)
    first, second = (tried.train(one, payload, gate).private["gate.value.weight"] for one in (plain, last))
    assert not torch.allclose(first, gate["gate.value.weight"], atol=1e-6)
    assert torch.allclose(first, second, atol=1e-7)


def test_who_classifies_with_what(backbone: Backbone, make_context: Make) -> None:
    tried, context, payload, gate = gated(backbone, make_context)
    rows, own = torch.arange(5), payload["context"] + 0.01
    none = payload | {"experts": payload["experts"][:0]}

    def plain(vectors: Tensor) -> Tensor:
        with torch.no_grad():
            texts = torch.stack([literal.text_feature(backbone, vectors, name) for name in NAMES])
        return backbone.logit_scale * context.train.features()[rows] @ texts.T

    with torch.no_grad():
        texts = [[literal.text_feature(backbone, one, name) for name in NAMES] for one in (own, *payload["experts"])]
    bare = {name.removeprefix("gate."): value for name, value in gate.items()}
    mixed = torch.stack(
        [literal_logits(image, texts, bare, tried.hyper, backbone.logit_scale) for image in context.train.features()]
    )
    for given, private, wanted in [
        (payload, {"own_context": own, **gate}, mixed),
        (payload, {"own_context": own}, plain(own)),  # trained once, without experts
        (none, {"own_context": own, **gate}, plain(own)),
        (none, {}, plain(payload["context"])),  # an evaluator, and who has not trained yet
    ]:
        found = tried.classifier(context, given, private).logits(context.train, rows)
        assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())


@pytest.mark.parametrize(("images", "parts"), [(5.0, [5]), (4.9, [4, 1]), (2.0, [2, 2, 1]), (0.9, [1] * 5)])
def test_as_many_images_as_fit_are_weighed_at_once(
    images: float, parts: list[int], backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, context, payload, gate = gated(backbone, make_context)
    whole, sizes, logits = tried.classifier(context, payload, gate), list[int](), Gate.logits

    def counted(gate: Gate, features: Tensor, texts: Tensor) -> Tensor:
        sizes.append(len(features))
        return logits(gate, features, texts)

    monkeypatch.setattr(Gate, "logits", counted)
    monkeypatch.setattr(pfedmoap, "MOST_ENTRIES", int(images * len(NAMES) * len(gate["gate.query.bias"])))
    found = tried.classifier(context, payload, gate).logits(context.train, torch.arange(5))
    assert sizes == parts
    torch.testing.assert_close(found, whole.logits(context.train, torch.arange(5)))


def test_what_pfedmoap_sends_trains_and_says(caplog: pytest.LogCaptureFixture) -> None:
    shape = BackboneShape(d_t=512, d_e=512, context_length=77)
    context = replace(roster("a", "b"), shape=shape)
    tried = make_method({"name": "pfedmoap"})
    (phase,) = tried.phases(1, 10)
    dims = tried.dims(context) | {"E": 9}  # at most so many: whoever has not answered yet gets none

    def size(specs: Any) -> int:
        return sum(torch.Size(spec.resolve(dims)).numel() * 4 for spec in specs)

    assert (size(phase.down), size(phase.up)) == (81_920, 8_192)
    spec = resolve_spec({"name": "x", "method": {"name": "pfedmoap"}, "backbone": {"model": "ViT-B-16"}})
    training = spec.training
    assert (spec.rounds, training.epochs, training.batch_size, training.learning_rate) == (10, 5, 16, 0.002)
    with caplog.at_level(logging.WARNING):
        tried.check_clients(replace(context, clients=context.clients[:1]))
        tried.check_clients(context)
    assert caplog.text.count("has no experts") == 1
    with pytest.raises(MethodError, match="a gate of width 128 cannot have 7 heads"):
        make_method({"name": "pfedmoap", "heads": 7}).dims(context)
    for name in ("pfedmoap", "promptfl_amp"):
        for given in ({"rule": "median"}, {"clip_norm": 1.0}):
            with pytest.raises(SpecError, match="cannot take the mean's place"):
                resolve_spec({"name": "x", "method": {"name": name}, "aggregation": given})


# Prompt+AMP


def test_the_mixture_by_hand() -> None:
    rows = torch.tensor([[0.0, 0], [1, 0], [0, 2]])
    weights = mixing_weights(rows, 2.0)
    wanted = torch.tensor([0.752711, 0.202177, 0.045112], dtype=torch.float64)
    assert torch.allclose(weights[0], wanted, atol=1e-6)
    assert torch.allclose(weights.sum(1), torch.ones(3, dtype=torch.float64))
    context = roster("a", "b", "c")
    state = pool(rows.tolist())
    found = amp(m=1, sigma=2.0).payload(state, None, of(context, "a"), context)["message"]
    assert torch.allclose(found, torch.tensor([[0.202177, 0.090224]]), atol=1e-6)


def test_equal_contexts_mix_to_themselves_and_far_ones_stay_apart() -> None:
    same = torch.ones(4, 3)
    for sigma in (None, 3.0):
        assert torch.allclose(mixing_weights(same, sigma), torch.full((4, 4), 0.25, dtype=torch.float64))
    far = mixing_weights(torch.tensor([[0.0], [100.0], [-100.0]]), 1.0)
    assert torch.allclose(far, torch.eye(3, dtype=torch.float64))
    assert mixing_weights(torch.ones(1, 3), None).tolist() == [[1.0]]


def test_the_default_sigma_is_the_median_of_the_squared_distances() -> None:
    rows = torch.tensor([[0.0], [1], [3]])  # squared distances 1, 9, 4
    weights = mixing_weights(rows, None)
    assert float(weights[0, 1]) == pytest.approx(math.exp(-1 / 4) / 3)
    assert float(weights[0, 2]) == pytest.approx(math.exp(-9 / 4) / 3)


def test_who_gets_which_mixture() -> None:
    context = roster("a", "b", "c", "d", inactive=("d",), evaluators=("c",))
    tried = amp(m=1)
    state = pool([[2, 0], [4, 0], [0, 0], [50, 0]], [1, 1, 0, 1])
    assert tried.payload(state, None, of(context, "c"), context)["message"].tolist() == [[3.0, 0.0]]
    [nobody] = roster("nobody", evaluators=("nobody",)).clients
    assert tried.payload(state, None, nobody, context)["message"].tolist() == [[3.0, 0.0]]
    empty = pool([[0, 0]] * 4, [0] * 4)
    assert tried.payload(empty, None, of(context, "a"), context)["message"].tolist() == [[9.0, 9.0]]
    stranger = ClientInfo("nobody", "evaluator", 0, ())
    exported = tried.payload(state, None, stranger, replace(context, clients=()))["message"]
    assert float(exported[0, 0]) == pytest.approx(56 / 3)


def test_amps_training_equals_the_equations(backbone: Backbone, make_context: Make) -> None:
    """(6.2), whose proximal term has a gradient."""
    context = make_context(6, epochs=2, batch_size=3, learning_rate=0.05)
    mixture = start_context(backbone)
    own = mixture + 0.05 * torch.randn(mixture.shape, generator=torch.Generator().manual_seed(2))

    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        features, labels = context.train.features()[rows], context.train.labels[rows]
        value = literal.context_loss(backbone, tensors["context"], list(NAMES), features, labels)
        squares = [(a - b) ** 2 for a, b in zip(tensors["context"].flatten(), mixture.flatten(), strict=True)]
        return value + 3.0 / 2 * torch.stack(squares).sum()

    found = amp(proximal=3.0).train(context, {"message": mixture}, {"context": own})
    assert_moved_equally(found.update, literal.training(context, {"context": own}, loss, 0.05), {"context": own})
    assert torch.equal(found.private["context"], found.update["context"])
    free = amp(proximal=0.0).train(context, {"message": mixture}, {"context": own})
    assert not torch.allclose(free.update["context"], found.update["context"], atol=1e-4)
