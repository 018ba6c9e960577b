"""FedAvg and FedProx of the image tower against loops on a copy of open_clip's own, and what travels of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.coordinator.aggregation.rules import ServerOptimizer, fresh_moments, moment_tensors, weighted_mean
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.methods import fedavg, make_method, resolve_spec
from promptfed.shared.methods.core import generalization
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.generalization import Subset, adjusted, held_out
from promptfed.shared.methods.core.heads import HEAD_RATE, head_start
from promptfed.shared.methods.core.tower import TrainedTower, tower_dims
from promptfed.shared.methods.fedrep import ABSENT, log_shares
from promptfed.shared.methods.zero_shot import ZeroShot
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.sections import ServerOptimizerSpec
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import tensors_of
from tests.support.equality import assert_gradients, assert_values
from tests.support.literal_towers import kind_of, pooled
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone, split_of

RATE = 0.05


TRAINED = ("all", "last_k", "norms", "biases")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method_of(name: str = "fedavg", **options: Any) -> pf.Method:
    return make_method({"name": name, **options})


def start_of(method: pf.Method, backbone: Backbone, clients: str = "a") -> Tensors:
    return method.initial_state(server_context(backbone, *clients), initial_draws(3))


def state_of(method: pf.Method, backbone: Backbone, scale: float = 0.02, clients: str = "a") -> Tensors:
    """A state that has moved from its start; GA's weights and round have not."""
    draws, state = torch.Generator().manual_seed(8), start_of(method, backbone, clients)
    return {
        name: tensor if name.startswith("ga_") else tensor + torch.randn(tensor.shape, generator=draws) * scale
        for name, tensor in state.items()
    }


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
    for options in ({}, {"trainable": "last_k"}):
        method = method_of(**options)
        start = start_of(method, backbone)
        assert all(not bool(change.any()) for change in start.values())
        assert_values(method.classifier(context, start, {}).logits(context.train, rows), template)


def test_the_mean_of_changes_leads_to_the_mean_of_weights(backbone: Backbone) -> None:
    method = method_of()
    state, server = state_of(method, backbone), server_context(backbone, "a", "b")
    contexts = [task(backbone, client=name) for name in "ab"]
    updates = [method.train(context, state, {}).update for context in contexts]
    [phase] = method.phases(1, 4)
    counted = [
        pf.ClientUpdate(name, share, update) for name, share, update in zip("ab", (0.75, 0.25), updates, strict=True)
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
    counted = [pf.ClientUpdate("a", 1.0, update)]
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
    with pytest.raises(pf.MethodError, match="cannot score 'moon'"):
        method.classifier(replace(turned, class_names=("moon", "sun")), state, {})


def test_a_tower_without_plain_weights_is_refused(backbone: Backbone) -> None:
    shape = shape_of(backbone).model_copy(update={"mlp_width": None})
    with pytest.raises(pf.MethodError, match="plain vision transformer"):
        method_of().check_backbone(shape)
    server = server_context(backbone, "a")
    with pytest.raises(pf.MethodError, match="has 3 blocks: lower it"):
        method_of(trainable="last_k", k=4).initial_state(server, initial_draws(3))
    assert len(method_of(trainable="last_k", k=3).initial_state(server, initial_draws(3))["c_fc_weight"]) == 3
    for lacking in ("d_v", "vision_layers", "mlp_width", "positions", "patch_size"):
        shape = shape_of(backbone).model_copy(update={lacking: None})
        said = "needs square patches" if lacking == "patch_size" else "is none of the plain kind"
        with pytest.raises(pf.MethodError, match=said):
            tower_dims("fedavg", "all", 1, replace(server, shape=shape))


def test_a_shared_head_fits_what_the_tower_pools(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, text = method_of(head="linear"), method_of()
    projected = method_of(head="linear", projected=True)
    for method in (linear, text, projected):
        method.check_texts(backbone, NAMES, "a {}.")
    monkeypatch.setattr(type(backbone), "d_pooled", property(lambda self: self.d_v + 1))
    for method in (text, projected):
        method.check_texts(backbone, NAMES, "a {}.")
    with pytest.raises(pf.MethodError, match=r"fedavg: .* pools \d+ numbers of the image tower's \d+: take projected"):
        linear.check_texts(backbone, NAMES, "a {}.")


def lora(**options: Any) -> pf.Method:
    return make_method({"name": "fedlora", "dropout": 0.0, **options})


def changed_copy(backbone: Backbone, factors: Tensors, gamma: float) -> Any:
    """A copy of open_clip's model whose attention is W + γ·B·A, with gradients to the factors."""
    model = deepcopy(backbone.model)
    for tower, blocks in (("visual", model.visual.transformer.resblocks), ("text", model.transformer.resblocks)):
        if f"{tower}_a" not in factors:
            continue
        a, b = factors[f"{tower}_a"], factors[f"{tower}_b"]
        for place in range(len(a)):
            attention = blocks[len(blocks) - len(a) + place].attn
            parts = [gamma * b[place, i] @ a[place, i] for i in range(a.shape[1])]
            weight = attention.in_proj_weight.detach() + torch.cat(parts)
            del attention.in_proj_weight
            attention.in_proj_weight = weight
    return model


def literal_logits(backbone: Backbone, factors: Tensors, pixels: Tensor, gamma: float) -> Tensor:
    model = changed_copy(backbone, factors, gamma)
    ids = backbone.tokens([f"a photo of a {name.replace('_', ' ')}." for name in NAMES])
    image, text = model.encode_image(pixels), model.encode_text(ids)
    return backbone.logit_scale * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T


LORAS = [
    {}, {"alpha": 2.0}, {"blocks": "last_k", "k": 1}, {"towers": "text"}, {"towers": "visual"},
]  # fmt: skip


@pytest.mark.parametrize("options", LORAS)
def test_training_is_descent_on_open_clip_s_towers_with_changed_attention(backbone: Backbone, options: Any) -> None:
    method, context = lora(**options), task(backbone)
    state = state_of(method, backbone, 0.1)
    gamma = options.get("alpha", 1.0) / math.sqrt(2)
    found = method.train(context, state, {}).update
    factors = {name: tensor.clone() for name, tensor in state.items()}
    torch.backends.mha.set_fastpath_enabled(False)  # its kernel knows no gradient towards a tensor in a weight's place
    try:
        for _ in range(2):
            leaves = {name: factor.detach().requires_grad_() for name, factor in factors.items()}
            logits = literal_logits(backbone, leaves, context.train.pixels, gamma)
            slopes = torch.autograd.grad(F.cross_entropy(logits, context.train.labels), list(leaves.values()))
            factors = {
                name: (leaf - RATE * slope).detach() for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
            }
        for name, factor in factors.items():
            assert_gradients(found[name] - state[name], factor - state[name])
        with torch.no_grad():
            wanted = literal_logits(backbone, state, context.train.pixels, gamma)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    merged = method.classifier(context, state, {}).logits(context.train, torch.arange(6))
    assert_values(merged, wanted)


def test_the_start_is_zero_shot_and_one_for_all(backbone: Backbone) -> None:
    method, context, rows = lora(), task(backbone), torch.arange(6)
    server = server_context(backbone, "a")
    state = method.initial_state(server, initial_draws(3))
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "visual_a": (3, 3, 2, 32), "visual_b": (3, 3, 32, 2), "text_a": (2, 3, 2, 24), "text_b": (2, 3, 24, 2),
    }  # fmt: skip
    assert float(state["visual_a"].abs().max()) <= 32**-0.5
    assert not bool(state["text_b"].any())
    template = ZeroShot(ZeroShot.Hyper()).classifier(context, {}, {}).logits(context.train, rows)
    assert_values(method.classifier(context, state, {}).logits(context.train, rows), template)
    assert all(tensor.equal(state[name]) for name, tensor in method.initial_state(server, initial_draws(9)).items())


def test_dropout_s_masks_follow_from_the_task(backbone: Backbone) -> None:
    method, context = lora(dropout=0.5), task(backbone)
    state = state_of(method, backbone, 0.1)
    first, again = (method.train(context, state, {}).update for _ in range(2))
    assert all(first[name].equal(again[name]) for name in first)
    without = lora().train(context, state, {}).update
    assert not first["visual_b"].equal(without["visual_b"])
    backbone.held_images = 2
    try:
        parts = method.train(context, state, {}).update
    finally:
        backbone.held_images = None
    assert not parts["visual_b"].equal(first["visual_b"]), "each part has masks of its own"
    rows = torch.arange(6)
    scores = [one.classifier(context, state, {}).logits(context.train, rows) for one in (method, lora())]
    assert scores[0].equal(scores[1]), "evaluations have no dropout"


def test_sizes(backbone: Backbone) -> None:
    shape = shape_of(backbone)
    with pytest.raises(pf.MethodError, match="text tower, and this backbone's is not of the plain kind"):
        lora().check_backbone(shape.model_copy(update={"heads_t": None}))
    lora(towers="visual").check_backbone(shape.model_copy(update={"heads_t": None}))
    server = server_context(backbone, "a")
    for options, wanted in (
        ({"blocks": "last_k", "k": 3}, "text tower has 2 blocks"),
        ({"r": 25}, "more than the width 24"),
    ):
        with pytest.raises(pf.MethodError, match=wanted):
            lora(**options).dims(server)
    text = {"r": 24, "q": 3, "d_t": 24, "k_t": 2}
    for options in ({"blocks": "last_k", "k": 2}, {"blocks": "all", "k": 9}):
        assert lora(r=24, **options).dims(server).items() >= text.items()
    blind = replace(server, shape=shape.model_copy(update={"d_v": None}))
    assert lora(r=24, towers="text").dims(blind) == text
    assert lora(towers="text").needs.cached_features
    assert not lora().needs.cached_features


ROWS = torch.arange(6)


TOWER, HEAD, DECAY, MOMENTUM, STEPS = 0.001, 0.02, 0.1, 0.9, 2


COSINE = (1 + math.cos(math.pi / 4)) / 2  # of the second round of four


PROMPTS = ("fedvpt", "fedvpt_deep", "singleset_vpt", "fedpr")


def stepped(optimizer: str, start: Tensors, slopes_of: Callable[[Tensors], Tensors]) -> Tensors:
    """What ``STEPS`` steps lead to, by the optimizers' equations; tensors of a head move at ``HEAD``."""
    now = {name: tensor.detach() for name, tensor in start.items()}
    first = {name: torch.zeros_like(tensor) for name, tensor in now.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in now.items()}
    for count in range(1, STEPS + 1):
        slopes = slopes_of(now)
        for name, w in now.items():
            rate, g = COSINE * (HEAD if "head" in name else TOWER), slopes[name]
            if optimizer == "sgd":
                g = g + DECAY * w
                first[name] = g if count == 1 else MOMENTUM * first[name] + g
                now[name] = w - rate * first[name]
                continue
            decayed = w * (1 - rate * DECAY) if optimizer == "adamw" else w
            g = g if optimizer == "adamw" else g + DECAY * w
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g.square()
            spread = (second[name] / (1 - 0.999**count)).sqrt() + 1e-8
            now[name] = decayed - rate * first[name] / (1 - 0.9**count) / spread
    return now


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_a_step_with_two_rates_is_the_optimizer_s_equation(backbone: Backbone, name: str, optimizer: str) -> None:
    # Norms alone: Adam's first step is a sign, and other weights (a key's bias) have slopes of mere rounding.
    options = {"trainable": "norms"} | ({"mu": 5.0} if name == "fedprox" else {})
    method = method_of(name, head="linear", head_learning_rate=HEAD, **options)
    training = {"optimizer": optimizer, "learning_rate": TOWER, "weight_decay": DECAY, "momentum": MOMENTUM}
    context = client_context(backbone, round=2, epochs=STEPS, schedule="cosine", **training)
    state = start_of(method, backbone)
    _, leaves = pooled(backbone, state, context.train.images(torch.arange(6)))
    begun = {kind: leaf.detach() for kind, leaf in leaves.items()}

    def slopes_of(now: Tensors) -> Tensors:
        changes = {kind: now[kind] - begun[kind] for kind in leaves}
        features, own = pooled(backbone, changes, context.train.images(torch.arange(6)))
        own |= {head: now[head].clone().requires_grad_() for head in ("head_weight", "head_bias")}
        loss = F.cross_entropy(features @ own["head_weight"].T + own["head_bias"], context.train.labels)
        if name == "fedprox":
            received = state | begun
            distances = [(leaf - received[kind]).square().sum() for kind, leaf in own.items()]
            loss = loss + 5.0 / 2 * torch.stack(distances).sum()
        return dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))

    start = begun | {head: state[head] for head in ("head_weight", "head_bias")}
    wanted, found = stepped(optimizer, start, slopes_of), method.train(context, state, {}).update
    assert set(found) == {"change." + kind for kind in start}
    for kind, before in start.items():
        assert_values(before + found["change." + kind], wanted[kind])


def test_fedbabu_fine_tunes_tower_and_head_at_their_own_rates(backbone: Backbone) -> None:
    method = method_of("fedbabu", finetune_epochs=1, finetune_learning_rate=TOWER, head_learning_rate=HEAD)
    context = client_context(backbone, round=2, optimizer="sgd", learning_rate=0.5, schedule="cosine")
    state, start = start_of(method, backbone), head_start(generator, 3, 3, 32)
    pixels, rows = context.train.images(torch.arange(6)), torch.arange(6)
    features, leaves = pooled(backbone, state, pixels)
    weight, bias = (start[name].clone().requires_grad_() for name in ("head_weight", "head_bias"))
    loss = F.cross_entropy(features @ weight.T + bias, context.train.labels)
    slopes = torch.autograd.grad(loss, [*leaves.values(), weight, bias])
    after = {kind: state[kind] - TOWER * slope for kind, slope in zip(leaves, slopes, strict=False)}
    tuned = pooled(backbone, after, pixels)[0]
    wanted = tuned @ (weight - HEAD * slopes[-2]).T + bias - HEAD * slopes[-1]
    assert_values(method.classifier(context, state, {}).logits(context.train, rows), wanted.detach())


@pytest.mark.parametrize("name", [*PROMPTS, "pfedpg"])
def test_beside_prompts_the_head_alone_moves_further(backbone: Backbone, name: str) -> None:
    """One plain step: the head's change is in proportion to its rate, and the prompts' is what it was."""
    options: dict[str, Any] = {"m": 2} | ({} if name == "pfedpg" else {"head": "linear"})
    context = client_context(backbone, optimizer="sgd", learning_rate=TOWER, epochs=1)
    plain, fast = (method_of(name, **options, **more) for more in ({}, {"head_learning_rate": HEAD}))
    server = server_context(backbone, "a")
    [phase] = plain.phases(1, 4)
    state = plain.initial_state(server, initial_draws(3))
    payload = plain.payload(state, phase, server.clients[0], server)
    ours, theirs = (method.train(context, payload, {}) for method in (fast, plain))
    start = head_start(generator, 3, 3, 32)
    for head in ("head_weight", "head_bias"):
        assert_gradients(ours.private[head] - start[head], HEAD / TOWER * (theirs.private[head] - start[head]))
    for kind, tensor in (theirs.update | theirs.private).items():
        assert "head" in kind or (ours.update | ours.private)[kind].equal(tensor)


def test_the_swept_rate_is_the_default_beside_a_tower(backbone: Backbone) -> None:
    context = client_context(backbone, optimizer="sgd", learning_rate=TOWER, epochs=1)
    for name in ("fedavg", "fedrep", "fedrod"):
        options = {"head": "linear"} if name == "fedavg" else {}
        left_out, said = (method_of(name, **options), method_of(name, **options, head_learning_rate=HEAD_RATE))
        state = start_of(left_out, backbone)
        ours, theirs = (method.train(context, state, {}) for method in (left_out, said))
        for kind, tensor in (theirs.update | theirs.private).items():
            assert (ours.update | ours.private)[kind].equal(tensor)
    probe = method_of("fedavg", head="linear", trainable="none")
    state = start_of(probe, backbone)
    once, twice = (
        probe.train(context.with_terms(training=context.training.model_copy(update={"learning_rate": rate})), state, {})
        for rate in (TOWER, 2 * TOWER)
    )
    for kind, change in once.update.items():
        assert_gradients(twice.update[kind], 2 * change)  # alone it has training.learning_rate


def test_a_resolved_spec_with_a_text_head_can_be_read_again() -> None:
    spec = resolve_spec({"name": "x", "method": {"name": "fedavg"}})
    assert resolve_spec(spec.model_dump(mode="json")) == spec


# FedAvg's two options for domains that nobody has, against their equations written out.


FEDSR = {"fedsr": True, "head": "linear", "d_z": 5}


def reference() -> Tensors:
    """r, s and c of a client that has trained."""
    draws = torch.Generator().manual_seed(9)
    start = generalization.reference({}, 3, 5)
    return {name: tensor + torch.randn(tensor.shape, generator=draws) * 0.02 for name, tensor in start.items()}


def literal_loss(features: Tensor, labels: Tensor, state: Tensors, noise: Tensor, divergence_weight: float) -> Tensor:
    """CE at z = μ + σε, + 0.01·mean‖z‖² + β·KL(N(cμ, cσ) ‖ N(r_y, softplus s_y)), image by image."""
    total = torch.zeros(())
    for feature, label, drawn in zip(features, labels, noise, strict=True):
        mean = state["sr_mean_weight"] @ feature + state["sr_mean_bias"]
        scale = F.softplus(state["sr_scale_weight"] @ feature + state["sr_scale_bias"])
        z = mean + scale * drawn
        entropy = F.cross_entropy((state["head_weight"] @ z + state["head_bias"])[None], label[None])
        c, y = state["sr_factor"], int(label)
        ours = torch.distributions.Normal(c * mean, c * scale)
        theirs = torch.distributions.Normal(state["sr_class_mean"][y], F.softplus(state["sr_class_scale"][y]))
        divergence = torch.distributions.kl_divergence(ours, theirs).sum()
        total = total + entropy + 0.01 * (z**2).sum() + divergence_weight * divergence
    return total / len(features)


def test_fedsr_trains_on_its_equation(backbone: Backbone) -> None:
    assert method_of(**FEDSR).hyper.model_dump()["divergence_weight"] == 0.0005
    # Larger, so that the steps of what starts at one are not lost in its rounding.
    method, context = (method_of(**FEDSR, trainable="none", divergence_weight=20.0), task(backbone, epochs=1))
    state, private = state_of(method, backbone, clients="ab"), reference()
    found = method.train(context, state, private)
    features = backbone.vision_tower().features(context.train.pixels, projected=False)
    # One batch holds all images, in an order of its own: the noise goes with it.
    order = torch.randperm(6, generator=generator(context.seed, 1, context.phase, context.client, "batches"))
    noise = torch.randn(6, 5, generator=generator(context.seed, 1, context.client, "fedsr"))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in (state | private).items()}
    loss = literal_loss(features[order].detach(), context.train.labels[order], leaves, noise, 20.0)
    assert found.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    slopes = torch.autograd.grad(loss, list(leaves.values()))
    assert set(found.update) == {"change." + name for name in state}
    assert set(found.private) == set(private), "r, s and c stay with the client"
    for name, slope in zip(leaves, slopes, strict=True):
        moved = found.private[name] - private[name] if name in private else found.update["change." + name]
        assert_gradients(moved, -RATE * slope)


def test_fedsr_s_tower_learns_through_the_draws(backbone: Backbone) -> None:
    method, context = method_of(**FEDSR), task(backbone, epochs=1)
    state = state_of(method, backbone, clients="ab")
    update = method.train(context, state, {}).update
    assert set(update) == {"change." + name for name in state}
    assert all(float(change.abs().max()) > 0 for name, change in update.items() if "ln_pre" not in name)


def test_fedsr_classifies_by_the_mean_probabilities_of_twenty_draws(backbone: Backbone) -> None:
    method, context = method_of(**FEDSR), task(backbone, epochs=1)
    state = state_of(method, backbone, clients="ab")
    found = method.classifier(context, state, {}).logits(context.train, ROWS)
    tower = method.tower(context, state, {})
    features = method.features(tower, context.train.images(ROWS))
    draws = generalization.draws_for_images(context.seed, 5)
    mean = F.linear(features, state["sr_mean_weight"], state["sr_mean_bias"])
    scale = F.softplus(F.linear(features, state["sr_scale_weight"], state["sr_scale_bias"]))
    scored = [F.linear(mean + scale * draw, state["head_weight"], state["head_bias"]) for draw in draws]
    assert len(scored) == 20
    assert_values(found.exp(), torch.stack([scores.softmax(-1) for scores in scored]).mean(0))
    two = method.classifier(replace(context, class_names=tuple(NAMES[1:]), label_space=tuple(NAMES)), state, {})
    among_two = torch.stack([scores[:, 1:].softmax(-1) for scores in scored]).mean(0)
    assert_values(two.logits(context.train, ROWS).exp(), among_two)
    with pytest.raises(pf.MethodError, match="cannot score"):
        method.classifier(replace(context, class_names=("unseen",), label_space=tuple(NAMES)), state, {})


def test_fedsr_starts_as_its_paper_says_and_needs_a_linear_head(backbone: Backbone) -> None:
    method = method_of(**FEDSR)
    state = start_of(method, backbone)
    assert not {spec.name for spec in generalization.REFERENCE} & {spec.name for spec in method.state_tensors()}
    own = generalization.reference({}, 3, 5)
    assert own["sr_class_mean"].equal(torch.zeros(3, 5))
    assert own["sr_class_scale"].equal(torch.ones(3, 5))
    assert float(own["sr_factor"]) == 1
    assert float(state["sr_mean_weight"].abs().max()) <= 1 / math.sqrt(32)
    assert not state["sr_mean_weight"].equal(state["sr_scale_weight"])
    with pytest.raises(SpecError, match="head: linear"):
        resolve_spec({"name": "x", "method": {"name": "fedavg", "fedsr": True}, "class_names": list(NAMES)})


def roster(*names: str, rounds: int = 10) -> pf.ServerContext:
    clients = tuple(pf.ClientInfo(name, "trainer", 5, ()) for name in names)
    return pf.ServerContext(training=None, shape=None, class_names=None, clients=clients, seed=0, rounds=rounds)


def weights_state(*weights: float, round: int = 0) -> Tensors:
    return {"ga_weights": torch.tensor(weights), "ga_round": torch.tensor(round)}


def test_ga_s_weights_are_its_equation() -> None:
    # a + d·gap/(n·max|gap|) with d = 0.2: 1/4 + 0.2·(2, −1, 1, 0)/(4·2), which already sum to 1.1 and are normalised.
    state, gaps = weights_state(0.25, 0.25, 0.25, 0.25), {"a": 2.0, "b": -1.0, "c": 1.0, "d": 0.0}
    after, shares = adjusted(state, gaps, roster("a", "b", "c", "d"), centred=False)
    wanted = [(0.25 + 0.2 * gap / 8) / 1.05 for gap in (2.0, -1.0, 1.0, 0.0)]
    assert list(shares.values()) == pytest.approx(wanted)
    assert after["ga_weights"].tolist() == pytest.approx(wanted)
    assert int(after["ga_round"]) == 1
    # Centred: gaps (1.5, −1.5, 0.5, −0.5), whose steps sum to nothing.
    _, shares = adjusted(state, gaps, roster("a", "b", "c", "d"), centred=True)
    assert list(shares.values()) == pytest.approx([0.25 + 0.05 * gap / 1.5 for gap in (1.5, -1.5, 0.5, -0.5)])


def test_ga_s_step_shrinks_over_the_rounds_and_weights_stay_within_bounds() -> None:
    late, _ = adjusted(weights_state(0.5, 0.5, round=9), {"a": 1.0, "b": -1.0}, roster("a", "b"), centred=True)
    assert late["ga_weights"].tolist() == pytest.approx([0.5 + 0.01, 0.5 - 0.01])  # d = 0.2·(1 − 9/10)
    low, shares = adjusted(weights_state(0.99, 0.01), {"a": 1.0, "b": -1.0}, roster("a", "b"), centred=True)
    assert (low["ga_weights"].tolist(), shares["b"]) == ([1.0, 0.0], 0.0)
    high, _ = adjusted(weights_state(0.99, 0.01), {"a": 1.0, "b": 0.5}, roster("a", "b"), centred=False)
    assert high["ga_weights"].tolist() == pytest.approx([1 / 1.06, 0.06 / 1.06]), "0.99 + 0.1 is 1"
    none, shares = adjusted(weights_state(0.3, 0.7), {"a": 0.0, "b": 0.0}, roster("a", "b"), centred=True)
    assert none["ga_weights"].tolist() == pytest.approx([0.3, 0.7]), "the first round has no gaps"


def test_ga_weighs_those_who_answered_and_keeps_the_others() -> None:
    state = weights_state(0.2, 0.3, 0.5)
    after, shares = adjusted(state, {"c": 0.0, "a": 0.0}, roster("a", "b", "c"), centred=True)
    assert shares == pytest.approx({"a": 0.2 / 0.7, "c": 0.5 / 0.7})
    assert after["ga_weights"].tolist() == pytest.approx([0.2, 0.3, 0.5])
    grown = generalization.joined(state, pf.ClientInfo("b2", "trainer", 5, ()), roster("a", "b", "b2", "c"))
    assert grown["ga_weights"].tolist() == pytest.approx([0.2 * 0.75, 0.3 * 0.75, 0.25, 0.5 * 0.75])


def test_ga_holds_a_tenth_back_which_is_never_trained_on() -> None:
    aside, rest = held_out(7, "a", 25)
    assert (len(aside), sorted([*aside.tolist(), *rest.tolist()])) == (2, list(range(25)))
    assert held_out(7, "a", 25)[0].equal(aside)
    assert not held_out(7, "b", 25)[0].equal(aside)
    assert len(held_out(7, "a", 3)[0]) == 1
    assert [len(held_out(7, "a", count)[0]) for count in (2, 19, 20)] == [1, 1, 2]
    with pytest.raises(pf.MethodError, match="holds one of them back"):
        held_out(7, "a", 1)


def test_a_subset_is_its_rows_of_all(backbone: Backbone) -> None:
    split = split_of(backbone, 5)
    some = Subset(split, torch.tensor([3, 1]))
    assert (len(some), some.labels.tolist()) == (2, split.labels[[3, 1]].tolist())
    assert some.features().equal(split.features()[[3, 1]])
    assert some.raw_features().equal(split.raw_features()[[3, 1]])
    assert some.images(torch.tensor([1])).equal(split.pixels[[1]])
    assert some.patches(torch.tensor([0])).equal(split.patches(torch.tensor([3])))


def test_ga_adds_a_newcomer_to_nobody_and_weighs_all_alike_where_nothing_is_left() -> None:
    state = weights_state(0.0, 0.0)
    after, shares = adjusted(state, {"a": 0.0, "b": 0.0}, roster("a", "b"), centred=True)
    assert (after["ga_weights"].tolist(), shares) == ([0.5, 0.5], {"a": 0.5, "b": 0.5})
    first = generalization.joined(weights_state(), pf.ClientInfo("a", "trainer", 5, ()), roster("a"))
    assert first["ga_weights"].tolist() == [1.0]


def test_ga_s_gap_is_the_received_state_s_loss_less_the_own_one_s(backbone: Backbone) -> None:
    method, context = method_of(weighting="ga"), task(backbone, epochs=1)
    state = state_of(method, backbone, clients="ab")
    first = method.train(context, state, {})
    assert float(first.update["gap"]) == 0, "there is no own update yet"
    aside, rest = held_out(context.seed, "a", 6)
    plain = method_of().train(replace(context, train=Subset(context.train, rest)), state, {})
    for name, change in plain.update.items():
        assert first.update[name].equal(change), "it trains on the others alone, as fedavg does"

    def loss_of(given: Tensors) -> float:
        scores = method.classifier(context, given, {}).logits(context.train, aside)
        return float(F.cross_entropy(scores, context.train.labels[aside]))

    own = {name: state[name] + first.update["change." + name] for name in state if not name.startswith("ga_")}
    assert float(first.private["own_loss"]) == pytest.approx(loss_of(own), rel=1e-5)
    again = method.train(replace(context, round=2), state, first.private)
    assert float(again.update["gap"]) == pytest.approx(loss_of(state) - loss_of(own), abs=1e-6)


def test_a_supplied_state_gets_equal_weights_where_they_are_adjusted(backbone: Backbone) -> None:
    server, given = server_context(backbone, "a", "b"), {"x": torch.zeros(1)}
    assert method_of().adopt(given, server) == given
    adopted = method_of(weighting="ga").adopt(given, server)
    assert (adopted["ga_weights"].tolist(), int(adopted["ga_round"]), set(adopted)) == ([0.5, 0.5], 0, {
        "x", "ga_weights", "ga_round",
    })  # fmt: skip


def test_ga_tells_of_its_gap_and_weighs_a_newcomer(backbone: Backbone) -> None:
    plain, ga = method_of(), method_of(weighting="ga")
    assert ga.disclosures[:-1] == plain.disclosures
    assert ga.disclosures[-1].to == "operator"
    assert "than your own last update" in ga.disclosures[-1].what
    state, newcomer = weights_state(1.0), pf.ClientInfo("b", "trainer", 5, ())
    assert plain.join(state, newcomer, roster("a", "b")) is state
    assert ga.join(state, newcomer, roster("a", "b"))["ga_weights"].tolist() == [0.5, 0.5]


def test_a_tuned_tower_chooses_among_other_classes(backbone: Backbone) -> None:
    method, context = method_of("fedbabu"), task(backbone, epochs=1)
    assert method.train(context, state_of(method, backbone), {}).private == {}
    tuned: Any = method.classifier(context, state_of(method, backbone), {})
    assert tuned.logits(context.train, torch.arange(6)).shape == (6, len(NAMES))
    fewer = tuned.among(replace(context, class_names=NAMES[:2]))
    assert fewer.logits(context.train, torch.arange(6)).shape == (6, 2)


def test_ga_s_loss_is_the_mean_over_all_images_in_parts(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedavg, "CHUNK", 4)
    method, context = method_of(weighting="ga"), task(backbone)
    state, rows = state_of(method, backbone), torch.arange(6)
    logits = method.classifier(context.for_training(), state, {}).logits(context.train, rows)
    wanted = float(F.cross_entropy(logits, context.train.labels))
    assert method._loss(context, state, {}) == pytest.approx(wanted, rel=1e-5)


def test_ga_replaces_the_weights_of_the_mean(backbone: Backbone) -> None:
    method = method_of(weighting="ga", trainable="biases")
    state, context = state_of(method, backbone, clients="ab"), server_context(backbone, "a", "b")
    [phase] = method.phases(1, 4)
    assert not phase.mean
    assert {spec.name for spec in phase.down} == {name for name in state if not name.startswith("ga_")}
    draws = torch.Generator().manual_seed(1)
    changes = [
        {"change." + spec.name: torch.randn(state[spec.name].shape, generator=draws) for spec in phase.down}
        for _ in range(2)
    ]
    updates = [
        pf.ClientUpdate(name, weight, change | {"gap": torch.tensor(gap)})
        for name, weight, change, gap in zip("ab", (0.9, 0.1), changes, (1.0, -1.0), strict=True)
    ]
    after = method.aggregate(dict(state), phase, iter(updates), weighted_mean, replace(context, rounds=4))
    for spec in phase.down:
        name = "change." + spec.name
        assert_values(after[spec.name], state[spec.name] + 0.6 * changes[0][name] + 0.4 * changes[1][name])
    assert after["ga_weights"].tolist() == pytest.approx([0.6, 0.4])
    with pytest.raises(SpecError, match="krum"):
        spec = {"name": "x", "method": {"name": "fedavg", "weighting": "ga"}, "aggregation": {"rule": "krum"}}
        resolve_spec(spec)


def test_shares_of_classes_are_of_all_labels() -> None:
    found = log_shares(torch.tensor([0, 2, 0, 0]), 4)
    assert found.tolist() == pytest.approx([math.log(0.75), ABSENT, math.log(0.25), ABSENT])
    assert torch.softmax(found, 0)[1] == 0
