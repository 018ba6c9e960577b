"""FedAvg and FedProx of the image tower against loops on a copy of open_clip's own, and what travels of it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.coordinator.aggregation.rules import ServerOptimizer, fresh_moments, moment_tensors
from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientUpdate, Method, MethodError, ServerContext
from promptfed.shared.methods.core.tower import TrainedTower
from promptfed.shared.methods.zero_shot import ZeroShot
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.sections import ServerOptimizerSpec
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import tensors_of
from tests.support.equality import assert_gradients, assert_values
from tests.support.literal_towers import kind_of
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone

RATE = 0.05
TRAINED = ("all", "last_k", "norms", "biases")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method_of(name: str = "fedavg", **options: Any) -> Method:
    return make_method({"name": name, **options})


def state_of(method: Method, backbone: Backbone, scale: float = 0.02) -> Tensors:
    """A state that has moved from its start."""
    state = method.initial_state(server_context(backbone, "a"), initial_draws(3))
    draws = torch.Generator().manual_seed(8)
    return {name: tensor + torch.randn(tensor.shape, generator=draws) * scale for name, tensor in state.items()}


def task(backbone: Backbone, **changes: Any) -> Any:
    return client_context(backbone, **({"epochs": 2, "learning_rate": RATE, "optimizer": "sgd"} | changes))


def trained_copy(backbone: Backbone, state: Tensors, kinds: set[str]) -> tuple[Any, dict[str, Tensor]]:
    """A copy of open_clip's tower with the state's changes in it, and its parameters that are of ``kinds``."""
    visual = deepcopy(backbone.model.visual).requires_grad_(False)
    blocks, leaves = len(visual.transformer.resblocks), {}
    for name, parameter in visual.named_parameters():
        kind, number = kind_of(name)
        if kind not in kinds:
            continue
        if number is None:
            parameter.data += state[kind]
        elif (place := number - (blocks - len(state[kind]))) >= 0:
            parameter.data += state[kind][place]
        else:
            continue
        leaves[name] = parameter.requires_grad_()
    return visual, leaves


def looped(backbone: Backbone, context: Any, state: Tensors, kinds: set[str], extra: Any = None) -> Tensors:
    """Two steps of plain gradient descent on a copy of the tower, under the template's text; what changed, stacked."""
    visual, leaves = trained_copy(backbone, state, kinds)
    begun = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    text = backbone.encode_text([f"a photo of a {name.replace('_', ' ')}." for name in NAMES])
    for _ in range(2):
        feature = F.normalize(visual(context.train.pixels), dim=-1)
        loss = F.cross_entropy(backbone.logit_scale * feature @ text.T, context.train.labels)
        if extra is not None:
            loss = loss + extra([(leaf, begun[name]) for name, leaf in leaves.items()])
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        for leaf, slope in zip(leaves.values(), slopes, strict=True):
            leaf.data -= RATE * slope
    changes: dict[str, list[Tensor]] = {}
    for name, leaf in leaves.items():
        kind, number = kind_of(name)
        change = (leaf - begun[name]).detach()
        changes.setdefault(kind, []).append(change if number is None else change.unsqueeze(0))
    return {kind: torch.cat(parts) for kind, parts in changes.items()}


@pytest.mark.parametrize("trainable", TRAINED)
def test_training_is_a_loop_on_a_copy_of_open_clip_s_tower(backbone: Backbone, trainable: str) -> None:
    method, context = method_of(trainable=trainable, k=2), task(backbone)
    state = state_of(method, backbone)
    found = method.train(context, state, {})
    wanted = looped(backbone, context, state, set(state))
    assert set(found.update) == {"change." + name for name in state}
    for kind, change in wanted.items():
        assert_gradients(found.update["change." + kind], change)
    assert found.private == {}
    assert all(weight.grad is None for weight in backbone.model.parameters())


def test_the_proximal_term_holds_what_travels_near_what_was_received(backbone: Backbone) -> None:
    context, state = task(backbone), state_of(method_of(), backbone)
    found = method_of("fedprox", mu=1.0).train(context, state, {}).update

    def term(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        return sum(((leaf - begun).square().sum() for leaf, begun in pairs), torch.tensor(0.0)) / 2

    for kind, change in looped(backbone, context, state, set(state), term).items():
        assert_gradients(found["change." + kind], change)
    plain = method_of().train(context, state, {}).update
    assert not all(found[name].equal(plain[name]) for name in plain)
    free = method_of("fedprox", mu=0.0).train(context, state, {}).update
    assert all(free[name].equal(plain[name]) for name in plain)


def test_no_change_is_zero_shot(backbone: Backbone) -> None:
    context, rows = task(backbone), torch.arange(6)
    template = ZeroShot(ZeroShot.Hyper()).classifier(context, {}, {}).logits(context.train, rows)
    for options in ({}, {"trainable": "last_k"}, {"private": "norms"}, {"checkpoint": 2}):
        method = method_of(**options)
        start = method.initial_state(server_context(backbone, "a"), initial_draws(3))
        assert all(not bool(change.any()) for change in start.values())
        assert_values(method.classifier(context, start, {}).logits(context.train, rows), template)


def test_the_mean_of_changes_leads_to_the_mean_of_weights(backbone: Backbone) -> None:
    method = method_of()
    state, server = state_of(method, backbone), server_context(backbone, "a", "b")
    contexts = [task(backbone, client=name) for name in "ab"]
    updates = [method.train(context, state, {}).update for context in contexts]
    [phase] = method.phases(1, 4)
    counted = [
        ClientUpdate(name, share, update) for name, share, update in zip("ab", (0.75, 0.25), updates, strict=True)
    ]
    after = method.aggregate(dict(state), phase, counted, weighted_mean, server)
    for kind in state:
        theirs = [state[kind] + update["change." + kind] for update in updates]
        assert_values(after[kind], 0.75 * theirs[0] + 0.25 * theirs[1], 1e-7)


def test_a_server_optimizer_steps_on_the_mean_change(backbone: Backbone) -> None:
    method = method_of(trainable="biases")
    state, server = state_of(method, backbone), server_context(backbone, "a")
    update = {"change." + name: torch.full_like(tensor, 0.5) for name, tensor in state.items()}
    given = ServerOptimizerSpec(optimizer="momentum", learning_rate=2.0, momentum=0.9)
    moments = tensors_of(fresh_moments(given, moment_tensors(given, method, 4), method.dims(server)))
    optimizer = ServerOptimizer(given, state | moments)
    [phase] = method.phases(1, 4)
    counted = [ClientUpdate("a", 1.0, update)]
    after = method.aggregate(state, phase, counted, optimizer.wrap(weighted_mean), server)
    assert_values(after["ln_1_bias"], state["ln_1_bias"] + 1.0)
    assert set(optimizer.moments) == set(moments)


def test_the_last_block_touches_nothing_else(backbone: Backbone) -> None:
    method = method_of(trainable="last_k", k=1)
    state = state_of(method, backbone)
    assert all(len(state[kind]) == 1 for kind in ("in_proj_weight", "c_fc_bias"))
    assert not {"conv1_weight", "ln_pre_weight", "positional_embedding"} & set(state)
    tower = TrainedTower.of(backbone, method.hyper, state)
    tower.features(task(backbone).train.pixels, projected=True, normalize=True)
    frozen, changed = (dict(module.named_parameters()) for module in (backbone.model.visual, tower.tower.module))
    assert {name for name in frozen if not changed[name].equal(frozen[name])} == {
        *(name for name in frozen if name.startswith("transformer.resblocks.2.")),
        "ln_post.weight",
        "ln_post.bias",
        "proj",
    }
    assert all(changed[name] is frozen[name] for name in frozen if name.startswith("transformer.resblocks.1."))


def test_norms_of_one_s_own_never_leave(backbone: Backbone) -> None:
    method, context = method_of(private="norms"), task(backbone)
    assert method.personal
    state = state_of(method, backbone)
    assert not any("ln_" in name for name in state)
    first = method.train(context, state, {})
    assert not any("ln_" in name for name in first.update)
    assert set(first.private) == set(
        method_of(trainable="norms").initial_state(server_context(backbone, "a"), initial_draws(3))
    )
    second = method.train(replace(context, round=2), state, first.private)
    assert not second.private["ln_1_weight"].equal(first.private["ln_1_weight"])
    whole = method_of().train(context, state | {k: torch.zeros_like(v) for k, v in first.private.items()}, {})
    for kind, own in first.private.items():
        assert_gradients(own, whole.update["change." + kind])
    rows = torch.arange(6)
    logits = [method.classifier(context, state, own).logits(context.train, rows) for own in ({}, first.private)]
    assert not logits[0].equal(logits[1])


@pytest.mark.parametrize("options", [{"trainable": "none"}, {"trainable": "none", "projected": True}, {}])
def test_a_shared_linear_head_is_trained_and_averaged(backbone: Backbone, options: dict[str, Any]) -> None:
    method, context = method_of(head="linear", **options), task(backbone, learning_rate=0.5)
    state = state_of(method, backbone)
    width = 16 if options.get("projected") else 32
    assert state["head_weight"].shape == (3, width)
    found = method.train(context, state, {})
    if options:  # nothing but the head: a linear probe
        visual, features = backbone.model.visual, backbone.encode_images(context.train.pixels, normalize=False)
        if not options.get("projected"):
            features = visual.ln_post(visual.transformer(visual._embeds(context.train.pixels)))[:, 0]
        weight, bias = (state[name].clone().requires_grad_() for name in ("head_weight", "head_bias"))
        for _ in range(2):
            loss = F.cross_entropy(features @ weight.T + bias, context.train.labels)
            slopes = torch.autograd.grad(loss, [weight, bias])
            weight, bias = (
                (leaf - 0.5 * slope).detach().requires_grad_()
                for leaf, slope in zip((weight, bias), slopes, strict=True)
            )
        assert_gradients(found.update["change.head_weight"], weight - state["head_weight"])
        assert_gradients(found.update["change.head_bias"], bias - state["head_bias"])
        assert set(found.update) == {"change.head_weight", "change.head_bias"}
        assert sorted(context.train.asked) == list(range(6)), "each image is looked at once"
    assert not method.needs.text_tower
    logits = method.classifier(context, state, {}).logits(context.train, torch.arange(6))
    turned = replace(context, class_names=(NAMES[2], NAMES[0]), label_space=NAMES)
    some = method.classifier(turned, state, {}).logits(context.train, torch.arange(6))
    assert_values(some, logits[:, [2, 0]])
    with pytest.raises(MethodError, match="cannot score 'moon'"):
        method.classifier(replace(turned, class_names=("moon", "sun")), state, {})


def numbers(shape: BackboneShape, **options: Any) -> int:
    context = ServerContext(TrainingSpec(), shape, tuple(f"c{i}" for i in range(options.pop("classes", 10))), (), 0, 1)
    method = method_of(**options)
    dims = method.dims(context)
    return sum(torch.Size(spec.resolve(dims)).numel() for spec in method.state_tensors())


def test_how_many_numbers_are_trained() -> None:
    named = [shape_by_name(name) for name in ("ViT-B-16", "ViT-B-32", "ViT-L-14", "promptfed-tiny")]
    base, coarse, large, tiny = (shape for shape in named if shape is not None)
    assert [numbers(shape) for shape in (base, coarse, large, tiny)] == [86_192_640, 87_849_216, 303_966_208, 835_328]
    assert numbers(base, head="linear") == 85_807_114
    assert numbers(base, trainable="last_k") == 7_482_624
    assert numbers(large, trainable="last_k") == 13_384_704
    assert (numbers(base, trainable="norms"), numbers(base, trainable="biases")) == (39_936, 102_912)
    assert numbers(base, trainable="none", head="linear", classes=65) == 49_985


def test_changes_may_travel_in_sixteen_bits(backbone: Backbone) -> None:
    method, plain, context = method_of(transport="bfloat16"), method_of(), task(backbone)
    state, server = state_of(plain, backbone), server_context(backbone, "a")
    [phase] = method.phases(1, 4)
    assert {spec.dtype for spec in (*phase.up, *phase.down)} == {"bfloat16"}
    assert {spec.dtype for spec in method.state_tensors()} == {"float32"}
    payload = method.payload(state, phase, server.clients[0], server)
    assert {tensor.dtype for tensor in payload.values()} == {torch.bfloat16}
    first = next(iter(payload))
    state[first] += 1.0  # in place: a payload depends on nothing but what it is made of
    assert method.payload(state, phase, server.clients[0], server)[first].equal(state[first].bfloat16())
    state[first] -= 1.0
    received = {name: tensor.float() for name, tensor in payload.items()}
    found = method.train(context, payload, {}).update
    for name, change in plain.train(context, received, {}).update.items():
        assert found[name].equal(change), "the client computes in float32"


def test_a_tower_without_plain_weights_is_refused(backbone: Backbone) -> None:
    shape = shape_of(backbone).model_copy(update={"mlp_width": None})
    with pytest.raises(MethodError, match="plain vision transformer"):
        method_of().check_backbone(shape)
    server = server_context(backbone, "a")
    with pytest.raises(MethodError, match="has 3 blocks: lower it"):
        method_of(trainable="last_k", k=4).initial_state(server, initial_draws(3))
