"""FedMaPLe and the VPT baselines against their definitions, values and gradients, and what is private to a client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.coordinator.operations.federations import resolve
from promptfed.coordinator.problems import InvalidSpec
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.methods import check_fits, make_method, resolve_spec, runnable
from promptfed.shared.methods.core.heads import LinearHead
from promptfed.shared.methods.core.interface import (
    ClientContext,
    ClientInfo,
    ClientUpdate,
    Method,
    MethodError,
    ServerContext,
    check_admission,
)
from promptfed.shared.methods.fedmaple import FedMaple
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, SpecError, TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import TorchDraws
from tests.support import literal_visual as literal
from tests.support.equality import assert_gradients, assert_values
from tests.support.literal import cross_entropy
from tests.support.textless import MODEL, textless_backbone
from tests.support.visual_clients import NAMES, client_context, filled, server_context, small_backbone

VPT = ("fedvpt", "fedvpt_deep", "singleset_vpt")
RATE = 0.1


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def context_of(backbone: Backbone, **changes: Any) -> ClientContext:
    return client_context(backbone, epochs=2, learning_rate=RATE, **changes)


def descended(start: Tensors, loss: Any) -> tuple[Tensors, float]:
    """Two steps of plain gradient descent over all images, and the loss before the second."""
    value = torch.tensor(0.0)
    for _ in range(2):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        value = loss(leaves)
        slopes = torch.autograd.grad(value, list(leaves.values()))
        start = {name: leaf.detach() - RATE * slope for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)}
    return start, float(value.detach())


# FedMaPLe


def literal_coupling(tensors: Tensors) -> Tensor:
    return torch.stack(
        [
            torch.stack([tensors["coupling_weight"][j] @ token + tensors["coupling_bias"][j] for token in tokens])
            for j, tokens in enumerate(tensors["text_prompts"])
        ]
    )


def test_fedmaple_trains_text_prompts_and_the_maps_to_visual_ones(backbone: Backbone) -> None:
    method, context = make_method({"name": "fedmaple", "m": 2}), context_of(backbone)
    server = server_context(backbone, "a")
    shapes = {name: tuple(tensor.shape) for name, tensor in method.initial_state(server, TorchDraws()).items()}
    assert shapes == {"text_prompts": (2, 2, 24), "coupling_weight": (2, 32, 24), "coupling_bias": (2, 32)}
    payload = filled(shapes, 4, 0.3)
    found = method.train(context, payload, {})
    split = context.train

    def loss(leaves: Tensors) -> Tensor:
        prompts = leaves["text_prompts"], literal_coupling(leaves)
        return literal.local_loss(backbone, *prompts, list(NAMES), split.pixels, split.labels, None, 0.0)

    wanted, value = descended(payload, loss)
    assert found.metrics["loss"] == pytest.approx(value, rel=1e-5)
    assert set(found.update) == set(wanted)
    for name, tensor in wanted.items():
        assert_gradients(found.update[name] - payload[name], tensor - payload[name])
    scores = method.classifier(context, payload, {}).logits(split, torch.tensor([4, 1]))
    with torch.no_grad():
        prompts = payload["text_prompts"], literal_coupling(payload)
        rows = [literal.logits(backbone, *prompts, list(NAMES), split.pixels[row]) for row in (4, 1)]
    assert_values(scores, torch.stack(rows))


def test_fedmaple_s_depth() -> None:
    def depth(text: int, vision: int, **hyper: Any) -> int:
        shape = BackboneShape(d_t=8, d_v=8, d_e=8, text_layers=text, vision_layers=vision, context_length=77)
        server = ServerContext(TrainingSpec(), shape, None, (), 0, 1)
        return make_method({"name": "fedmaple"} | hyper).dims(server)["depth"]

    assert [depth(12, 12), depth(12, 24), depth(3, 4), depth(12, 5), depth(12, 12, depth=11)] == [9, 9, 3, 5, 11]
    with pytest.raises(MethodError, match="the image tower has 5 blocks"):
        depth(12, 5, depth=6)


def test_fedmaple_starts_with_small_prompts_and_maps_of_a_linear_layer() -> None:
    shape = BackboneShape(d_t=64, d_v=96, d_e=8, text_layers=3, vision_layers=4, context_length=77)
    server = ServerContext(TrainingSpec(), shape, None, (), 0, 1)
    state = make_method({"name": "fedmaple", "m": 16}).initial_state(server, initial_draws(0))
    assert float(state["text_prompts"].std()) == pytest.approx(0.02, rel=0.05)
    for name in ("coupling_weight", "coupling_bias"):
        assert float(state[name].abs().max()) <= 1 / 8
        assert float(state[name].std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.06)


@pytest.mark.parametrize("name", ["fedmaple", "fedvpt", "fedvpt_deep"])
def test_the_coordinator_takes_the_weighted_mean(backbone: Backbone, name: str) -> None:
    method, server = make_method({"name": name, "m": 2}), server_context(backbone, *"ab")
    state = method.initial_state(server, TorchDraws())
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    sent = [filled(shapes, seed, 1.0) for seed in (1, 2)]
    updates = [ClientUpdate("a", 0.25, sent[0]), ClientUpdate("b", 0.75, sent[1])]
    after = method.aggregate(state, method.phases(1, 1)[0], iter(updates), weighted_mean, server)
    for key, tensor in after.items():
        assert_values(tensor, 0.25 * sent[0][key] + 0.75 * sent[1][key])


# VPT


def vpt(name: str, **changes: Any) -> Method:
    return make_method({"name": name, "m": 2} | changes)


def global_prompts(method: Method, backbone: Backbone) -> Tensor:
    return method.initial_state(server_context(backbone, "a"), initial_draws(3))["visual_prompts"]


@pytest.mark.parametrize(("name", "depth"), [("fedvpt", 1), ("fedvpt_deep", 3)])
def test_text_head(backbone: Backbone, name: str, depth: int) -> None:
    method, context = vpt(name), context_of(backbone)
    payload = {"visual_prompts": global_prompts(method, backbone)}
    assert payload["visual_prompts"].shape == (depth, 2, 32)
    found = method.train(context, payload, {})
    split = context.train
    text = backbone.encode_text([f"a photo of a {name.replace('_', ' ')}." for name in NAMES])

    def scores(prompts: Tensor, image: Tensor) -> Tensor:
        return backbone.logit_scale * text @ literal.image_feature(backbone, prompts, image)

    def loss(leaves: Tensors) -> Tensor:
        rows = [scores(leaves["visual_prompts"], image) for image in split.pixels]
        return torch.stack([cross_entropy(row, int(y)) for row, y in zip(rows, split.labels, strict=True)]).mean()

    wanted, value = descended(payload, loss)
    assert found.metrics["loss"] == pytest.approx(value, rel=1e-5)
    assert_gradients(found.update["visual_prompts"] - payload["visual_prompts"],
                     wanted["visual_prompts"] - payload["visual_prompts"])  # fmt: skip
    assert found.private == {}
    logits = method.classifier(context, payload, {}).logits(split, torch.tensor([2]))
    assert_values(logits[0], scores(payload["visual_prompts"], split.pixels[2]))


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("name", VPT)
def test_linear_head(backbone: Backbone, name: str, projected: bool) -> None:
    method, context = vpt(name, head="linear", projected=projected), context_of(backbone)
    assert not method.needs.text_tower
    assert method.personal
    start = global_prompts(vpt("fedvpt_deep" if name == "fedvpt_deep" else "fedvpt"), backbone)
    payload = {} if name == "singleset_vpt" else {"visual_prompts": start}
    head = LinearHead.start(context, 16 if projected else 32)
    split, projection = context.train, backbone.model.visual.proj

    def scores(leaves: Tensors, image: Tensor) -> Tensor:
        feature = literal.pooled_feature(backbone, leaves["visual_prompts"], image)
        return leaves["head_weight"] @ (feature @ projection if projected else feature) + leaves["head_bias"]

    def loss(leaves: Tensors) -> Tensor:
        rows = [scores(leaves, image) for image in split.pixels]
        return torch.stack([cross_entropy(row, int(y)) for row, y in zip(rows, split.labels, strict=True)]).mean()

    before = {"visual_prompts": start, "head_weight": head.weight, "head_bias": head.bias}
    wanted, value = descended(before, loss)
    found = method.train(context, payload, {})
    everything = found.update | found.private
    assert found.metrics["loss"] == pytest.approx(value, rel=1e-5)
    assert set(everything) == set(before) | {"head_classes"}
    assert {"head_weight", "head_bias"} <= set(found.private), "a head must not travel"
    assert ("visual_prompts" in found.private) == (name == "singleset_vpt")
    for key, tensor in wanted.items():
        assert_gradients(everything[key] - before[key], tensor - before[key])
    after = method.classifier(context, payload | found.update, found.private).logits(split, torch.tensor([5]))
    with torch.no_grad():
        assert_values(after[0], scores(wanted, split.pixels[5]))


def test_singleset_vpt_starts_where_fedvpt_starts_and_sends_nothing(backbone: Backbone) -> None:
    local, shared, context = vpt("singleset_vpt"), vpt("fedvpt"), context_of(backbone)
    payload = {"visual_prompts": global_prompts(shared, backbone)}
    rows = torch.arange(6)
    start = local.classifier(context, {}, {}).logits(context.train, rows)
    assert start.equal(shared.classifier(context, payload, {}).logits(context.train, rows))
    first = local.train(context, {}, {})
    assert first.update == {}
    assert first.private["visual_prompts"].equal(shared.train(context, payload, {}).update["visual_prompts"])
    second = local.train(replace(context, round=2), {}, first.private)
    assert not second.private["visual_prompts"].equal(first.private["visual_prompts"])
    assert not local.classifier(context, {}, second.private).logits(context.train, rows).equal(start)
    assert local.state_tensors() == ()
    assert local.personal


def test_vpt_s_start() -> None:
    shape = BackboneShape(d_t=8, d_v=768, d_e=8, vision_layers=12, patch_size=16)
    server = ServerContext(TrainingSpec(), shape, None, (), 0, 1)
    state = make_method({"name": "fedvpt"}).initial_state(server, initial_draws(0))["visual_prompts"]
    assert state.shape == (1, 10, 768)
    assert 0.99 * 0.0625 < float(state.abs().max()) <= 0.0625, "the square root of 6/(3·16² + 768)"
    deep = make_method({"name": "fedvpt_deep"}).initial_state(server, initial_draws(0))["visual_prompts"]
    assert deep.shape == (12, 1, 768)
    with pytest.raises(MethodError, match="patch_size"):
        make_method({"name": "fedvpt"}).dims(replace(server, shape=shape.model_copy(update={"patch_size": None})))


@pytest.mark.parametrize("name", VPT)
def test_an_evaluator_has_no_linear_head(backbone: Backbone, name: str) -> None:
    server = server_context(backbone, "a")
    evaluator = ClientInfo("referee", "evaluator", 0, NAMES)
    check_admission(vpt(name), evaluator, None, lambda: server)
    with pytest.raises(MethodError, match="an evaluator has none"):
        check_admission(vpt(name, head="linear"), evaluator, None, lambda: server)


def test_prompts_need_a_vision_transformer(backbone: Backbone) -> None:
    shape = shape_of(backbone).model_copy(update={"d_v": None, "vision_layers": None, "patch_size": None})
    server = replace(server_context(backbone, "a"), shape=shape)
    for name in (*VPT, "fedmaple"):
        with pytest.raises(MethodError, match="needs a vision transformer"):
            make_method({"name": name, "m": 2}).initial_state(server, TorchDraws())


def test_the_coupling_is_one_map_for_each_block() -> None:
    assert FedMaple.needs.vision_transformer
    assert not FedMaple.needs.cached_features


@pytest.mark.parametrize("name", ["plan", "fedmaple", "fedvpt"])
def test_a_resnet_is_refused_at_creation_with_what_it_can_run(name: str) -> None:
    shape = {"d_t": 512, "d_e": 1024, "text_layers": 12, "context_length": 77}
    spec = {"name": "eyes", "method": {"name": name}, "backbone": {"model": "RN50", "pretrained": "x", "shape": shape}}
    with pytest.raises(InvalidSpec) as refused:
        resolve(spec)
    [error] = refused.value.members["errors"]
    assert error["path"] == "backbone.shape"
    told, _, able = error["detail"].partition("With this backbone run one of: ")
    assert "needs a vision transformer" in told
    assert {"promptfl", "fedpgp", "zero_shot"} <= set(able.split(", "))
    assert not {"plan", "fedmaple", "fedvpt", "fedvpt_deep", "singleset_vpt", "pfedpg"} & set(able.split(", "))
    resolve(spec | {"method": {"name": "promptfl"}})


def test_what_an_image_tower_alone_can_run() -> None:
    shape = BackboneShape(d_v=768, d_e=768, vision_layers=12, patch_size=16)
    assert runnable(shape) == ["pfedpg"]
    check_fits(make_method({"name": "fedvpt", "head": "linear"}), shape)
    with pytest.raises(MethodError, match=r"needs a text tower; .* run one of: pfedpg"):
        check_fits(make_method({"name": "fedvpt"}), shape)


@pytest.mark.parametrize("name", VPT)
def test_a_linear_head_needs_no_text_tower_and_stays_at_home(name: str) -> None:
    data = "symbols:sketch?topic=weather&per_class=2&test_per_class=1&partition=iid&clients=2&client={}"
    spec = {
        "name": "textless",
        "method": {"name": name, "m": 2, "head": "linear"},
        "backbone": {"model": MODEL, "pretrained": None},
        "rounds": 2,
        "training": {"learning_rate": 0.25, "batch_size": 8},
    }
    sites = [Site(f"site-{k}", data.format(k)) for k in range(2)]
    found = simulate(spec, sites, backbone=textless_backbone(), allow_backbone=True)
    assert set(found.state) == (set() if name == "singleset_vpt" else {"visual_prompts"})
    assert [len(phase["counted"]) for report in found.reports[1:] for phase in report["phases"]] == [2, 2]
    assert all(one.zero_shot is None for one in found.final())
    assert len(found.final()) == 2


def test_a_linear_head_alone_is_a_linear_classifier(backbone: Backbone) -> None:
    """What prompts add to a head is seen beside the head without them."""
    method = make_method({"name": "singleset_vpt", "head": "linear", "m": 0})
    context = context_of(backbone)
    result = method.train(context, {}, {})
    features = backbone.encode_images_prompted(
        context.train.pixels, torch.zeros(1, 0, backbone.d_v), pooled=True, normalize=False
    )
    plain = backbone.model.visual.ln_post  # the pooled feature is that of the untouched tower
    assert plain is not None
    untouched = backbone.encode_images(context.train.pixels)
    through = backbone.encode_images_prompted(context.train.pixels, torch.zeros(1, 0, backbone.d_v))
    assert_values(through, untouched)
    start = LinearHead.of(context, {}, features.shape[1])
    weight, bias = (tensor.clone() for tensor in start.parameters)

    def loss(leaves: Tensors) -> Tensor:
        scores = features @ leaves["weight"].T + leaves["bias"]
        rows = [cross_entropy(row, int(label)) for row, label in zip(scores, context.train.labels, strict=True)]
        return torch.stack(rows).mean()

    wanted, _ = descended({"weight": weight, "bias": bias}, loss)
    assert_values(result.private["head_weight"], wanted["weight"])
    assert_values(result.private["head_bias"], wanted["bias"])
    for refused in ({"name": "fedvpt", "head": "linear", "m": 0}, {"name": "singleset_vpt", "m": 0}):
        with pytest.raises(SpecError, match="m: 0 leaves a linear head alone"):
            resolve_spec({"name": "x", "method": refused})
