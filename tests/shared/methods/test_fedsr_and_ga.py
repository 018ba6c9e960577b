"""FedAvg's two options for domains that nobody has, against their equations written out."""

from __future__ import annotations

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
from promptfed.shared.methods.core import generalization
from promptfed.shared.methods.core.generalization import Subset, adjusted, held_out
from promptfed.shared.methods.core.interface import ClientInfo, ClientUpdate, Method, MethodError, ServerContext
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Tensors
from tests.support.equality import assert_gradients, assert_values
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone

RATE = 0.05
FEDSR = {"fedsr": True, "head": "linear", "d_z": 5}
ROWS = torch.arange(6)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method_of(**options: Any) -> Method:
    return make_method({"name": "fedavg", **options})


def task(backbone: Backbone, **changes: Any) -> Any:
    return client_context(backbone, **({"epochs": 1, "learning_rate": RATE, "optimizer": "sgd"} | changes))


def state_of(method: Method, backbone: Backbone, *clients: str) -> Tensors:
    """A state that has moved from its start."""
    context = replace(server_context(backbone, *(clients or ("a", "b"))), class_names=tuple(NAMES))
    state = method.initial_state(context, initial_draws(3))
    draws = torch.Generator().manual_seed(8)
    kept = (generalization.WEIGHTS.name, generalization.ROUND.name)
    return {
        name: tensor if name in kept else tensor + torch.randn(tensor.shape, generator=draws) * 0.02
        for name, tensor in state.items()
    }


# FedSR


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
    method, context = method_of(**FEDSR, trainable="none", divergence_weight=20.0), task(backbone)
    state, private = state_of(method, backbone), reference()
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
    method, context = method_of(**FEDSR), task(backbone)
    state = state_of(method, backbone)
    update = method.train(context, state, {}).update
    assert set(update) == {"change." + name for name in state}
    assert all(float(change.abs().max()) > 0 for name, change in update.items() if "ln_pre" not in name)


def test_fedsr_classifies_by_the_mean_probabilities_of_twenty_draws(backbone: Backbone) -> None:
    method, context = method_of(**FEDSR), task(backbone)
    state = state_of(method, backbone)
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
    with pytest.raises(MethodError, match="cannot score"):
        method.classifier(replace(context, class_names=("unseen",), label_space=tuple(NAMES)), state, {})


def test_fedsr_starts_as_its_paper_says_and_needs_a_linear_head(backbone: Backbone) -> None:
    method = method_of(**FEDSR)
    state = method.initial_state(replace(server_context(backbone, "a"), class_names=tuple(NAMES)), initial_draws(3))
    assert not {spec.name for spec in generalization.REFERENCE} & {spec.name for spec in method.state_tensors()}
    own = generalization.reference({}, 3, 5)
    assert own["sr_class_mean"].equal(torch.zeros(3, 5))
    assert own["sr_class_scale"].equal(torch.ones(3, 5))
    assert float(own["sr_factor"]) == 1
    assert float(state["sr_mean_weight"].abs().max()) <= 1 / math.sqrt(32)
    assert not state["sr_mean_weight"].equal(state["sr_scale_weight"])
    for options, text in (({"fedsr": True}, "head: linear"), (FEDSR | {"private": "norms"}, "leave private out")):
        with pytest.raises(SpecError, match=text):
            resolve_spec({"name": "x", "method": {"name": "fedavg", **options}, "class_names": list(NAMES)})


# GA


def roster(*names: str, rounds: int = 10) -> ServerContext:
    clients = tuple(ClientInfo(name, "trainer", 5, ()) for name in names)
    return ServerContext(training=None, shape=None, class_names=None, clients=clients, seed=0, rounds=rounds)


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
    none, shares = adjusted(weights_state(0.3, 0.7), {"a": 0.0, "b": 0.0}, roster("a", "b"), centred=True)
    assert none["ga_weights"].tolist() == pytest.approx([0.3, 0.7]), "the first round has no gaps"


def test_ga_weighs_those_who_answered_and_keeps_the_others() -> None:
    state = weights_state(0.2, 0.3, 0.5)
    after, shares = adjusted(state, {"c": 0.0, "a": 0.0}, roster("a", "b", "c"), centred=True)
    assert shares == pytest.approx({"a": 0.2 / 0.7, "c": 0.5 / 0.7})
    assert after["ga_weights"].tolist() == pytest.approx([0.2, 0.3, 0.5])
    grown = generalization.joined(state, ClientInfo("b2", "trainer", 5, ()), roster("a", "b", "b2", "c"))
    assert grown["ga_weights"].tolist() == pytest.approx([0.2 * 0.75, 0.3 * 0.75, 0.25, 0.5 * 0.75])


def test_ga_holds_a_tenth_back_which_is_never_trained_on() -> None:
    aside, rest = held_out(7, "a", 25)
    assert (len(aside), sorted([*aside.tolist(), *rest.tolist()])) == (2, list(range(25)))
    assert held_out(7, "a", 25)[0].equal(aside)
    assert not held_out(7, "b", 25)[0].equal(aside)
    assert len(held_out(7, "a", 3)[0]) == 1
    with pytest.raises(MethodError, match="holds one of them back"):
        held_out(7, "a", 1)


def test_ga_s_gap_is_the_received_state_s_loss_less_the_own_one_s(backbone: Backbone) -> None:
    method, context = method_of(weighting="ga"), task(backbone)
    state = state_of(method, backbone)
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


def test_ga_replaces_the_weights_of_the_mean(backbone: Backbone) -> None:
    method = method_of(weighting="ga", trainable="biases")
    state, context = state_of(method, backbone), server_context(backbone, "a", "b")
    [phase] = method.phases(1, 4)
    assert not phase.mean
    assert {spec.name for spec in phase.down} == {name for name in state if not name.startswith("ga_")}
    draws = torch.Generator().manual_seed(1)
    changes = [
        {"change." + spec.name: torch.randn(state[spec.name].shape, generator=draws) for spec in phase.down}
        for _ in range(2)
    ]
    updates = [
        ClientUpdate(name, weight, change | {"gap": torch.tensor(gap)})
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
