"""PLAN's two phases against the equations written out, values and gradients, and what an epoch costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation.rules import weighted_mean
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.data import Source
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.data.source import Split, reader_of
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import (
    ClientContext,
    ClientUpdate,
    MethodError,
    Phase,
    ServerContext,
    TrainResult,
)
from promptfed.shared.methods.core.training import batches
from promptfed.shared.methods.plan import Aggregator, Plan, Reference, Towers, aggregator_of, divergence
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import TorchDraws
from tests.support import literal_visual as literal
from tests.support.equality import assert_gradients, assert_values
from tests.support.visual_clients import NAMES, client_context, filled, server_context, small_backbone


def plan(**changes: Any) -> Plan:
    """The method with two tokens."""
    method = make_method({"name": "plan", "m": 2} | changes)
    assert isinstance(method, Plan)
    return method


def start(method: Plan, backbone: Backbone, *clients: str, scale: float | None = 0.3) -> Tensors:
    """A state before the first round; with ``scale`` all trainable tensors are far from their usual start."""
    context = server_context(backbone, *clients or ("a",))
    state = method.initial_state(context, TorchDraws().manual_seed(2))
    if scale is not None:
        own = {
            name: tuple(tensor.shape) for name, tensor in state.items() if not name.startswith(("client", "prompt_"))
        }
        state |= filled(own, 4, scale)
    return state


def phase_of(method: Plan, name: str) -> Phase:
    """One of the first round's phases."""
    return next(phase for phase in method.phases(1, 4) if phase.name == name)


def run_phase(
    method: Plan,
    backbone: Backbone,
    state: Tensors,
    name: str,
    clients: list[str],
    *,
    round: int = 2,
    private: Mapping[str, Tensors] | None = None,
    **training: Any,
) -> tuple[Tensors, dict[str, TrainResult]]:
    """One phase as coordinator and clients carry it out, without the wire."""
    phase, server = phase_of(method, name), server_context(backbone, *"abcd")
    results = {}
    for client in clients:
        info = next(one for one in server.clients if one.name == client)
        context = client_context(backbone, client=client, round=round, phase=name, **training)
        results[client] = method.train(
            context, method.payload(state, phase, info, server), (private or {}).get(client, {})
        )
        expected = method.expected_update(phase, info, server)
        assert {key: tuple(tensor.shape) for key, tensor in results[client].update.items()} == {
            key: shape for key, (shape, _) in expected.items()
        }
    weight = 1 / len(clients)
    updates = [ClientUpdate(client, weight, results[client].update) for client in sorted(clients)]
    return method.aggregate(state, phase, iter(updates), weighted_mean, server), results


def slow_reference(context: ClientContext, payload: Tensors) -> Tensor:
    """The global prediction's logits ``(N, C)``: of the template in round 1, then of the global prompts."""
    backbone = context.backbone
    if context.round == 1:
        return TemplateClassifier(context).logits(context.train, torch.arange(len(context.train)))
    images = context.train.pixels
    with torch.no_grad():
        rows = [
            literal.logits(backbone, payload["text_prompts"], payload["visual_prompts"], list(NAMES), image)
            for image in images
        ]
    return torch.stack(rows)


def check_state(state: Tensors, method: Plan, backbone: Backbone) -> None:
    """Names and shapes are those that the method declares, K being free."""
    dims = method.dims(server_context(backbone, "a"))
    specs = {spec.name: spec for spec in method.state_tensors()}
    assert set(state) == set(specs)
    for name, spec in specs.items():
        clients = {"K": state[name].shape[0]}
        assert tuple(state[name].shape) == spec.resolve(dims | clients), name


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def slow_prompts(context: ClientContext, payload: Tensors, alpha: float, reference: Tensor | None) -> list[Tensor]:
    """Text and visual prompts after ``training.epochs`` steps of plain SGD over all images (Eq. 10), and the loss."""
    backbone, split = context.backbone, context.train
    pair = [payload["text_prompts"], payload["visual_prompts"]]
    loss = torch.tensor(0.0)
    for _ in range(context.training.epochs):
        leaves = [tensor.clone().requires_grad_() for tensor in pair]
        loss = literal.local_loss(backbone, *leaves, list(NAMES), split.pixels, split.labels, reference, alpha)
        gradients = torch.autograd.grad(loss, leaves)
        pair = [one - context.training.learning_rate * slope for one, slope in zip(pair, gradients, strict=True)]
    return [*pair, loss.detach()]


@pytest.mark.parametrize(("round", "depth"), [(1, None), (2, None), (2, 1)])
def test_the_first_phase_follows_equation_10(backbone: Backbone, round: int, depth: int | None) -> None:
    method = plan(alpha=0.7, depth=depth)
    state, phase = start(method, backbone), phase_of(method, "prompts")
    # Two steps: in the first one of round 2 local and global prompts are the same, and the divergence has no gradient.
    context = client_context(backbone, round=round, phase="prompts", epochs=2, learning_rate=0.1)
    server = server_context(backbone, "a")
    payload = method.payload(state, phase, server.clients[0], server)
    found = method.train(context, payload, {})
    text, visual, loss = slow_prompts(context, payload, 0.7, slow_reference(context, payload))
    without = slow_prompts(context, payload, 0.0, None)
    assert found.metrics["loss"] == pytest.approx(float(loss), rel=1e-4)  # cosines' rounding times the logits' scale
    assert found.private == {}
    for name, wanted, free in zip(payload, (text, visual), without, strict=False):
        assert_gradients(found.update[name] - payload[name], wanted - payload[name])
        assert float((wanted - free).abs().max()) > 1e-3 * float((wanted - payload[name]).abs().max())
    if depth == 1:
        assert payload["text_prompts"].shape[0] == payload["visual_prompts"].shape[0] == 1


def test_the_divergence_is_equation_9() -> None:
    draws = torch.Generator().manual_seed(0)
    reference, scores = torch.randn(5, 4, generator=draws) * 3, torch.randn(5, 4, generator=draws) * 3
    leaves = [scores.clone().requires_grad_() for _ in range(2)]
    found = divergence(torch.log_softmax(reference, -1), leaves[0])
    wanted = torch.stack([literal.divergence(g, k) for g, k in zip(reference, leaves[1], strict=True)]).mean()
    assert_values(found, wanted)
    assert float(found.detach()) > 0.1
    assert_gradients(
        *(torch.autograd.grad(value, leaf)[0] for value, leaf in zip((found, wanted), leaves, strict=True))
    )
    assert float(divergence(torch.log_softmax(reference, -1), reference)) == pytest.approx(0, abs=1e-6)


def test_the_reference_is_computed_once_per_image() -> None:
    asked: list[int] = []

    def logits(indices: Tensor, images: Tensor) -> Tensor:
        asked.extend(indices.tolist())
        return torch.stack([images[:, 0], 2 * images[:, 0]], dim=1).requires_grad_()

    pixels = torch.arange(6.0).unsqueeze(1)
    reference = Reference(6, 2, logits)
    for batch in ([2, 0, 5], [1, 2, 3], [4, 5, 0], [3, 1, 2]):
        rows = torch.tensor(batch)
        found = reference.of(rows, pixels[rows])
        assert_values(found, torch.log_softmax(torch.stack([rows.float(), 2 * rows.float()], dim=1), -1))
        assert not found.requires_grad
    assert sorted(asked) == [0, 1, 2, 3, 4, 5]


def test_the_reference_has_the_backbone_s_precision() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.4], [1 / 3, -1 / 7, 0.0]], dtype=torch.float64)
    reference = Reference(2, 3, lambda indices, images: scores[indices])
    found = reference.of(torch.tensor([1, 0]), torch.zeros(2, 1))
    assert found.dtype == torch.float64
    assert found.equal(torch.log_softmax(scores, -1)[[1, 0]])


@pytest.mark.parametrize("round", [1, 2])
@pytest.mark.parametrize("augmentation", ["none", "crop_flip"])
def test_the_reference_is_of_each_view_where_images_change(backbone: Backbone, round: int, augmentation: str) -> None:
    method = plan()
    context = client_context(backbone, round=round, phase="prompts", augmentation=augmentation)
    reference = method._reference(context, Towers(backbone, method.hyper), start(method, backbone))
    assert reference is not None
    rows, images = torch.arange(6), context.train.pixels
    first = reference.of(rows, images)
    assert_values(reference.of(rows, images), first)
    assert reference.of(rows, images.flip(-1)).equal(first) is (augmentation == "none")


COSTS = [(2, {}, 6), (1, {}, 0), (2, {"alpha": 0.0}, 0), (1, {"zero_shot_reference": False}, 0)]


@pytest.mark.parametrize(("round", "changes", "forwards"), COSTS)
def test_what_an_epoch_costs(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, round: int, changes: dict[str, Any], forwards: int
) -> None:
    """Images that pass the prompted tower without a gradient (the reference) and with one (the training)."""
    passed = {True: 0, False: 0}
    encode = backbone.encode_images_prompted

    def counting(images: Tensor, prompts: Tensor, **options: Any) -> Tensor:
        passed[torch.is_grad_enabled()] += len(images)
        return encode(images, prompts, **options)

    monkeypatch.setattr(backbone, "encode_images_prompted", counting)
    method = plan(**changes)
    context = client_context(backbone, round=round, phase="prompts", epochs=3, batch_size=4)
    method.train(context, start(method, backbone), {})
    assert passed == {True: 18, False: forwards}
    assert len(context.train.asked) == 18


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("clients", [1, 2, 4])
def test_aggregation_is_equations_12_and_13(backbone: Backbone, clients: int, residual: bool) -> None:
    state = start(plan(), backbone)
    prompts = filled({str(k): tuple(state["visual_prompts"].shape) for k in range(clients)}, 7, 1.0)
    leaves = [{name: tensor.clone().requires_grad_() for name, tensor in state.items() if "aggregator" in name}
              for _ in range(2)]  # fmt: skip
    one, other = leaves
    aggregator = Aggregator("visual", one, residual)
    found, wanted = (
        aggregator(torch.stack(list(prompts.values()))),
        literal.aggregated(other, "visual", list(prompts.values()), residual),
    )
    assert_values(found, wanted)
    gamma = aggregator.shares(torch.stack(list(prompts.values()))).detach()
    assert_values(gamma, literal.shares(other, "visual", list(prompts.values()), residual))
    assert_values(gamma.sum(0), torch.ones(3))
    if clients > 1:
        assert float((gamma.amax(0) - gamma.amin(0)).min()) > 0.03, "the case must tell clients apart"
    weight = filled({"w": tuple(found.shape)}, 8, 1.0)["w"]
    names = [spec.name for spec in aggregator_of("visual") if clients > 1 or ".fa." in spec.name]
    for name in names:
        slopes = [torch.autograd.grad((made * weight).sum(), leaf[name], retain_graph=True)[0]
                  for made, leaf in ((found, one), (wanted, other))]  # fmt: skip
        if name.endswith("fq.b2"):  # moves all scores alike, so the softmax takes no notice of it
            assert float(slopes[0].abs().max()) < 1e-4
            assert float(slopes[1].abs().max()) < 1e-4
        else:
            assert_gradients(*slopes)


def test_training_starts_at_the_plain_mean(backbone: Backbone) -> None:
    state = start(plan(), backbone, scale=None)
    prompts = torch.stack(list(filled({name: tuple(state["text_prompts"].shape) for name in "abc"}, 7, 0.02).values()))
    assert float((Aggregator("text", state, True).shares(prompts) - 1 / 3).abs().max()) < 0.01
    level = state | {"text_aggregator.query": torch.zeros_like(state["text_aggregator.query"])}
    assert_values(Aggregator("text", level, True)(prompts), prompts.mean(0))
    for name in ("query", "fq.w1", "fa.w1"):
        assert float(state[f"text_aggregator.{name}"].abs().max()) > 0
    assert 0.9 / 24**0.5 < float(state["text_aggregator.fa.w1"].abs().max()) <= 1 / 24**0.5, "uniform in ±1/√d_t"
    for name in ("fq.b1", "fq.w2", "fq.b2", "fa.b1", "fa.w2", "fa.b2"):
        assert not state[f"text_aggregator.{name}"].any()
    without = start(plan(residual=False), backbone, scale=None)
    assert float(Aggregator("text", without, False)(prompts).abs().max()) > 0, "else nothing would ever train"


def test_the_second_phase_follows_equation_15(backbone: Backbone) -> None:
    method, names = plan(), ["a", "b", "c"]
    state = start(method, backbone, *names)
    phase, server = phase_of(method, "aggregators"), server_context(backbone, *names)
    clients = {kind: list(filled({name: tuple(state[f"{kind}_prompts"].shape) for name in names}, seed, 0.5).values())
               for kind, seed in (("text", 5), ("visual", 6))}  # fmt: skip
    state |= {f"client_{kind}_prompts": torch.stack(found) for kind, found in clients.items()}
    payload = method.payload(state, phase, server.clients[1], server)
    context = client_context(backbone, client="b", phase="aggregators", epochs=2, learning_rate=0.1)
    found = method.train(context, payload, {})

    parts = {spec.name: payload[spec.name] for spec in phase.up}
    loss = torch.tensor(0.0)
    for _ in range(2):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in parts.items()}
        made = [literal.aggregated(leaves, kind, clients[kind]) for kind in ("text", "visual")]
        loss = literal.local_loss(backbone, *made, list(NAMES), context.train.pixels, context.train.labels, None, 0.0)
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        parts = {
            name: tensor.detach() - 0.1 * slope for (name, tensor), slope in zip(leaves.items(), slopes, strict=True)
        }
    assert found.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert set(found.update) == set(parts)
    for name, wanted in parts.items():
        if name.endswith("fq.b2"):  # has no gradient: it moves all scores alike
            assert_values(found.update[name], wanted)
        else:
            assert_gradients(found.update[name] - payload[name], wanted - payload[name])


def test_the_server_averages_the_aggregators_and_calls_them_once_more(backbone: Backbone) -> None:
    method, names = plan(), ["a", "b", "d"]
    state, server = start(method, backbone), server_context(backbone, *"abcd")
    prompts = {name: filled({f"{kind}_prompts": tuple(state[f"{kind}_prompts"].shape) for kind in ("text", "visual")},
                            seed, 1.0) for seed, name in enumerate(names)}  # fmt: skip
    between = method.aggregate(
        state, phase_of(method, "prompts"), (ClientUpdate(name, 1 / 3, prompts[name]) for name in names),
        weighted_mean, server,
    )  # fmt: skip
    assert method.measure(state, phase_of(method, "prompts"), between, server).clients == {}
    own = {spec.name: tuple(state[spec.name].shape) for spec in phase_of(method, "aggregators").up}
    trained = {name: filled(own, 20 + seed, 0.3) for seed, name in enumerate(names[:2])}
    updates = [ClientUpdate(name, 0.5, tensors) for name, tensors in trained.items()]
    after = method.aggregate(between, phase_of(method, "aggregators"), iter(updates), weighted_mean, server)
    mean = {name: (trained["a"][name] + trained["b"][name]) / 2 for name in own}
    measured = method.measure(between, phase_of(method, "aggregators"), after, server)
    for kind in ("text", "visual"):
        parts = [prompts[name][f"{kind}_prompts"] for name in names]
        assert_values(after[f"{kind}_prompts"], literal.aggregated(mean, kind, parts))
        gamma = literal.shares(mean, kind, parts)
        for row, name in enumerate(names):
            found = [measured.clients[name][f"gamma_{kind}_{block}"] for block in range(gamma.shape[1])]
            assert_values(torch.tensor(found), gamma[row])
        spread = float((gamma.amax(0) - gamma.amin(0)).max())
        assert measured.phase[f"gamma_{kind}_spread"] == pytest.approx(spread, rel=1e-4)
    for name in own:
        assert_values(after[name], mean[name])
    assert set(measured.clients) == set(names)
    assert after["client_text_prompts"].shape[0] == after["prompt_owners"].shape[0] == 0
    check_state(after, method, backbone)


# PLAN's rounds: what each phase may change, who takes part, what travels; the ablations and what is refused.


def test_each_phase_changes_its_own_bytes_only(backbone: Backbone) -> None:
    method, names = plan(), ["a", "c"]
    before = start(method, backbone)
    kept = {name: tensor.clone() for name, tensor in before.items()}
    aggregators = [spec.name for spec in phase_of(method, "aggregators").up]

    between, first = run_phase(method, backbone, before, "prompts", names)
    for client in first.values():
        assert set(client.update) == {"text_prompts", "visual_prompts"}
    for row, client in enumerate(names):
        for kind in ("text", "visual"):
            assert between[f"client_{kind}_prompts"][row].equal(first[client].update[f"{kind}_prompts"])
            assert not first[client].update[f"{kind}_prompts"].equal(before[f"{kind}_prompts"])
    assert between["prompt_owners"].tolist() == [0, 2]
    for name in (*aggregators, "text_prompts", "visual_prompts"):
        assert between[name].equal(before[name]), name
    check_state(between, method, backbone)

    shown = {name: tensor.clone() for name, tensor in between.items()}
    after, second = run_phase(method, backbone, between, "aggregators", names)
    for client in second.values():
        assert set(client.update) == set(aggregators)
        moved = {name for name in aggregators if not client.update[name].equal(between[name])}
        assert moved >= {name for name in aggregators if not name.endswith("fq.b2")}
    for name, tensor in shown.items():
        assert between[name].equal(tensor), f"the second phase changed {name} in place"
    for name, tensor in kept.items():
        assert before[name].equal(tensor), f"training changed {name} in place"
    assert not after["text_prompts"].equal(before["text_prompts"])
    check_state(after, method, backbone)
    assert all(weight.grad is None and not weight.requires_grad for weight in backbone.model.parameters())


def test_what_an_evaluation_downloads_is_the_global_prompts(backbone: Backbone) -> None:
    method = plan()
    state, server = start(method, backbone), server_context(backbone, "a")
    payload = method.payload(state, None, server.clients[0], server)
    assert set(payload) == {"text_prompts", "visual_prompts"}
    context = client_context(backbone, 5)
    found = method.classifier(context, payload, {}).logits(context.train, torch.tensor([3, 0]))
    wanted = slow_reference(replace(context, round=2), payload)[[3, 0]]
    assert_values(found, wanted)
    other = replace(context, class_names=("teapot", "sun"), label_space=NAMES)
    assert_values(method.classifier(other, payload, {}).logits(context.train, torch.arange(2))[:, 1], found.new_tensor(
        slow_reference(replace(context, round=2), payload)[:2, 0].tolist()))  # fmt: skip


def two_rounds(backbone: Backbone, **changes: Any) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    """The states after each phase of two rounds, and what clients a and b answered in each; private state is kept."""
    method, state = plan(**changes), start(plan(**changes), backbone, scale=None)
    states, answers = [state], []
    private: dict[str, dict[str, Tensor]] = {"a": {}, "b": {}}
    for round in (1, 2):
        for phase in ("prompts", "aggregators"):
            state, results = run_phase(method, backbone, state, phase, ["a", "b"], round=round, private=private)
            private = {name: result.private for name, result in results.items()}
            states.append(state)
            answers.append(results)
    return states, answers


def test_aggregators_persist_or_start_anew_in_every_round(backbone: Backbone) -> None:
    aggregators = [spec.name for spec in phase_of(plan(), "aggregators").up]
    persisting, _ = two_rounds(backbone)
    for name in aggregators:
        assert persisting[3][name].equal(persisting[2][name]), name
    anew, _ = two_rounds(backbone, aggregators="reset")
    assert any(not anew[2][name].equal(anew[1][name]) for name in aggregators)
    for name in aggregators:  # each round's second phase begins from the same draws
        assert anew[3][name].equal(anew[1][name]), name
    mean = anew[3]["client_text_prompts"].mean(0)
    start_of_round = Aggregator("text", anew[3], residual=True)
    uneven = start_of_round.shares(anew[3]["client_text_prompts"]) - 0.5
    assert float(uneven.abs().max()) < 0.2
    assert_values(start_of_round._perceptron("fa", anew[3]["client_text_prompts"]).mean(0), mean)


def test_local_prompts_restart_or_persist(backbone: Backbone) -> None:
    method = plan(local_prompts="persist")
    states, answers = two_rounds(backbone, local_prompts="persist")
    for name in ("text_prompts", "visual_prompts"):
        assert answers[1]["a"].private[name].equal(answers[0]["a"].update[name])  # through the second phase
    context = client_context(backbone, client="a", round=2, phase="prompts")
    given = {name: states[2][name] for name in ("text_prompts", "visual_prompts")}
    own = answers[0]["a"].update
    again = method.train(context, given, own).update
    assert again["text_prompts"].equal(answers[2]["a"].update["text_prompts"])
    # One step from its own prompts under the global reference: what a restart from them without KL would be, and more.
    no_reference = plan(alpha=0.0).train(context, dict(own), {}).update
    persisting = plan(alpha=0.0, local_prompts="persist").train(context, given, own).update
    assert persisting["text_prompts"].equal(no_reference["text_prompts"])
    restarted = plan(alpha=0.0).train(context, given, own)
    assert not restarted.update["text_prompts"].equal(persisting["text_prompts"])
    assert restarted.private == {}


def test_without_an_aggregator_the_mean_takes_its_place(backbone: Backbone) -> None:
    names = ["a", "b"]
    method = plan(text_aggregation="mean")
    assert not any(name.startswith(("text_aggregator", "client_text")) for name in start(method, backbone))
    state = start(method, backbone)
    between, first = run_phase(method, backbone, state, "prompts", names)
    mean = (first["a"].update["text_prompts"] + first["b"].update["text_prompts"]) / 2
    assert_values(between["text_prompts"], mean)
    assert between["visual_prompts"].equal(state["visual_prompts"])
    down = {spec.name for spec in phase_of(method, "aggregators").down}
    assert {"text_prompts", "client_visual_prompts"} < down
    assert "client_text_prompts" not in down
    after, second = run_phase(method, backbone, between, "aggregators", names)
    assert after["text_prompts"].equal(between["text_prompts"])
    assert all(name.startswith("visual_aggregator") for name in second["a"].update)
    check_state(after, method, backbone)

    plain = plan(text_aggregation="mean", visual_aggregation="mean")
    assert [phase.name for phase in plain.phases(1, 4)] == ["prompts"]
    after, first = run_phase(plain, backbone, start(plain, backbone), "prompts", names)
    assert set(after) == {"text_prompts", "visual_prompts"}
    for name, tensor in after.items():
        assert_values(tensor, (first["a"].update[name] + first["b"].update[name]) / 2)


def test_ablated_references(backbone: Backbone) -> None:
    def trained(round: int, **changes: Any) -> Tensor:
        context = client_context(backbone, round=round, phase="prompts", epochs=2, learning_rate=0.1)
        method = plan(**changes)
        return method.train(context, start(plan(), backbone), {}).update["visual_prompts"]

    assert trained(1, zero_shot_reference=False).equal(trained(1, alpha=0.0))
    assert trained(2, zero_shot_reference=False).equal(trained(2))
    assert not trained(1).equal(trained(1, alpha=0.0))
    assert not trained(2).equal(trained(2, alpha=0.0))


def test_which_phases_are_means() -> None:
    """A robust rule may stand for a mean; prompts that an aggregator is to look at are kept, each for itself."""
    kinds = {(): [False, True], ("text",): [False, True], ("text", "visual"): [True]}
    for means, wanted in kinds.items():
        method = plan(**{f"{kind}_aggregation": "mean" for kind in means})
        assert [phase.mean for phase in method.phases(1, 4)] == wanted


UNFIT = [
    ({"depth": 3}, {}, "the text tower has 2 blocks"),
    ({"depth": 4}, {"text_layers": 12}, "the image tower has 3 blocks"),
    ({}, {"d_v": None, "vision_layers": None}, "needs a vision transformer"),
    ({}, {"d_t": None, "text_layers": None}, "needs a text tower"),
    ({"m": 14}, {}, "leaves no room for a class name"),
]


@pytest.mark.parametrize(("changes", "shape", "told"), UNFIT)
def test_backbones_it_cannot_run(backbone: Backbone, changes: dict[str, Any], shape: dict[str, Any], told: str) -> None:
    server = server_context(backbone, "a")
    other = replace(server, shape=server.shape.model_copy(update=shape))
    with pytest.raises(MethodError, match=told):
        plan(**changes).initial_state(other, TorchDraws())


def test_a_client_without_images_is_told(backbone: Backbone) -> None:
    method = plan()
    with pytest.raises(MethodError, match="no training images"):
        method.train(client_context(backbone, 0, phase="prompts"), start(method, backbone), {})


# Two rounds of PLAN with two clients: worked out by hand from the equations, and over HTTP through both services.


CLIENTS = {"hospital-a": 7, "hospital-b": 5}  # training images


ROUNDS, SEED, RATE, MOMENTUM, DECAY, BATCH, ALPHA = 2, 5, 0.05, 0.9, 0.01, 4, 0.6


KINDS = ("text", "visual")


SPEC: dict[str, Any] = {
    "name": "by-hand",
    "method": {"name": "plan", "m": 2, "alpha": ALPHA},
    "class_names": list(NAMES),
    "rounds": ROUNDS,
    "training": {
        "learning_rate": RATE,
        "momentum": MOMENTUM,
        "weight_decay": DECAY,
        "batch_size": BATCH,
        "schedule": "constant",
    },
    "participation": {"min_clients": 2},
    "admission": {"max_update_norm": 100.0},  # the rate is 33 times PLAN's own, on a backbone with random weights
    "seed": SEED,
}


def source_of(client: str) -> Source:
    draws = np.random.default_rng(len(client) + CLIENTS[client])

    def split(count: int) -> Split:
        pixels = draws.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        return Split(torch.from_numpy(draws.integers(0, len(NAMES), count)), reader_of(pixels))

    return Source(client, NAMES, None, "a photo of a {}.", split(CLIENTS[client]), split(4))


@pytest.fixture(scope="module")
def over_http(backbone: Backbone) -> FederationResult:
    sources = SharedSources()
    for name in CLIENTS:
        sources.add(name, source_of(name))
    spec = SPEC | {"backbone": {"model": "small-both", "pretrained": None}}
    return simulate(spec, [Site(name, name) for name in CLIENTS], backbone=backbone, sources=sources)


class ByHand:
    """The clients' images, and the paper's algorithm 1 with loops and SGD written out."""

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        splits = {name: source_of(name).train for name in CLIENTS}
        self.images = {
            name: torch.stack([backbone.preprocess(split.image(row)) for row in range(len(split))])
            for name, split in splits.items()
        }
        self.labels = {name: split.labels for name, split in splits.items()}
        context = ServerContext(TrainingSpec(), shape_of(backbone), NAMES, (), SEED, ROUNDS)
        start = make_method(SPEC["method"]).initial_state(context, initial_draws(SEED))
        self.prompts = {kind: start[f"{kind}_prompts"] for kind in KINDS}
        self.aggregators = {name: tensor for name, tensor in start.items() if "aggregator" in name}
        self.shares: list[dict[str, Tensor]] = []

    def round(self, number: int) -> None:
        local = {name: self.local(name, number) for name in CLIENTS}
        parts = {kind: [local[name][row] for name in CLIENTS] for row, kind in enumerate(KINDS)}
        trained = [self.trained_aggregators(name, number, parts) for name in CLIENTS]
        self.aggregators = {name: sum(one[name] for one in trained) / len(CLIENTS) for name in self.aggregators}
        self.shares.append({kind: literal.shares(self.aggregators, kind, parts[kind]) for kind in KINDS})
        self.prompts = {kind: literal.aggregated(self.aggregators, kind, parts[kind]) for kind in KINDS}

    def local(self, client: str, number: int) -> list[Tensor]:
        images, labels = self.images[client], self.labels[client]
        reference = torch.stack([self.reference(image, number) for image in images])
        start = [self.prompts[kind] for kind in KINDS]

        def loss(weights: Sequence[Tensor], rows: Tensor) -> Tensor:
            return literal.local_loss(
                self.backbone, *weights, list(NAMES), images[rows], labels[rows], reference[rows], ALPHA
            )

        return self.descend(client, number, "prompts", start, loss)

    def reference(self, image: Tensor, number: int) -> Tensor:
        """The global prediction's logits ``(C,)``: zero-shot CLIP at first."""
        if number > 1:
            with torch.no_grad():
                return literal.logits(self.backbone, self.prompts["text"], self.prompts["visual"], list(NAMES), image)
        text = self.backbone.encode_text([f"a photo of a {name.replace('_', ' ')}." for name in NAMES])
        return self.backbone.logit_scale * text @ self.backbone.encode_images(image.unsqueeze(0))[0]

    def trained_aggregators(self, client: str, number: int, parts: dict[str, list[Tensor]]) -> Tensors:
        images, labels, names = self.images[client], self.labels[client], list(self.aggregators)

        def loss(weights: Sequence[Tensor], rows: Tensor) -> Tensor:
            own = dict(zip(names, weights, strict=True))
            made = [literal.aggregated(own, kind, parts[kind]) for kind in KINDS]
            return literal.local_loss(self.backbone, *made, list(NAMES), images[rows], labels[rows], None, 0.0)

        trained = self.descend(client, number, "aggregators", list(self.aggregators.values()), loss)
        return dict(zip(names, trained, strict=True))

    def descend(
        self, client: str, number: int, phase: str, start: list[Tensor], loss: Callable[..., Tensor]
    ) -> list[Tensor]:
        """One epoch: v ← μ·v + g + λ·w, w ← w − η·v."""
        draws = generator(SEED, number, phase, client, "batches")
        weights, speeds = start, [torch.zeros_like(one) for one in start]
        for rows in batches(CLIENTS[client], BATCH, 1, draws):
            leaves = [one.detach().clone().requires_grad_() for one in weights]
            slopes = torch.autograd.grad(loss(leaves, rows), leaves)
            speeds = [
                MOMENTUM * speed + slope + DECAY * one.detach()
                for speed, slope, one in zip(speeds, slopes, leaves, strict=True)
            ]
            weights = [one.detach() - RATE * speed for one, speed in zip(leaves, speeds, strict=True)]
        return weights


def test_what_was_worked_out_by_hand_comes_over_http(backbone: Backbone, over_http: FederationResult) -> None:
    hand = ByHand(backbone)
    start = {**{f"{kind}_prompts": hand.prompts[kind] for kind in KINDS}, **hand.aggregators}
    for number in range(1, ROUNDS + 1):
        hand.round(number)
    found = over_http.state
    wanted = {**{f"{kind}_prompts": hand.prompts[kind] for kind in KINDS}, **hand.aggregators}
    assert set(wanted) < set(found)
    moved = {name for name, tensor in wanted.items() if float((tensor - start[name]).abs().max()) > 1e-4}
    assert moved >= {"text_prompts", "visual_prompts", "visual_aggregator.fa.w2", "text_aggregator.query"}
    for name, tensor in wanted.items():
        assert_values(found[name], tensor)
        if name in moved:
            assert_gradients(found[name] - start[name], tensor - start[name])
    for number, shares in enumerate(hand.shares, start=1):
        measured = over_http.reports[number]["phases"][1]["measured"]
        assert list(measured["clients"]) == list(CLIENTS)
        for kind in KINDS:
            for row, client in enumerate(CLIENTS):
                for block, gamma in enumerate(shares[kind][row]):
                    assert measured["clients"][client][f"gamma_{kind}_{block}"] == pytest.approx(float(gamma), rel=1e-4)
