"""FaST-PT's client half against its equations written out: both phases, style transfer, prediction and ablations."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import open_source
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, MethodError, TrainResult
from promptfed.shared.methods.fast_pt.method import FastPT, contrastive_loss
from promptfed.shared.methods.fast_pt.style_transfer import StyleTransfer
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode
from tests.shared.methods.conftest import NAMES, MadeUpSplit, Wire
from tests.support import literal, literal_fast_pt
from tests.support import small_fast_pt as small
from tests.support.equality import assert_values

SGD: dict[str, Any] = {"batch_size": 4, "momentum": 0.9, "weight_decay": 5e-4}


@pytest.fixture
def make_sketcher(make_context: small.Make, backbone: Backbone) -> small.Make:
    def make(count: int = 10, *, phase: str = "global", **options: Any) -> ClientContext:
        context = make_context(count, **(SGD | {"learning_rate": 0.05, "epochs": 2, "schedule": "constant"} | options))
        return replace(context, domain=small.SKETCH, peers=(small.A, small.B, small.UNSEEN), phase=phase)

    return make


def assert_moved_alike(found: Tensor, wanted: Tensor, start: Tensor) -> None:
    """What training did is the same, not only where it started."""
    moved, literally = found - start, (wanted - start).detach()
    size = float(literally.abs().max())
    assert size > 1e-4
    assert_values(moved / size, literally / size, 1e-4)


def test_the_contrastive_term_is_the_papers_with_its_gradient(backbone: Backbone) -> None:
    words, general = backbone.embed_words("a neon sign of a"), small.drawn(1, 4, backbone.d_t)
    prompt = small.drawn(2, 3, backbone.d_t).requires_grad_()
    found = contrastive_loss(prompt, words, general)
    near = torch.exp(literal_fast_pt.similarity(prompt, words))
    wanted = -torch.log(near / (near + torch.exp(literal_fast_pt.similarity(prompt, general))))
    assert_values(found, wanted)
    gradient, literally = (torch.autograd.grad(one, prompt)[0] for one in (found, wanted))
    assert float((gradient - literally).abs().max()) <= 1e-4 * float(literally.abs().max())


@pytest.mark.extended
def test_the_global_phase_trains_on_own_and_transferred_embeddings(
    backbone: Backbone, make_sketcher: small.Make
) -> None:
    method, context, payload = small.fast_pt(), make_sketcher(), small.payload_of(backbone)
    private = method.prepare(context, {})
    result = method.train(context, payload, private)

    values, labels = context.train.features(), context.train.labels
    draws = generator(3, "hospital-a", "style-transfer", small.NEON.description)
    templates = (small.SKETCH.description, small.NEON.description, context.template)
    q = literal_fast_pt.trained_transform(
        backbone, values, labels, NAMES, templates, draws, hidden=6, epochs=2, batch_size=4, rate=0.01
    )
    everything = torch.cat([values, literal_fast_pt.transferred(q, values)])
    classes, rows = torch.cat([labels, labels]), torch.tensor([1] * 10 + [0] * 10)
    purpose = (3, 1, "global", "hospital-a")

    def prompt_loss(weight: Tensor, some: Tensor) -> Tensor:
        return literal.context_loss(backbone, weight, list(NAMES), everything[some], classes[some])

    def joint_loss(weight: Tensor, some: Tensor) -> Tensor:  # weights and bias as one matrix
        return literal_fast_pt.classifier_loss(weight[:, :-1], weight[:, -1], everything[some], rows[some])

    prompt = literal_fast_pt.sgd_on(payload["global_prompt"], prompt_loss, 20, purpose, epochs=2, rate=0.05, **SGD)
    start = torch.cat([payload["classifier_weight"], payload["classifier_bias"][:, None]], dim=1)
    joint = literal_fast_pt.sgd_on(start, joint_loss, 20, purpose, epochs=2, rate=0.01, **SGD)

    assert set(result.update) == {"global_prompt", "classifier_weight", "classifier_bias"}
    assert_moved_alike(result.update["global_prompt"], prompt, payload["global_prompt"])
    assert_moved_alike(result.update["classifier_weight"], joint[:, :-1], payload["classifier_weight"])
    assert_moved_alike(result.update["classifier_bias"], joint[:, -1], payload["classifier_bias"])
    assert "domain_prompt" not in result.private, "Algorithm 1 trains it under an aggregated global prompt first"


@pytest.mark.parametrize("contrastive", [True, False])
def test_domain_prompts_train_under_a_fixed_one(
    contrastive: bool, backbone: Backbone, make_sketcher: small.Make
) -> None:
    method, payload = small.fast_pt(contrastive=contrastive), small.payload_of(backbone)
    context = make_sketcher(round=4, phase="domain_prompts")
    start = small.drawn(9, 3, backbone.d_t)
    result = method.train(context, {"global_prompt": payload["global_prompt"]}, {"domain_prompt": start})

    values, labels, general = context.train.features(), context.train.labels, payload["global_prompt"]

    def loss(prompt: Tensor, some: Tensor) -> Tensor:
        if not contrastive:
            whole = torch.cat([general, prompt])
            return literal.context_loss(backbone, whole, list(NAMES), values[some], labels[some])
        return literal_fast_pt.domain_loss(
            backbone, general, prompt, small.SKETCH.description, NAMES, values[some], labels[some]
        )

    purpose = (3, 4, "domain_prompts/domain_prompt", "hospital-a")
    wanted = literal_fast_pt.sgd_on(start, loss, 10, purpose, epochs=2, rate=0.05, **SGD)
    assert set(result.update) == {"domain_prompt"}
    assert_moved_alike(result.update["domain_prompt"], wanted, start)
    assert torch.equal(result.private["domain_prompt"], result.update["domain_prompt"])
    assert torch.equal(general, small.payload_of(backbone)["global_prompt"]), "a payload is not changed in place"


def test_later_rounds_train_a_private_domain_prompt_first(backbone: Backbone, make_sketcher: small.Make) -> None:
    method, payload = small.fast_pt(), small.payload_of(backbone)
    context = make_sketcher(round=2)
    private = method.prepare(context, {})
    result = method.train(context, payload, private)
    assert set(result.update) == {"global_prompt", "classifier_weight", "classifier_bias"}
    alone = small.fast_pt(prompts="domain").train(context, payload, private)  # without P^G: another prompt
    start = torch.randn(3, backbone.d_t, generator=generator(3, "domain_prompt")) * 0.02
    assert not torch.equal(result.private["domain_prompt"], start)
    assert not torch.equal(result.private["domain_prompt"], alone.private["domain_prompt"])
    again = method.train(replace(context, round=3), payload, result.private)
    assert not torch.equal(again.private["domain_prompt"], result.private["domain_prompt"])
    assert {"loss", "classifier_loss", "domain_loss"} <= set(result.metrics)
    first = method.train(make_sketcher(), payload, private)
    assert "domain_loss" not in first.metrics


def test_transforms_are_made_once_and_for_newcomers(make_sketcher: small.Make, monkeypatch: pytest.MonkeyPatch) -> None:
    method, context = small.fast_pt(), make_sketcher()
    trained = small.count_transforms(monkeypatch)
    private = method.prepare(context, {})
    assert trained == ["neon"], "neither the own domain nor one that only evaluates"
    stored, _ = decode(encode(private))  # as after a restart
    assert method.prepare(context, stored) is stored
    later = method.prepare(replace(context, peers=(small.A, small.B, small.C, small.UNSEEN)), stored)
    assert trained == ["neon", "chalk"]
    assert all(torch.equal(later[name], stored[name]) for name in stored)
    assert method.prepare(replace(context, peers=(small.A, small.C)), later) == later, "who was withdrawn may come back"
    small.fast_pt(target_descriptions=True).prepare(context, stored)
    assert trained == ["neon", "chalk", "chalk"]
    assert small.fast_pt(mst=False).prepare(context, {}) == {}


def test_style_transfer_is_reported_once_with_the_first_update(backbone: Backbone, make_sketcher: small.Make) -> None:
    method, payload, context = small.fast_pt(), small.payload_of(backbone), make_sketcher()
    private = method.prepare(context, {})
    first = method.train(context, payload, private)
    told = {name: value for name, value in first.metrics.items() if name.startswith("mst_")}
    assert set(told) == {
        f"mst_{what}_{when}[neon]" for what in ("alignment", "consistency") for when in ("before", "after")
    }
    transfer = StyleTransfer(context, method.hyper)
    assert told == {f"mst_{name}[neon]": value for name, value in transfer.report(private, small.NEON).items()}
    second = method.train(replace(context, round=2), payload, first.private)
    assert not [name for name in second.metrics if name.startswith("mst_")]
    assert transfer.has(second.private, small.NEON)
    late = method.prepare(replace(context, peers=(small.A, small.B, small.C)), second.private)
    third = method.train(replace(context, round=3, peers=(small.A, small.B, small.C)), payload, late)
    assert {name for name in third.metrics if "after" in name} == {
        "mst_alignment_after[chalk]",
        "mst_consistency_after[chalk]",
    }


def test_rows_are_found_by_key_in_any_order_and_whoever_left(backbone: Backbone, make_sketcher: small.Make) -> None:
    method, context = small.fast_pt(), make_sketcher()
    private, payload = method.prepare(context, {}), small.payload_of(backbone)
    wanted = method.train(context, payload, private).update
    order = [1, 0]
    turned = payload | {name: payload[name][order] for name in ("classifier_weight", "classifier_bias", "domains")}
    found = method.train(context, turned, private).update
    assert_moved_alike(found["classifier_weight"][order], wanted["classifier_weight"], payload["classifier_weight"])
    # A third domain whose only trainer was withdrawn: its row only feels that it is never right.
    rows = small.payload_of(backbone, rows=(small.CHALK, *small.ROWS))
    third = method.train(context, rows, private).update
    assert third["classifier_weight"].shape == (3, backbone.d_e)
    assert torch.equal(third["global_prompt"], method.train(context, payload, private).update["global_prompt"])
    with pytest.raises(MethodError, match="does not know the domain of 'hospital-a'"):
        method.train(context, small.payload_of(backbone, rows=(small.CHALK, small.NEON)), private)


def mixture_by_hand(backbone: Backbone, payload: Tensors, features: Tensor, rows: list[int], soft: bool) -> Tensor:
    logits = []
    for feature in features:
        scores = torch.stack(
            [payload["classifier_weight"][row] @ feature + payload["classifier_bias"][row] for row in rows]
        )
        g = torch.exp(scores) / torch.exp(scores).sum()
        if not soft:
            g = F.one_hot(g.argmax(), len(rows)).float()
        prompt = sum(share * one for share, one in zip(g, payload["domain_prompts"], strict=True))
        whole = torch.cat([payload["global_prompt"], prompt])
        with torch.no_grad():
            texts = [literal.text_feature(backbone, whole, name) for name in NAMES]
        logits.append(torch.stack([backbone.logit_scale * torch.dot(feature, text) for text in texts]))
    return torch.stack(logits)


@pytest.mark.parametrize("mixture", ["hard", "soft"])
def test_the_mixture_classifies_each_image_by_its_own_prompt(
    mixture: str, backbone: Backbone, make_context: small.Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("promptfed.shared.methods.fast_pt.domains.CPU_ROWS", 60)  # a few images at once
    context = make_context(8)
    payload = small.payload_of(
        backbone, listed=(small.NEON, small.CHALK, small.SKETCH), rows=(small.NEON, small.CHALK, small.SKETCH)
    )
    found = small.fast_pt(mixture=mixture).classifier(context, payload, {})
    rows = torch.tensor([5, 0, 2, 7, 1, 3, 6, 4])
    features = context.train.features()[rows]
    wanted = mixture_by_hand(backbone, payload, features, [0, 1, 2], mixture == "soft")
    logits = found.logits(context.train, rows)
    assert_values(logits, wanted)
    choices = (features @ payload["classifier_weight"].T + payload["classifier_bias"]).argmax(dim=1)
    assert len(choices.unique()) > 1, "the images must not all look like one domain"
    assert found.logits(context.train, rows[:0]).shape == (0, len(NAMES))
    assert_values(found.logits(context.train, rows[:1]), wanted[:1])


@pytest.mark.parametrize("mixture", ["hard", "soft"])
def test_a_missing_domain_prompt_renormalises(mixture: str, backbone: Backbone, make_context: small.Make) -> None:
    context = make_context(6)
    payload = small.payload_of(
        backbone, listed=(small.SKETCH, small.NEON), rows=(small.NEON, small.CHALK, small.SKETCH)
    )
    found = small.fast_pt(mixture=mixture).classifier(context, payload, {}).logits(context.train, torch.arange(6))
    wanted = mixture_by_hand(backbone, payload, context.train.features(), [2, 0], mixture == "soft")
    assert_values(found, wanted)
    logits = context.train.features() @ payload["classifier_weight"].T + payload["classifier_bias"]
    whole = torch.softmax(logits, dim=1)
    renormalised = whole[:, [2, 0]] / whole[:, [2, 0]].sum(dim=1, keepdim=True)
    assert_values(torch.softmax(logits[:, [2, 0]], dim=1), renormalised)
    beside = small.fast_pt(mixture=mixture).variants(context, payload, {})
    assert set(beside) == ({"global", "hard"} if mixture == "soft" else {"global"})
    alone = payload | {name: payload[name][:1] for name in ("domain_prompts", "listed_domains")}
    found = small.fast_pt(mixture=mixture).classifier(context, alone, {}).logits(context.train, torch.arange(6))
    whole = torch.cat([payload["global_prompt"], payload["domain_prompts"][0]])
    assert_values(found, text_scores(backbone, whole, context.train.features()))


def text_scores(backbone: Backbone, prompt: Tensor, features: Tensor) -> Tensor:
    with torch.no_grad():
        texts = torch.stack([literal.text_feature(backbone, prompt, name) for name in NAMES])
    return backbone.logit_scale * features @ texts.T


def test_before_the_end_a_trainer_alone_has_its_domain_prompt(backbone: Backbone, make_context: small.Make) -> None:
    method, context, payload = small.fast_pt(), make_context(4), small.payload_of(backbone)
    rows, features = torch.arange(4), make_context(4).train.features()
    own = small.drawn(7, 3, backbone.d_t)
    general = text_scores(backbone, payload["global_prompt"], features)
    both = text_scores(backbone, torch.cat([payload["global_prompt"], own]), features)
    assert_values(method.classifier(context, payload, {}).logits(context.train, rows), general)
    assert method.variants(context, payload, {}) == {}, "the classifier is the global prompt's already"
    private = {"domain_prompt": own}
    assert_values(method.classifier(context, payload, private).logits(context.train, rows), both)
    for one in (method, small.fast_pt(mixture="soft")):
        (beside,) = one.variants(context, payload, private).items()
        assert (beside[0], len(beside[1].logits(context.train, rows))) == ("global", 4)
        assert_values(beside[1].logits(context.train, rows), general)
    last = small.payload_of(backbone, listed=small.ROWS)
    mixed = [method.classifier(context, last, some).logits(context.train, rows) for some in ({}, private)]
    assert torch.equal(*mixed), "at the end all predict alike"
    at_the_end = small.fast_pt(mixture="soft").variants(context, last, {})
    assert set(at_the_end) == {"global", "hard"}
    assert torch.equal(at_the_end["hard"].logits(context.train, rows), mixed[0])
    assert_values(method.variants(context, last, {})["global"].logits(context.train, rows), general)


def test_classifiers_follow_the_candidates_of_the_test_set(backbone: Backbone, make_context: small.Make) -> None:
    context = replace(make_context(4), class_names=("anchor", "moon"), label_space=NAMES)
    payload = small.payload_of(backbone, listed=small.ROWS)
    for mixture in ("hard", "soft"):
        logits = small.fast_pt(mixture=mixture).classifier(context, payload, {}).logits(context.train, torch.arange(4))
        assert logits.shape == (4, 2)


def test_the_global_prompt_alone_is_what_the_whole_trains_too(backbone: Backbone, make_sketcher: small.Make) -> None:
    method, context, payload = small.fast_pt(prompts="global"), make_sketcher(), small.payload_of(backbone)
    assert [phase.name for phase in method.phases(4, 4)] == ["global"]
    assert [spec.name for spec in method.state_tensors()] == ["global_prompt"]
    state = method.initial_state(small.server(small.A, small.B), initial_draws(3))
    assert torch.equal(
        state["global_prompt"],
        small.fast_pt().initial_state(small.server(small.A, small.B), initial_draws(3))["global_prompt"],
    )
    assert method.join(state, small.C, small.server(small.A, small.B, small.C)) == state
    private = method.prepare(context, {})
    found = method.train(context, {"global_prompt": payload["global_prompt"]}, private)
    whole = small.fast_pt().train(context, payload, private)
    assert torch.equal(found.update["global_prompt"], whole.update["global_prompt"])
    assert set(found.update) == {"global_prompt"}
    later = method.train(replace(context, round=2), {"global_prompt": payload["global_prompt"]}, private)
    assert ("domain_loss" in later.metrics, "domain_prompt" in later.private) == (False, False)
    logits = method.classifier(context, found.update, {}).logits(context.train, torch.arange(3))
    wanted = text_scores(backbone, found.update["global_prompt"], context.train.features()[:3])
    assert_values(logits, wanted)
    assert method.variants(context, found.update, {"domain_prompt": state["global_prompt"]}) == {}


def test_the_domain_prompts_alone(backbone: Backbone, make_sketcher: small.Make) -> None:
    method, context = small.fast_pt(prompts="domain"), make_sketcher(round=2)
    names = ["classifier_weight", "classifier_bias", "domains", "domain_prompts", "listed_domains"]
    assert [spec.name for spec in method.state_tensors()] == names
    assert set(method.initial_state(small.server(small.A, small.B), initial_draws(3))) == set(names)
    general, last = method.phases(4, 4)
    assert [spec.name for spec in general.up] == ["classifier_weight", "classifier_bias"]
    assert last.down == ()
    payload = {name: small.payload_of(backbone, listed=small.ROWS)[name] for name in names}
    result = method.train(context, payload, method.prepare(context, {}))
    start = torch.randn(3, backbone.d_t, generator=generator(3, "domain_prompt")) * 0.02
    values, labels = context.train.features(), context.train.labels

    def loss(prompt: Tensor, some: Tensor) -> Tensor:
        return literal.context_loss(backbone, prompt, list(NAMES), values[some], labels[some])

    purpose = (3, 2, "global/domain_prompt", "hospital-a")
    wanted = literal_fast_pt.sgd_on(start, loss, 10, purpose, epochs=2, rate=0.05, **SGD)
    assert_moved_alike(result.private["domain_prompt"], wanted, start)
    found = method.classifier(context, payload, {}).logits(context.train, torch.arange(4))
    by_hand = mixture_by_hand(
        backbone, payload | {"global_prompt": torch.empty(0, backbone.d_t)}, values[:4], [0, 1], soft=False
    )
    assert_values(found, by_hand)
    before = payload | {"listed_domains": small.keys(), "domain_prompts": torch.zeros(0, 3, backbone.d_t)}
    untrained = method.classifier(context, before, {}).logits(context.train, torch.arange(4))
    assert_values(untrained, text_scores(backbone, start, values[:4]))


def test_without_transfer_only_own_embeddings_are_trained_on(backbone: Backbone, make_sketcher: small.Make) -> None:
    context, payload = make_sketcher(), small.payload_of(backbone)
    found = small.fast_pt(mst=False).train(context, payload, {}).update["global_prompt"]
    promptfl = make_method({"name": "promptfl", "m": 3}).train(context, {"context": payload["global_prompt"]}, {})
    assert torch.equal(found, promptfl.update["context"])


def test_a_targets_description_serves_the_global_prompt_alone(backbone: Backbone, make_sketcher: small.Make) -> None:
    context, payload = make_sketcher(), small.payload_of(backbone)
    with_target, without = small.fast_pt(target_descriptions=True), small.fast_pt()
    private = with_target.prepare(context, {})
    found, plain = with_target.train(context, payload, private).update, without.train(context, payload, private).update
    assert not torch.equal(found["global_prompt"], plain["global_prompt"])
    assert torch.equal(found["classifier_weight"], plain["classifier_weight"]), "no row, since it has no domain prompt"
    assert isinstance(context.train, MadeUpSplit)


# FaST-PT with the real coordinator and real clients: a round by hand, what leaves a client, what is computed once.


SMALL = "topic=weather&per_class=1&test_per_class=1"


DATA = {"anna": f"symbols:sketch?{SMALL}", "bert": f"symbols:neon?{SMALL}"}


UNSEEN_FEDERATION = Site("unseen", f"symbols:chalk?{SMALL}", role="evaluator")


MST = {"mst_epochs": 1, "mst_hidden": 4, "mst_batch_size": 5, "mst_learning_rate": 0.01}


SGD_FEDERATION: dict[str, Any] = {"epochs": 1, "batch_size": 10, "momentum": 0.9, "weight_decay": 5e-4}


NAMES_FEDERATION = open_source(DATA["anna"]).class_names


def sites() -> list[Site]:
    return [*(Site(name, uri) for name, uri in DATA.items()), UNSEEN_FEDERATION]


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "styles", "method": {"name": "fast_pt", "m": 2, **MST}, "class_names": list(NAMES_FEDERATION),
        "backbone": {"model": "promptfed-tiny", "pretrained": None}, "rounds": 1,
        "training": {"learning_rate": 0.05, **SGD_FEDERATION}, "seed": 5,
    } | changes  # fmt: skip


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, Tensor]]]:
    """Each client's domain prompts, with the phase that trained each."""
    seen: dict[str, list[tuple[str, Tensor]]] = {}
    train = FastPT.train

    def watched(self: FastPT, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        result = train(self, context, payload, private)
        if "domain_prompt" in result.private:
            seen.setdefault(context.client, []).append((context.phase, result.private["domain_prompt"].clone()))
        return result

    monkeypatch.setattr(FastPT, "train", watched)
    return seen


def traces(prompt: Tensor) -> list[bytes]:
    """Four consecutive numbers from every place of a prompt, as their bytes, and every number as JSON writes it."""
    raw = prompt.contiguous().numpy().tobytes()
    return [raw[at : at + 16] for at in range(0, len(raw) - 16, 4)] + [
        json.dumps(value).encode() for value in prompt.flatten().tolist()
    ]


@pytest.mark.extended
def test_no_byte_of_a_domain_prompt_leaves_early(
    backbone: Backbone, features: FeatureCache, wire: Wire, trained: dict[str, list[tuple[str, Tensor]]]
) -> None:
    simulate(spec(rounds=3), sites(), backbone=backbone, features=features)
    assert {client: [phase for phase, _ in one] for client, one in trained.items()} == {
        name: ["global", "global", "domain_prompts"] for name in DATA
    }
    passed = [head + body for _, head, body in wire]
    updates = [number for number, (what, *_) in enumerate(wire) if re.match("PUT .*/update$", what)]
    naming = [number for number in updates if b"domain_prompt" in passed[number]]
    assert len(updates) == 2 * 3 + 2
    assert naming == updates[-2:], "only the two last updates name it"
    kept = [prompt for one in trained.values() for _, prompt in one]
    before = b"\n".join(passed[: updates[-2]])
    assert not [trace for prompt in kept for trace in traces(prompt) if trace in before]
    # The same search does find what is sent in the end.
    last = b"\n".join(passed[number] for number in updates[-2:])
    assert all(one[-1][1].numpy().tobytes() in last for one in trained.values())
    everything = b"\n".join(passed)
    earlier = [prompt for one in trained.values() for _, prompt in one[:-1]]
    assert not [trace for prompt in earlier for trace in traces(prompt) if trace in everything], "nor ever an older one"
