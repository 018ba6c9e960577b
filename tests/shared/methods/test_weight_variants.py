"""The local and the personal methods of whole towers: what each trains, in which order, and what never leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.heads import head_start
from promptfed.shared.methods.core.interface import ClientInfo, ClientUpdate, Method, MethodError, check_admission
from promptfed.shared.methods.fedrod import log_shares
from promptfed.shared.methods.perfedavg import step
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.tensors import Tensors
from tests.support.equality import assert_gradients, assert_values
from tests.support.literal_towers import pooled
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone

RATE, HEAD = 0.05, 0.2
PERSONAL = ("singleset_full", "fedrep", "fedbabu", "fedrod", "perfedavg")
ROWS = torch.arange(6)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method_of(name: str, **options: Any) -> Method:
    return make_method({"name": name, **options})


def task(backbone: Backbone, **changes: Any) -> Any:
    return client_context(backbone, **({"epochs": 1, "learning_rate": RATE, "optimizer": "sgd"} | changes))


def state_of(method: Method, backbone: Backbone) -> Tensors:
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


def test_fedrep_s_head_is_refitted_under_the_averaged_tower_in_a_copy(backbone: Backbone) -> None:
    options: dict[str, Any] = {"head_epochs": 1, "head_learning_rate": HEAD}
    plain, refitting = (method_of("fedrep", refit_epochs=epochs, **options) for epochs in (0, 2))
    context = task(backbone, round=3, schedule="cosine")
    state = state_of(plain, backbone)
    private = plain.train(context, state, {}).private
    assert all(tensor.equal(private[name]) for name, tensor in refitting.train(context, state, {}).private.items())
    weight, bias = private["head_weight"], private["head_bias"]
    features = pooled(backbone, state, context.train.pixels)[0].detach()
    assert_values(plain.classifier(context, state, private).logits(context.train, ROWS), features @ weight.T + bias)
    for _ in range(2):
        weight, bias = (tensor.detach().requires_grad_() for tensor in (weight, bias))
        slopes = torch.autograd.grad(F.cross_entropy(features @ weight.T + bias, context.train.labels), [weight, bias])
        weight, bias = weight - HEAD * slopes[0], bias - HEAD * slopes[1]  # not scaled by the round's cosine
    with torch.no_grad():
        found = refitting.classifier(context, state, private).logits(context.train, ROWS)
    assert_values(found, (features @ weight.T + bias).detach())
    others = private | {"head_weight": -private["head_weight"]}
    again = refitting.classifier(context, state, others).logits(context.train, ROWS)
    assert not again.equal(found), "another client's head is refitted for itself"


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
    head_only = method_of("fedbabu", finetune="head", finetune_epochs=1, head_learning_rate=HEAD)
    tuned_head = head_only.classifier(context, state, {})
    features = pooled(backbone, state, context.train.pixels)[0].detach()
    weight, bias = (start[name].clone().requires_grad_() for name in ("head_weight", "head_bias"))
    slopes = torch.autograd.grad(F.cross_entropy(features @ weight.T + bias, context.train.labels), [weight, bias])
    wanted = features @ (weight - HEAD * slopes[0]).T + bias - HEAD * slopes[1]
    assert_values(tuned_head.logits(context.train, ROWS), wanted.detach())


def test_fedrod_s_balanced_softmax_weighs_by_the_client_s_shares() -> None:
    shares = log_shares(torch.tensor([0, 0, 0, 1]), 3)
    found = torch.softmax(torch.tensor([0.0, 0.0, 9.0]) + shares, dim=0)
    assert_values(found, torch.tensor([0.75, 0.25, 0.0]))


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


def test_perfedavg_s_step_on_a_parabola() -> None:
    def half_square(w: Tensor) -> Any:
        return lambda t: (w - t).square().sum() / 2

    w = torch.tensor([1.0], requires_grad=True)
    step(half_square(w), [w], 0.0, 1.0, [0.5], [0.1], hessian=False)
    assert w.item() == pytest.approx(1.05)
    w = torch.tensor([1.0], requires_grad=True)
    step(half_square(w), [w], 0.0, 1.0, [0.5], [0.1], hessian=True)
    assert w.item() == pytest.approx(1.025, abs=1e-4), "the slope's length is (1 - α) of the other's"


def test_perfedavg_s_second_order_with_two_rates() -> None:
    """L_1 = wᵀAw/2, L_2 = wᵀBw/2, α diagonal: g = B(1 − αA)w, and W ← W − β(1 − Aα)g."""
    first, second = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([[1.0, -0.5], [-0.5, 2.0]])
    w, alphas, betas = torch.tensor([0.7, -0.4]), torch.tensor([0.05, 0.2]), torch.tensor([0.1, 0.3])
    slope = second @ (w - alphas * (first @ w))
    wanted = w - betas * (slope - first @ (alphas * slope))
    leaves = [value.clone().requires_grad_() for value in w.split(1)]

    def loss(form: Tensor) -> Tensor:
        whole = torch.cat(leaves)
        return whole @ form @ whole / 2

    step(loss, leaves, first, second, alphas.tolist(), betas.tolist(), hessian=True)
    assert_values(torch.cat(leaves).detach(), wanted, 1e-4)  # of float32 differences at δ = 1e-3


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
    with pytest.raises(MethodError, match="needs two batches"):
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


@pytest.mark.parametrize("name", PERSONAL)
def test_who_has_no_classifier_is_refused(backbone: Backbone, name: str) -> None:
    method = method_of(name, **({"head": "linear"} if name == "singleset_full" else {}))
    evaluator, server = ClientInfo("referee", "evaluator", 0, NAMES), server_context(backbone, "a")
    if name in ("fedrod", "perfedavg"):
        check_admission(method, evaluator, None, lambda: server)
        assert method.takes_evaluators
        return
    with pytest.raises(MethodError, match="an evaluator has none"):
        check_admission(method, evaluator, None, lambda: server)
    assert not method.takes_evaluators
    check_admission(method_of("singleset_full"), evaluator, None, lambda: server)


def test_means_of_fedrep_are_of_the_tower_alone(backbone: Backbone) -> None:
    method = method_of("fedrep", trainable="last_k", head_epochs=1)
    state, server = state_of(method, backbone), server_context(backbone, "a", "b")
    [phase] = method.phases(1, 4)
    sent = [method.train(task(backbone, client=name), state, {}).update for name in "ab"]
    counted = [ClientUpdate(name, 0.5, update) for name, update in zip("ab", sent, strict=True)]
    after = method.aggregate(dict(state), phase, counted, weighted_mean, server)
    wanted = state["ln_post_bias"] + (sent[0]["change.ln_post_bias"] + sent[1]["change.ln_post_bias"]) / 2
    assert_values(after["ln_post_bias"], wanted)
