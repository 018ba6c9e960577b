"""FedMGP against its equations written out, and which groups leave a client."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared.clip import Backbone, BackboneError
from promptfed.shared.methods import fedmgp, make_method, resolve_spec
from promptfed.shared.methods.core.interface.base import ClientContext
from promptfed.shared.methods.fedmgp import FedMGP, diversity, draw_slots, likeness
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_draws import TorchDraws
from tests.support import literal_visual as literal
from tests.support.equality import assert_gradients, assert_values
from tests.support.literal import cross_entropy
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone, split_of

RATE = 0.1


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method(**hyper: Any) -> FedMGP:
    made = make_method({"name": "fedmgp", "groups": 3} | hyper)
    assert isinstance(made, FedMGP)
    return made


def none(tried: FedMGP, backbone: Backbone) -> Tensors:
    return tried.initial_state(server_context(backbone, "a"), TorchDraws())


def global_ones(tried: FedMGP, backbone: Backbone, seed: int = 8) -> Tensors:
    draws = torch.Generator().manual_seed(seed)
    zero = none(tried, backbone)
    return {name: torch.randn(one.shape, generator=draws) * 0.1 for name, one in zero.items()}


def step(backbone: Backbone, **changes: Any) -> ClientContext:
    return client_context(backbone, epochs=1, learning_rate=RATE, **changes)


def literal_apart(features: list[list[Tensor]], kind: str) -> Tensor:
    values = []
    for i in range(len(features)):
        for j in range(i + 1, len(features)):
            for a, b in zip(features[i], features[j], strict=True):
                if kind == "cos":
                    values.append(torch.dot(a, b) / (a.norm() * b.norm()))
                elif kind == "l1":
                    values.append(-(a - b).abs().mean())
                else:
                    values.append(-(a - b).square().sum().sqrt())
    return torch.stack(values).mean()


def behind(m: int, name: str, init: str | None = "a photo of a") -> str:
    """The text behind the prompt: the words whose tokens no prompt replaces, and the name."""
    return " ".join([*("" if init is None else init).split()[m:], name])


def literal_loss(context: ClientContext, prompts: Tensors, kind: str) -> Tensor:
    """(G1), (G2): one group, one image, one class at a time."""
    backbone, split = context.backbone, split_of(context.backbone, len(context.train))
    count = len(prompts["text"])
    texts = [
        [literal.text_feature(backbone, prompts["text"][j].unsqueeze(0), behind(2, name)) for name in NAMES]
        for j in range(count)
    ]
    images = [
        [literal.image_feature(backbone, prompts["visual"][j].unsqueeze(0), one) for one in split.pixels]
        for j in range(count)
    ]
    losses = []
    for j in range(count):
        for image, label in zip(images[j], split.labels.tolist(), strict=True):
            logits = torch.stack([backbone.logit_scale * torch.dot(image, text) for text in texts[j]])
            losses.append(cross_entropy(logits, label))
    value = torch.stack(losses).mean()
    return value + 0.5 * (literal_apart(texts, kind) + literal_apart(images, kind))


@pytest.mark.parametrize("kind", ["cos", "l1", "l2"])
def test_a_step_is_the_equations(backbone: Backbone, kind: str) -> None:
    tried, context = method(diversity=kind), step(backbone, count=4)
    start = tried.current(context, none(tried, backbone), {})
    found = tried.train(context, none(tried, backbone), {})
    leaves = {name: one.clone().requires_grad_() for name, one in start.items()}
    value = literal_loss(context, leaves, kind)
    slopes = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    assert found.metrics["loss"] == pytest.approx(float(value.detach()), rel=1e-4)
    for name, slope in slopes.items():
        moved = (start[name] - found.private[f"{name}_groups"]) / RATE
        assert_gradients(moved, slope)


def test_the_words_that_no_prompt_replaces_stand_before_the_name(backbone: Backbone) -> None:
    """[SOS] v1 v2 of a NAME . [EOT]: with the embeddings of "a photo" in it, the text is "a photo of a NAME."."""
    prompts = {"text": backbone.embed_words("a photo").unsqueeze(0)}
    found = fedmgp.Groups(step(backbone, count=1), method().hyper).texts(prompts)[0]
    texts = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]
    assert_values(found, F.normalize(backbone.encode_text(texts), dim=-1))
    for m, init in ((4, "a photo of a"), (2, None), (1, "a photo of a")):
        made = torch.randn(1, m, backbone.d_t, generator=torch.Generator().manual_seed(m)) * 0.1
        tried = method(m=m, context_init=init)
        found = fedmgp.Groups(step(backbone, count=1), tried.hyper).texts({"text": made})[0]
        for text, name in zip(found, NAMES, strict=True):
            assert_values(text, literal.text_feature(backbone, made, behind(m, name, init)))


def test_its_groups_start_alike_for_all_and_differ_from_each_other(backbone: Backbone) -> None:
    tried = method()
    one = tried.start(backbone, 3, "text")
    assert one.equal(tried.start(backbone, 3, "text"))
    words = backbone.embed_words("a photo of a")[:2]
    assert float((one - words).std()) == pytest.approx(0.01, rel=0.3)
    assert not one[0].equal(one[1])
    assert float(method(context_init=None).start(backbone, 3, "text").std()) == pytest.approx(0.02, rel=0.3)


def test_sharing_all_groups_is_a_plain_average(backbone: Backbone) -> None:
    tried = method(select="all", shared=3)
    found = tried.train(step(backbone, count=3), none(tried, backbone), {})
    for kind in ("text", "visual"):
        assert found.update[f"global_{kind}"].equal(found.private[f"{kind}_groups"])
    assert "text_slot_0" not in found.metrics


def test_one_group_is_one_text_and_one_visual_prompt(backbone: Backbone) -> None:
    tried, context = method(groups=1, shared=1), step(backbone, count=3)
    payload = none(tried, backbone)
    prompts = tried.current(context, payload, {})
    found = tried.classifier(context, payload, {}).logits(context.train, torch.arange(3))
    split = split_of(backbone, 3)
    for i in range(3):
        image = literal.image_feature(backbone, prompts["visual"], split.pixels[i])
        for c, name in enumerate(NAMES):
            text = literal.text_feature(backbone, prompts["text"], behind(2, name))
            assert float(found[i, c]) == pytest.approx(float(backbone.logit_scale * image @ text), abs=1e-3)
    assert float(diversity(torch.ones(1, 4, 8), "cos")) == 0


def test_inference(backbone: Backbone) -> None:
    context = step(backbone, count=3)
    payload = none(method(), backbone)
    by = {
        how: method(inference=how).classifier(context, payload, {}).logits(context.train, torch.arange(3))
        for how in ("mean", "max", "features")
    }
    assert bool((by["max"] >= by["mean"] - 1e-4).all())
    prompts = method().current(context, payload, {})
    split = split_of(backbone, 3)
    image = torch.stack(
        [literal.image_feature(backbone, one.unsqueeze(0), split.pixels[0]) for one in prompts["visual"]]
    )
    text = torch.stack(
        [literal.text_feature(backbone, one.unsqueeze(0), behind(2, NAMES[0])) for one in prompts["text"]]
    )
    each = backbone.logit_scale * (image * text).sum(1)
    assert float(by["mean"][0, 0]) == pytest.approx(float(each.mean()), abs=1e-3)
    assert float(by["max"][0, 0]) == pytest.approx(float(each.max()), abs=1e-3)
    whole = torch.nn.functional.cosine_similarity(image.mean(0), text.mean(0), dim=0)
    assert float(by["features"][0, 0]) == pytest.approx(float(backbone.logit_scale * whole), abs=1e-3)


def test_slots_are_drawn_as_enumeration_says() -> None:
    draws = torch.Generator().manual_seed(0)
    groups, last = torch.randn(3, 2, 4, generator=draws), torch.randn(2, 2, 4, generator=draws)
    q = likeness(groups, last, 0.5)
    nearest = [max(float(torch.cosine_similarity(g.flatten(), p.flatten(), dim=0)) for p in last) for g in groups]
    assert_values(q.float(), torch.tensor(nearest).div(0.5).softmax(0))
    chances = {(a, b): float(q[a] * q[b] / (1 - q[a])) for a, b in permutations(range(3), 2)}
    assert sum(chances.values()) == pytest.approx(1)
    seen = Counter(tuple(draw_slots(q, 2, draws).tolist()) for _ in range(6000))
    for order, chance in chances.items():
        assert seen[order] / 6000 == pytest.approx(chance, abs=5 * (chance / 6000) ** 0.5)


def test_round_one_draws_the_same_slots_for_both_and_later_ones_by_likeness(backbone: Backbone) -> None:
    tried, context = method(groups=5), step(backbone, count=2)
    first = tried.train(context, none(tried, backbone), {})
    assert first.private["text_slots"].equal(first.private["visual_slots"])
    assert first.private["text_slots"].equal(tried.train(context, none(tried, backbone), {}).private["text_slots"])
    assert "text_entropy" not in first.metrics
    for kind in ("text", "visual"):
        kept = first.private[f"{kind}_groups"]
        assert first.update[f"global_{kind}"].equal(kept[first.private[f"{kind}_slots"]]), "in the order of the draw"
    later = tried.train(replace(context, round=2), global_ones(tried, backbone), first.private)
    assert 0 < later.metrics["text_entropy"] <= torch.log(torch.tensor(5.0)) + 1e-6
    assert set(later.update) == {"global_text", "global_visual"}, "no group that was not drawn"


def test_only_the_slots_that_were_sent_take_the_global_groups(backbone: Backbone) -> None:
    tried, context = method(groups=4), step(backbone, count=2)
    private = tried.train(context, none(tried, backbone), {}).private
    payload = global_ones(tried, backbone)
    found = tried.current(context, payload, private)
    for kind in ("text", "visual"):
        slots = private[f"{kind}_slots"].tolist()
        for group in range(4):
            wanted = (
                payload[f"global_{kind}"][slots.index(group)] if group in slots else private[f"{kind}_groups"][group]
            )
            assert found[kind][group].equal(wanted)


def test_a_newcomer_has_the_global_groups_first_and_an_evaluator_nothing_else(backbone: Backbone) -> None:
    tried, context = method(), step(backbone, count=3)
    payload = global_ones(tried, backbone)
    found = tried.current(context, payload, {})
    assert found["text"][:2].equal(payload["global_text"])
    assert found["text"][2].equal(tried.start(backbone, 3, "text")[2])
    evaluator = replace(context, train=split_of(backbone, 0))
    shown = tried.classifier(evaluator, payload, {}).logits(context.train, torch.arange(3))
    parts = [
        method(groups=1, shared=1)
        .classifier(evaluator, {name: one[j : j + 1] for name, one in payload.items()}, {})
        .logits(context.train, torch.arange(3))
        for j in range(2)
    ]
    assert_values(shown, (parts[0] + parts[1]) / 2)
    assert isinstance(tried.classifier(evaluator, none(tried, backbone), {}), TemplateClassifier)
    assert set(tried.variants(context, payload, {})) == {"global"}


@pytest.mark.parametrize("kind", ["cos", "l1", "l2"])
def test_a_step_on_the_term_draws_groups_apart(kind: str) -> None:
    """Whatever the type; minimising 1 - cos, or the size of a negative term, would draw them together."""
    raw = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    normal = torch.nn.functional.normalize(raw, dim=-1)
    [slope] = torch.autograd.grad(diversity(normal, kind), [raw])
    moved = torch.nn.functional.normalize(raw - 0.1 * slope, dim=-1)
    assert (moved[0] * moved[1]).sum() < (normal[0] * normal[1]).sum()


def test_text_alone_runs_on_kept_features(backbone: Backbone) -> None:
    tried = method(modalities="text")
    assert tried.needs.cached_features
    assert [one.name for one in tried.state_tensors()] == ["global_text"]
    context = step(backbone, count=3)
    found = tried.train(context, none(tried, backbone), {})
    assert context.train.asked == []
    assert set(found.private) == {"text_groups", "text_slots"}
    images = method(modalities="visual").train(context, none(method(modalities="visual"), backbone), {})
    assert set(images.update) == {"global_visual"}


@pytest.mark.parametrize(
    ("hyper", "says"),
    [({"shared": 6}, "cannot be shared"), ({"select": "all"}, "set shared: 5")],
)
def test_what_it_refuses(hyper: dict[str, Any], says: str, backbone: Backbone) -> None:
    with pytest.raises(SpecError, match=says):
        resolve_spec({"name": "f", "method": {"name": "fedmgp"} | hyper})
    with pytest.raises(BackboneError, match="fewer than m = 9"):
        method(m=9).check_texts(backbone, NAMES, "a photo of a {}.")
    with pytest.raises(BackboneError, match=r"m = 2 tokens end within a word of context_init: choose m from \[1, 5\]"):
        method(m=2, context_init="a chiaroscuro").check_texts(backbone, NAMES, "a photo of a {}.")
