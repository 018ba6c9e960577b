"""The local and the personal methods of whole towers: what each trains, in which order, and what never leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.coordinator.problems import InvalidSpec
from promptfed.coordinator.resources.federations.operations import resolve
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import METHODS, check_fits, make_method, resolve_spec, runnable
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import LinearHead, head_start
from promptfed.shared.methods.core.interface import check_admission
from promptfed.shared.methods.core.objectives import Protection
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.methods.fedavg import step
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import BackboneShape, SpecError, TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import TorchDraws
from tests.support import literal_visual as literal
from tests.support.equality import assert_gradients, assert_values
from tests.support.literal import cross_entropy
from tests.support.literal_private import Silent
from tests.support.literal_towers import pooled
from tests.support.visual_clients import NAMES, ImageSplit, client_context, filled, server_context, small_backbone

RATE, HEAD = 0.05, 0.2


PERSONAL = ("singleset_full", "fedrep", "fedbabu", "fedrod", "perfedavg")


ROWS = torch.arange(6)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method_of(name: str, **options: Any) -> pf.Method:
    return make_method({"name": name, **options})


def task(backbone: Backbone, **changes: Any) -> Any:
    return client_context(backbone, **({"epochs": 1, "learning_rate": RATE, "optimizer": "sgd"} | changes))


def state_of(method: pf.Method, backbone: Backbone) -> Tensors:
    state = method.initial_state(server_context(backbone, "a"), initial_draws(3))
    draws = torch.Generator().manual_seed(8)
    return {name: tensor + torch.randn(tensor.shape, generator=draws) * 0.02 for name, tensor in state.items()}


def rate_of(name: str) -> float:
    """That of the head for its tensors, that of the tower for others."""
    return HEAD if "head" in name else RATE


def test_the_local_one_is_fedavg_without_sharing(backbone: Backbone) -> None:
    local, shared, context = method_of("singleset_full"), method_of("fedavg"), task(backbone)
    start = shared.initial_state(server_context(backbone, "a"), initial_draws(3))
    result = local.train(context, {}, {})
    assert result.update == {}
    for name, change in shared.train(context, start, {}).update.items():
        assert result.private[name.removeprefix("change.")].equal(change)
    again = local.train(replace(context, round=2), {}, result.private)
    assert not again.private["c_fc_weight"].equal(result.private["c_fc_weight"])
    assert (
        local.classifier(context, {}, {})
        .logits(context.train, ROWS)
        .equal(shared.classifier(context, start, {}).logits(context.train, ROWS))
    )
    assert (local.state_tensors(), local.disclosures) == ((), ())
    linear = method_of("singleset_full", head="linear").train(context, {}, {})
    assert {"head_weight", "head_bias", "c_fc_weight"} <= set(linear.private)


def test_fedrep_trains_the_head_under_the_received_tower_and_then_the_tower_under_that_head(backbone: Backbone) -> None:
    method, context = method_of("fedrep", head_epochs=3, head_learning_rate=HEAD), task(backbone)
    state = state_of(method, backbone)
    result = method.train(context, state, {})
    start = head_start(generator, 3, 3, 32)
    weight, bias = start["head_weight"], start["head_bias"]
    features = pooled(backbone, state, context.train.pixels)[0].detach()
    for _ in range(3):
        weight, bias = (tensor.detach().requires_grad_() for tensor in (weight, bias))
        slopes = torch.autograd.grad(F.cross_entropy(features @ weight.T + bias, context.train.labels), [weight, bias])
        weight, bias = weight - HEAD * slopes[0], bias - HEAD * slopes[1]
    assert_gradients(result.private["head_weight"] - start["head_weight"], weight.detach() - start["head_weight"])
    moving, leaves = pooled(backbone, state, context.train.pixels)
    loss = F.cross_entropy(moving @ weight.detach().T + bias.detach(), context.train.labels)
    slopes = torch.autograd.grad(loss, list(leaves.values()))
    for kind, slope in zip(leaves, slopes, strict=True):
        assert_gradients(result.update["change." + kind], -RATE * slope)
    assert not any("head" in name for name in (*result.update, *state))
    later = method.train(replace(context, round=2), state, result.private)
    assert not later.private["head_weight"].equal(result.private["head_weight"])


def test_fedbabu_s_head_never_changes_and_is_fine_tuned_for_use_alone(backbone: Backbone) -> None:
    method, context = method_of("fedbabu", finetune_epochs=2, head_learning_rate=HEAD), task(backbone)
    state, start = state_of(method, backbone), head_start(generator, 3, 3, 32)
    result = method.train(context, state, {})
    moving, leaves = pooled(backbone, state, context.train.pixels)
    loss = F.cross_entropy(moving @ start["head_weight"].T, context.train.labels)
    for kind, slope in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        assert_gradients(result.update["change." + kind], -RATE * slope)
    assert result.private == {}
    classifier = method.classifier(context, state, {})
    logits = classifier.logits(context.train, ROWS)
    some = replace(context, class_names=(NAMES[2], NAMES[0]), label_space=NAMES)
    assert_values(method.classifier(some, state, {}).logits(context.train, ROWS), logits[:, [2, 0]])
    tuned = F.cross_entropy(logits, context.train.labels)
    assert float(tuned) < float(loss.detach()), "on what it was tuned on"


def test_fedrod_trains_both_heads_in_one_step_and_keeps_one(backbone: Backbone) -> None:
    method, context = method_of("fedrod", head_learning_rate=HEAD), task(backbone)
    state = state_of(method, backbone)
    result = method.train(context, state, {})
    features, leaves = pooled(backbone, state, context.train.pixels)
    weight, bias = (state[name].clone().requires_grad_() for name in ("head_weight", "head_bias"))
    labels = context.train.labels
    counts = torch.bincount(labels, minlength=3)
    assert counts.tolist() == [0, 2, 4], "a class that the client does not have is in no softmax"
    generic = features @ weight.T + bias
    own, own_bias = torch.zeros(3, 32, requires_grad=True), torch.zeros(3, requires_grad=True)
    loss = F.cross_entropy(generic[:, 1:] + (counts[1:] / 6).log(), labels - 1)
    personal = F.cross_entropy(generic.detach() + features.detach() @ own.T + own_bias, labels)
    slopes = torch.autograd.grad(loss, [*leaves.values(), weight, bias])
    for name, slope in zip((*leaves, "head_weight", "head_bias"), slopes, strict=True):
        assert_gradients(result.update["change." + name], -rate_of(name) * slope)
    for name, slope in zip(("own_head", "own_bias"), torch.autograd.grad(personal, [own, own_bias]), strict=True):
        assert_gradients(result.private[name], -HEAD * slope)
    assert not any("own" in name for name in result.update)
    logits = method.classifier(context, state, result.private).logits(context.train, ROWS)
    by_generic = method.variants(context, state, result.private)["generic"].logits(context.train, ROWS)
    assert_values(by_generic, method.classifier(context, state, {}).logits(context.train, ROWS))
    assert_values(logits - by_generic, features.detach() @ result.private["own_head"].T + result.private["own_bias"])
    assert method.variants(context, state, {}) == {}


def test_perfedavg_s_step_with_two_rates() -> None:
    """L_1 = wᵀAw/2, L_2 = wᵀBw/2, α diagonal: W ← W − βB(1 − αA)w."""
    first, second = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([[1.0, -0.5], [-0.5, 2.0]])
    w, alphas, betas = torch.tensor([0.7, -0.4]), torch.tensor([0.05, 0.2]), torch.tensor([0.1, 0.3])
    wanted = w - betas * (second @ (w - alphas * (first @ w)))
    leaves = [value.clone().requires_grad_() for value in w.split(1)]

    def loss(form: Tensor) -> Tensor:
        whole = torch.cat(leaves)
        return whole @ form @ whole / 2

    told = step(loss, leaves, first, second, alphas.tolist(), betas.tolist())
    assert_values(torch.cat(leaves).detach(), wanted)
    ahead = w - alphas * (first @ w)
    assert (float(told), told.requires_grad) == (pytest.approx(float(ahead @ second @ ahead / 2)), False)


def test_perfedavg_looks_ahead_on_one_batch_and_steps_on_the_next(backbone: Backbone) -> None:
    method, context = method_of("perfedavg", head="linear", head_learning_rate=HEAD), task(backbone, batch_size=3)
    state = state_of(method, backbone)
    result = method.train(context, state, {})
    order = context.train.asked
    assert sorted(order) == list(range(6))

    def slopes_at(moved: Tensors, rows: list[int]) -> tuple[list[str], tuple[Tensor, ...]]:
        features, leaves = pooled(backbone, moved, context.train.pixels[rows])
        weight, bias = (moved[name].clone().requires_grad_() for name in ("head_weight", "head_bias"))
        loss = F.cross_entropy(features @ weight.T + bias, context.train.labels[rows])
        names = [*leaves, "head_weight", "head_bias"]
        return names, torch.autograd.grad(loss, [*leaves.values(), weight, bias])

    names, first = slopes_at(state, order[:3])
    ahead = state | {name: state[name] - rate_of(name) * slope for name, slope in zip(names, first, strict=True)}
    for name, slope in zip(*slopes_at(ahead, order[3:]), strict=True):
        assert_gradients(result.update["change." + name], -rate_of(name) * slope)
    with pytest.raises(pf.MethodError, match="needs two batches"):
        method.train(task(backbone, batch_size=6), state, {})
    rows = torch.arange(6)
    adapted = method.classifier(context, state, {}).logits(context.train, rows)
    nobody = replace(
        context, train=replace(context.train, pixels=context.train.pixels[:0], labels=context.train.labels[:0])
    )
    plain = method.classifier(nobody, state, {}).logits(context.train, rows)
    assert not adapted.equal(plain)
    features = pooled(backbone, state, context.train.pixels)[0]
    assert_values(plain, (features @ state["head_weight"].T + state["head_bias"]).detach())


def test_perfedavg_tells_how_far_it_is_and_ends_where_it_is_told_or_has_diverged(backbone: Backbone) -> None:
    """Six images one by one for two epochs are three pairs each; of five pairs of batches the last has no partner."""
    told, method = list[float](), method_of("perfedavg")
    state = state_of(method, backbone)
    context = replace(task(backbone, batch_size=1, epochs=2), progress=told.append)
    first = method.train(context, state, {})
    assert told == pytest.approx([0, 1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6])
    assert first.metrics["loss"] > 0
    counted, rows = list[int](), torch.arange(6)
    still = replace(task(backbone, batch_size=1, learning_rate=1e-9), count_trained=counted.append)
    found = method.train(still, state, {})
    assert counted == [sum(tensor.numel() for tensor in found.update.values())]
    seconds = still.train.asked[1::2]
    adapted = method.classifier(still, state, {}).logits(still.train, rows)
    wanted = F.cross_entropy(adapted[seconds], still.train.labels[seconds])
    assert found.metrics["loss"] == pytest.approx(float(wanted), rel=1e-3), "the mean over the second batches"
    turned = replace(still, class_names=(NAMES[2], NAMES[0]), label_space=NAMES)
    assert_values(method.classifier(turned, state, {}).logits(still.train, rows), adapted[:, [2, 0]])
    told.clear()
    method.train(replace(task(backbone, batch_size=2), progress=told.append), state, {})
    assert told == [0]
    for stop in (0, 3):
        told.clear()
        with pytest.raises(TaskCancelled):
            method.train(replace(context, cancelled=lambda stop=stop: len(told) >= stop), state, {})
        assert len(told) == stop
    method.train(task(backbone, batch_size=5), state, {})
    broken = {name: tensor * math.nan for name, tensor in state.items()}
    with pytest.raises(pf.MethodError, match="the loss is not finite in round 1: lower"):
        method.train(context, broken, {})


@pytest.mark.parametrize("name", PERSONAL)
def test_who_has_no_classifier_is_refused(backbone: Backbone, name: str) -> None:
    method = method_of(name, **({"head": "linear"} if name == "singleset_full" else {}))
    evaluator, server = pf.ClientInfo("referee", "evaluator", 0, NAMES), server_context(backbone, "a")
    if name in ("fedrod", "perfedavg"):
        check_admission(method, evaluator, None, lambda: server)
        assert method.takes_evaluators
        return
    with pytest.raises(pf.MethodError, match="an evaluator has none"):
        check_admission(method, evaluator, None, lambda: server)
    assert not method.takes_evaluators
    check_admission(method_of("singleset_full"), evaluator, None, lambda: server)


VPT = ("fedvpt", "fedvpt_deep", "singleset_vpt")


RATE_VISUAL_BASELINES = 0.1


def context_of(backbone: Backbone, **changes: Any) -> pf.ClientContext:
    return client_context(backbone, epochs=2, learning_rate=RATE_VISUAL_BASELINES, **changes)


def descended(start: Tensors, loss: Any) -> tuple[Tensors, float]:
    """Two steps of plain gradient descent over all images, and the loss before the second."""
    value = torch.tensor(0.0)
    for _ in range(2):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        value = loss(leaves)
        slopes = torch.autograd.grad(value, list(leaves.values()))
        start = {
            name: leaf.detach() - RATE_VISUAL_BASELINES * slope
            for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
        }
    return start, float(value.detach())


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
        server = pf.ServerContext(TrainingSpec(), shape, None, (), 0, 1)
        return make_method({"name": "fedmaple"} | hyper).dims(server)["depth"]

    assert [depth(12, 12), depth(12, 24), depth(3, 4), depth(12, 5), depth(12, 12, depth=11)] == [9, 9, 3, 5, 11]
    with pytest.raises(pf.MethodError, match="the image tower has 5 blocks"):
        depth(12, 5, depth=6)


def test_fedmaple_starts_with_small_prompts_and_maps_of_a_linear_layer() -> None:
    shape = BackboneShape(d_t=64, d_v=96, d_e=8, text_layers=3, vision_layers=4, context_length=77)
    server = pf.ServerContext(TrainingSpec(), shape, None, (), 0, 1)
    state = make_method({"name": "fedmaple", "m": 16}).initial_state(server, initial_draws(0))
    assert float(state["text_prompts"].std()) == pytest.approx(0.02, rel=0.05)
    for name in ("coupling_weight", "coupling_bias"):
        assert float(state[name].abs().max()) <= 1 / 8
        assert float(state[name].std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.06)


def vpt(name: str, **changes: Any) -> pf.Method:
    return make_method({"name": name, "m": 2} | changes)


def global_prompts(method: pf.Method, backbone: Backbone) -> Tensor:
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
    server = pf.ServerContext(TrainingSpec(), shape, None, (), 0, 1)
    state = make_method({"name": "fedvpt"}).initial_state(server, initial_draws(0))["visual_prompts"]
    assert state.shape == (1, 10, 768)
    assert 0.99 * 0.0625 < float(state.abs().max()) <= 0.0625, "the square root of 6/(3·16² + 768)"
    deep = make_method({"name": "fedvpt_deep"}).initial_state(server, initial_draws(0))["visual_prompts"]
    assert deep.shape == (12, 1, 768)
    with pytest.raises(pf.MethodError, match="patch_size"):
        make_method({"name": "fedvpt"}).dims(replace(server, shape=shape.model_copy(update={"patch_size": None})))


@pytest.mark.parametrize("name", ["plan", "fedmaple", "fedvpt"])
def test_a_resnet_is_refused_at_creation_with_what_it_can_run(name: str) -> None:
    shape = {"d_t": 512, "d_e": 1024, "text_layers": 12, "context_length": 77}
    spec = {"name": "eyes", "method": {"name": name}, "backbone": {"model": "RN50", "pretrained": "x", "shape": shape}}
    with pytest.raises(InvalidSpec) as refused:
        resolve(spec)
    [error] = refused.value.members["errors"]
    assert error["path"] == "backbone.shape"
    told, _, able = error["detail"].partition("; with this one run one of: ")
    assert "needs a vision transformer" in told
    assert {"promptfl", "fedpgp", "zero_shot"} <= set(able.split(", "))
    assert not {"plan", "fedmaple", "fedvpt", "fedvpt_deep", "singleset_vpt", "pfedpg"} & set(able.split(", "))
    resolve(spec | {"method": {"name": "promptfl"}})


def test_what_an_image_tower_alone_can_run() -> None:
    shape = BackboneShape(d_v=768, d_e=768, vision_layers=12, patch_size=16)
    assert runnable(shape) == ["pfedpg"]
    check_fits(make_method({"name": "fedvpt", "head": "linear"}), shape)
    with pytest.raises(pf.MethodError, match=r"needs a text tower; .* run one of: pfedpg"):
        check_fits(make_method({"name": "fedvpt"}), shape)


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


# The loss under privacy: each image's gradient is clipped by itself, in every method that protects.


IMAGES, RATE_PRIVATE_LOSSES = 5, 1.0


LEAST = {"fedclipadapter": 0.002}  # a clip below the gradients of all images; other methods: 0.02


ONE, SEVERAL = torch.tensor([0, 2, 0, 1, 2]), torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0], [-1, 1, 0], [0, -1, 1]])


def method_of_private_losses(name: str, several: bool) -> pf.Method:
    few = {"m": 2} if "m" in METHODS[name].Hyper.model_fields else {}
    return make_method({"name": name, **few, **({"task": "multi_label"} if several else {})})


def step_of_private_losses(
    backbone: Backbone, name: str, several: bool, rows: list[int], clip: float | None = None
) -> Tensors:
    """What one step of plain SGD on the images at ``rows`` adds to the method's start; with ``clip``, privately."""
    method, server = method_of_private_losses(name, several), server_context(backbone, "a")
    context = client_context(
        backbone, IMAGES, learning_rate=RATE_PRIVATE_LOSSES, epochs=1, batch_size=len(rows), optimizer="sgd"
    )
    assert isinstance(context.train, ImageSplit)
    labels = (SEVERAL.to(torch.int8) if several else ONE)[rows]
    train = ImageSplit(context.train.pixels[rows], labels, backbone)
    sizes = {"units": len(rows), "batch_size": len(rows), "epochs": 1}
    private = None if clip is None else Protection(clip, 1.0, stream=Silent(b"0" * 32), **sizes)
    context = replace(context, train=train, protection=private)
    state = method.initial_state_with(backbone, server, initial_draws(3))
    start = method.payload(state, method.phases(1, 4)[0], server.clients[0], server)
    update = method.train(context, start, {}).update
    return {key: update[key].double() - start[key].double() for key in update}


def minus(one: Tensors, other: Tensors) -> Tensors:
    return {key: one[key] - other[key] for key in one}


def close(one: Tensor, other: Tensor) -> bool:
    """Up to the rounding of parameters of a size about 1."""
    return float((one - other).abs().max()) <= 1e-3 * float(other.abs().max()) + 3e-7


def norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float((tensor**2).sum()) for tensor in tensors.values()))


def cases() -> list[Any]:
    able = [name for name in sorted(METHODS) if METHODS[name].can_protect() and not METHODS[name].personal]
    several = [name for name in able if METHODS[name].can_take_several_labels()]
    return [*((name, False) for name in able), *((name, True) for name in several)]


@pytest.mark.parametrize(("name", "several"), cases())
def test_each_images_gradient_is_clipped_by_itself(backbone: Backbone, name: str, several: bool) -> None:
    """The private step is the mean of the steps of single images, of which longer gradients are cut to the clip.

    A clip below all gradients gives their lengths, whatever rates the step has; a clip of next to nothing leaves what
    does not depend on images, such as a penalty.
    """
    every, least = list(range(IMAGES)), LEAST.get(name, 0.02)
    common = step_of_private_losses(backbone, name, several, every, clip=1e-12)
    plain, cut = (
        [minus(step_of_private_losses(backbone, name, several, [row], clip), common) for row in every]
        for clip in (None, least)
    )
    norms = [least * norm(one) / norm(other) for one, other in zip(plain, cut, strict=True)]
    assert min(norms) > least
    for one, other, length in zip(plain, cut, norms, strict=True):
        for key in one:  # one clip for all tensors
            assert close(one[key] * least / length, other[key]), key
    clip = sorted(norms)[IMAGES // 2]
    assert min(norms) < clip < max(norms)
    private = minus(step_of_private_losses(backbone, name, several, every, clip), common)
    for key, found in private.items():
        scaled = [own[key] * min(1.0, clip / length) for own, length in zip(plain, norms, strict=True)]
        wanted = torch.stack(scaled).sum(dim=0) / IMAGES
        assert close(found, wanted), key
