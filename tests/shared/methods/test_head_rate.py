"""The linear head's own learning rate: literal steps with two rates, and where there is no such head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.heads import HEAD_RATE, head_start
from promptfed.shared.methods.core.interface import Method
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Tensors
from tests.support.equality import assert_gradients, assert_values
from tests.support.literal_towers import pooled
from tests.support.visual_clients import client_context, server_context, small_backbone

TOWER, HEAD, DECAY, MOMENTUM, STEPS = 0.001, 0.02, 0.1, 0.9, 2
COSINE = (1 + math.cos(math.pi / 4)) / 2  # of the second round of four
PROMPTS = ("fedvpt", "fedvpt_deep", "singleset_vpt", "fedpr")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method_of(name: str, **options: Any) -> Method:
    return make_method({"name": name, **options})


def state_of(method: Method, backbone: Backbone) -> Tensors:
    return method.initial_state(server_context(backbone, "a"), initial_draws(3))


def moved(optimizer: str, start: Tensors, slopes_of: Callable[[Tensors], Tensors]) -> Tensors:
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
    state = state_of(method, backbone)
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
    wanted, found = moved(optimizer, start, slopes_of), method.train(context, state, {}).update
    assert set(found) == {"change." + kind for kind in start}
    for kind, before in start.items():
        assert_values(before + found["change." + kind], wanted[kind])


def test_fedbabu_fine_tunes_tower_and_head_at_their_own_rates(backbone: Backbone) -> None:
    method = method_of("fedbabu", finetune_epochs=1, finetune_learning_rate=TOWER, head_learning_rate=HEAD)
    context = client_context(backbone, round=2, optimizer="sgd", learning_rate=0.5, schedule="cosine")
    state, start = state_of(method, backbone), head_start(generator, 3, 3, 32)
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
        left_out, said = method_of(name, **options), method_of(name, **options, head_learning_rate=HEAD_RATE)
        state = state_of(left_out, backbone)
        ours, theirs = (method.train(context, state, {}) for method in (left_out, said))
        for kind, tensor in (theirs.update | theirs.private).items():
            assert (ours.update | ours.private)[kind].equal(tensor)
    probe = method_of("fedavg", head="linear", trainable="none")
    state = state_of(probe, backbone)
    once, twice = (
        probe.train(context.with_terms(training=context.training.model_copy(update={"learning_rate": rate})), state, {})
        for rate in (TOWER, 2 * TOWER)
    )
    for kind, change in once.update.items():
        assert_gradients(twice.update[kind], 2 * change)  # alone it has training.learning_rate


def test_fedbabu_s_rate_of_fine_tuning_is_the_tower_s() -> None:
    method = {"name": "fedbabu", "finetune": "head", "finetune_learning_rate": 0.1}
    with pytest.raises(SpecError, match="set head_learning_rate instead"):
        resolve_spec({"name": "x", "method": method})


def test_a_resolved_spec_with_a_text_head_can_be_read_again() -> None:
    spec = resolve_spec({"name": "x", "method": {"name": "fedavg"}})
    assert resolve_spec(spec.model_dump(mode="json")) == spec
