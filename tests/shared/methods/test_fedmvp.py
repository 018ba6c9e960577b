"""FedMVP against its equations written out, the switch to its low-rank part, and descriptions of classes."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.interface.base import ClientContext, ClientUpdate, MethodError
from promptfed.shared.methods.core.interface.hooks import take_own_options
from promptfed.shared.methods.fedmvp import GENERATOR, LORA, FedMVP, PromptedImages, bins, generated
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_draws import TorchDraws
from tests.support.equality import assert_gradients, assert_values
from tests.support.literal import cross_entropy
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone, split_of

RATE = 1.0
WORDS = {"sun": ["a disc", "it shines"], "umbrella": ["a canopy", "a handle", "spokes"]}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method(**hyper: Any) -> FedMVP:
    made = make_method({"name": "fedmvp", "m": 3, "r": 2, "flip": False} | hyper)
    assert isinstance(made, FedMVP)
    return made


def started(tried: FedMVP, backbone: Backbone) -> Tensors:
    return tried.initial_state(server_context(backbone, "a"), TorchDraws().manual_seed(4))


def handed(tried: FedMVP, state: Tensors) -> Tensors:
    [phase] = tried.phases(1, 4)
    return {spec.name: state[spec.name] for spec in phase.down}


def described(backbone: Backbone, count: int = 3, **training: Any) -> ClientContext:
    plain = {"epochs": 1, "learning_rate": RATE} | training
    return client_context(backbone, count, **plain).with_terms(class_descriptions=WORDS)


def literal_prompts(own: Tensors, patches: Tensor, texts: Tensor, m: int, heads: int = 4) -> Tensor:
    """(V1)-(V3) with loops over heads and patches; without the low-rank part."""
    d = patches.shape[1]
    size = d // heads
    values = torch.stack([own["proj_weight"] @ text + own["proj_bias"] for text in texts])

    def norm(row: Tensor, of: str) -> Tensor:
        spread = ((row - row.mean()).square().mean() + 1e-5).sqrt()
        return (row - row.mean()) / spread * own[f"norm_{of}_weight"] + own[f"norm_{of}_bias"]

    keys = torch.stack([norm(row, "text") for row in values])
    w, b = own["in_weight"], own["in_bias"]
    found = []
    for patch in patches:
        q = w[:d] @ norm(patch, "image") + b[:d]
        parts = []
        for head in range(heads):
            at = slice(head * size, (head + 1) * size)
            k = [(w[d : 2 * d] @ row + b[d : 2 * d])[at] for row in keys]
            v = [(w[2 * d :] @ row + b[2 * d :])[at] for row in values]  # values are not normed
            shares = torch.softmax(torch.stack([torch.dot(q[at], one) / math.sqrt(size) for one in k]), dim=0)
            parts.append(sum(share * one for share, one in zip(shares, v, strict=True)))
        z = own["out_weight"] @ torch.cat(parts) + own["out_bias"]
        hidden = own["ff_1_weight"] @ norm(z, "ff") + own["ff_1_bias"]
        half = len(hidden) // 2
        found.append(z + own["ff_2_weight"] @ (hidden[:half] * F.gelu(hidden[half:])) + own["ff_2_bias"])
    n = len(found)
    runs = [found[i * n // m : math.ceil((i + 1) * n / m)] for i in range(m)]
    return torch.stack([torch.stack(run).mean(0) for run in runs])


def literal_feature(backbone: Backbone, prompts: Tensor, image: Tensor) -> Tensor:
    visual = backbone.model.visual
    patches = visual.conv1(image.unsqueeze(0))[0].flatten(1).T
    rows = torch.cat([visual.class_embedding.unsqueeze(0), patches]) + visual.positional_embedding
    rows = visual.ln_pre(torch.cat([rows, prompts]))
    for block in visual.transformer.resblocks:
        rows = block(rows.unsqueeze(0))[0]
    feature = visual.ln_post(rows[0]) @ visual.proj
    return feature / feature.norm()


def embedded(backbone: Backbone, image: Tensor) -> Tensor:
    visual = backbone.model.visual
    return visual.conv1(image.unsqueeze(0))[0].flatten(1).T + visual.positional_embedding[1:]


def literal_logits(context: ClientContext, own: Tensors, image: Tensor) -> tuple[Tensor, Tensor]:
    backbone = context.backbone
    texts = [WORDS.get(name, [f"a photo of a {name.replace('_', ' ')}."]) for name in NAMES]
    features = [[backbone.encode_text([text])[0] for text in some] for some in texts]
    flat = torch.stack([one for some in features for one in some])
    prompts = literal_prompts(own, embedded(backbone, image), flat, 3)
    feature = literal_feature(backbone, prompts, image)
    means = [torch.stack([torch.dot(feature, one) for one in some]).mean() for some in features]
    return backbone.logit_scale * torch.stack(means), feature


def test_a_step_is_the_equations(backbone: Backbone) -> None:
    tried, context = method(), described(backbone)
    payload = handed(tried, started(tried, backbone))
    found = tried.train(context, payload, {})
    leaves = {spec.name: payload[spec.name].clone().requires_grad_() for spec in GENERATOR}
    split, losses = split_of(backbone, 3), []
    for image, label, frozen in zip(split.pixels, split.labels, split.features(), strict=True):
        logits, feature = literal_logits(context, leaves, image)
        losses.append(cross_entropy(logits, int(label)) + 10 * (1 - torch.dot(feature, frozen)))
    value = torch.stack(losses).mean()
    assert found.metrics["loss"] == pytest.approx(float(value.detach()), rel=1e-4)
    assert float(found.update["loss"]) == pytest.approx(float(value.detach()), rel=1e-4)
    slopes = torch.autograd.grad(value, list(leaves.values()))
    for (name, leaf), slope in zip(leaves.items(), slopes, strict=True):
        moved = (leaf.detach() - found.update[name]) / RATE
        if name == "norm_text_bias":  # adds the same to every key's score, which a softmax does not see
            assert float(moved.abs().max()) < 1e-5
        else:
            assert_gradients(moved, slope)
    for spec in LORA:
        assert found.update[spec.name].equal(payload[spec.name]), "it does not train before the switch"


def test_it_classifies_with_the_descriptions_of_the_classes_asked_for(backbone: Backbone) -> None:
    tried, context = method(), described(backbone)
    state = started(tried, backbone)
    found = tried.classifier(context, state, {}).logits(context.train, torch.arange(3))
    for row, image in enumerate(split_of(backbone, 3).pixels):
        assert_values(found[row], literal_logits(context, state, image)[0])
    turned = replace(context, class_names=NAMES[::-1]).with_terms(
        class_descriptions={**WORDS, "sun": WORDS["sun"][::-1]}
    )
    other = tried.classifier(turned, state, {}).logits(context.train, torch.arange(3))
    assert_values(other.flip(1), found)
    new = replace(context, class_names=("moon", "sun")).with_terms(class_descriptions={"moon": ["a crescent"]})
    assert tried.classifier(new, state, {}).logits(context.train, torch.arange(3)).shape == (3, 2)


def test_runs_of_patches_overlap_where_they_have_to() -> None:
    assert [(run.start, run.stop) for run in bins(49, 4)] == [(0, 13), (12, 25), (24, 37), (36, 49)]
    assert [(run.start, run.stop) for run in bins(36, 4)] == [(0, 9), (9, 18), (18, 27), (27, 36)]
    assert [(run.start, run.stop) for run in bins(196, 4)][-1] == (147, 196)


@pytest.mark.parametrize("kind", ["attributes", "joined", "template"])
def test_what_images_are_compared_with(backbone: Backbone, kind: str) -> None:
    tried, context = method(texts=kind), described(backbone)
    state = started(tried, backbone)
    found = tried.classifier(context, state, {}).logits(context.train, torch.arange(1))[0]
    image = split_of(backbone, 1).pixels[0]
    feature = literal_logits(context, state, image)[1]
    says = {
        "attributes": WORDS["sun"],
        "joined": ["a photo of a sun, a disc, it shines"],
        "template": ["a photo of a sun."],
    }[kind]
    wanted = backbone.logit_scale * torch.stack([feature @ one for one in backbone.encode_text(says)]).mean()
    assert float(found[0]) == pytest.approx(float(wanted), abs=1e-3)


def test_consistency_looks_at_a_mirrored_image_half_of_the_time(backbone: Backbone) -> None:
    context = described(backbone)
    payload = handed(method(), started(method(), backbone))
    without = method(consistency=0.0).train(context, payload, {}).metrics["loss"]
    kept = method(consistency=1.0).train(context, payload, {}).metrics["loss"]
    mirrored = method(consistency=1.0, flip=True).train(context, payload, {}).metrics["loss"]
    assert 0 < kept - without < 2
    assert mirrored != kept
    again = method(consistency=1.0, flip=True).train(context, payload, {}).metrics["loss"]
    assert mirrored == again
    images = PromptedImages(backbone)
    assert images.embedded(split_of(backbone, 2).pixels).requires_grad is False


def closed(tried: FedMVP, state: Tensors, losses: tuple[float, ...]) -> Tensors:
    [phase] = tried.phases(1, 4)
    updates = [
        ClientUpdate(
            f"c{number}", 1 / len(losses), {**{s.name: state[s.name] for s in phase.up}, "loss": torch.tensor(loss)}
        )
        for number, loss in enumerate(losses)
    ]
    return tried.aggregate(state, phase, updates, weighted_mean, None)


def test_the_federation_switches_once_and_for_good(backbone: Backbone) -> None:
    tried = method()
    state = started(tried, backbone)
    after = closed(tried, state, (0.2, 0.9))
    assert int(after["lora_active"]) == 0, "their mean decides, not one of them"
    after = closed(tried, after, (0.2, 0.6))
    assert int(after["lora_active"]) == 1
    assert int(closed(tried, after, (9.0, 9.0))["lora_active"]) == 1
    context = described(backbone)
    before = tried.classifier(context, state, {}).logits(context.train, torch.arange(3))
    switched = tried.classifier(context, after, {}).logits(context.train, torch.arange(3))
    assert_values(switched, before)
    payload = handed(tried, state) | {"lora_active": after["lora_active"]}
    found = tried.train(context, payload, {})
    for spec in GENERATOR:
        assert found.update[spec.name].equal(payload[spec.name]), "only the low-rank part trains now"
    assert any(not found.update[spec.name].equal(payload[spec.name]) for spec in LORA)
    assert found.metrics["lora_active"] == 1.0


def test_queries_may_be_the_means_of_runs_of_patches(backbone: Backbone) -> None:
    tried = method(m=3, queries="mean")
    own = started(tried, backbone)
    draws = torch.Generator().manual_seed(0)
    patches, texts = torch.randn(2, 7, 32, generator=draws), F.normalize(torch.randn(5, 16, generator=draws), dim=1)
    found = generated(own, patches, texts, tried.hyper, lora=False)
    for image, prompts in zip(patches, found, strict=True):
        means = torch.stack([image[0:3].mean(0), image[2:5].mean(0), image[4:7].mean(0)])
        # Of three patches in three runs, each is a run: the equations with a loop over patches.
        assert_values(prompts, literal_prompts(own, means, texts, 3))
    plain = method(m=3)
    assert float((found - generated(own, patches, texts, plain.hyper, lora=False)).abs().max()) > 1e-4


def test_the_low_rank_part_changes_what_attention_takes(backbone: Backbone) -> None:
    tried = method()
    own = started(tried, backbone)
    draws = torch.Generator().manual_seed(0)
    own |= {spec.name: torch.randn(own[spec.name].shape, generator=draws) * 0.3 for spec in LORA}
    patches, texts = torch.randn(1, 4, 32, generator=draws), F.normalize(torch.randn(5, 16, generator=draws), dim=1)
    found = generated(own, patches, texts, tried.hyper, lora=True)
    folded = dict(own)
    d = 32
    weights = own["in_weight"].clone()
    for number, of in enumerate("qkv"):
        inner = own[f"lora_{of}_a"] @ own[f"lora_{of}_b"]
        weights[number * d : (number + 1) * d] = weights[number * d : (number + 1) * d] @ (torch.eye(d) + inner.T)
    folded["in_weight"] = weights
    assert_values(found, generated(folded, patches, texts, tried.hyper, lora=False))


def test_a_round_that_is_fixed_sends_the_low_rank_part_alone(backbone: Backbone) -> None:
    tried = method(lora_from=3)
    assert "lora_active" not in {spec.name for spec in tried.state_tensors()}
    [early], [late] = tried.phases(2, 4), tried.phases(3, 4)
    assert {spec.name for spec in late.up} == {spec.name for spec in LORA}
    assert len(early.up) == len(GENERATOR) + len(LORA)
    payload = handed(tried, started(tried, backbone))
    found = tried.train(replace(described(backbone), round=3), payload, {})
    assert set(found.update) == {spec.name for spec in LORA}
    assert not any(spec.name.startswith("lora") for spec in method(lora="off").state_tensors())


def test_a_clients_own_descriptions_come_first_and_none_at_all_is_told(backbone: Backbone, caplog: Any) -> None:
    context = described(backbone)
    own, plain = method(), method()
    take_own_options(own, {"class_descriptions": json.dumps({"sun": ["a star"]})})
    state = started(plain, backbone)
    shown = [one.classifier(context, state, {}).logits(context.train, torch.arange(3)) for one in (own, plain)]
    assert not torch.allclose(shown[0], shown[1])
    with pytest.raises(MethodError, match="class_descriptions"):
        take_own_options(own, {"class_descriptions": "no json"})
    with caplog.at_level(logging.WARNING):
        plain.train(context.with_terms(class_descriptions={}), handed(plain, state), {})
    assert "no class is described" in caplog.text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"class_descriptions": {"dog": ["furry"]}}, "none of class_names"),
        ({"class_descriptions": {"cat": []}}, "has no words for 'cat'"),
        ({"class_descriptions": {"cat": ["soft", "soft"]}}, "twice"),
        ({"method": {"name": "fedmvp", "lora": "off", "lora_from": 3}}, "leave lora_from out"),
        ({"aggregation": {"server": {"optimizer": "adam"}}}, "mean loss"),
    ],
)
def test_what_is_refused(change: dict[str, Any], says: str, backbone: Backbone) -> None:
    raw = {"name": "f", "method": {"name": "fedmvp"}, "class_names": ["cat", "cow"]}
    assert resolve_spec(raw | {"class_descriptions": {"cat": ["soft"]}}).class_descriptions == {"cat": ["soft"]}
    assert "class_descriptions" not in resolve_spec(raw).model_dump()
    with pytest.raises(SpecError, match=says):
        resolve_spec(raw | change)
    with pytest.raises(MethodError, match="do not divide"):
        method(heads=5).dims(server_context(backbone, "a"))


def test_its_size_is_the_papers() -> None:
    sizes = {"d_v": 768, "d_e": 512, "r": 8, "d_v3": 3 * 768, "d_v4": 4 * 768, "d_v8": 8 * 768}
    count = [sum(torch.Size(spec.resolve(sizes)).numel() for spec in part) for part in (GENERATOR, LORA)]
    assert count == [9_845_760, 36_864]
