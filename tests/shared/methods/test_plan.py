"""PLAN's two phases against the equations written out, values and gradients, and what an epoch costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods.core.interface import ClientContext, ClientUpdate
from promptfed.shared.methods.plan import Aggregator, Reference, aggregator_of, divergence
from promptfed.shared.tensors import Tensors
from tests.support import literal_visual as literal
from tests.support.equality import assert_gradients, assert_values
from tests.support.small_plan import check_state, phase_of, plan, slow_reference, start
from tests.support.visual_clients import NAMES, client_context, filled, server_context, small_backbone


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


# Phase 1: Eq. 1 to 10


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


@pytest.mark.parametrize(
    ("round", "changes", "forwards"),
    [(2, {}, 6), (1, {}, 0), (2, {"alpha": 0.0}, 0), (1, {"zero_shot_reference": False}, 0)],
)
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


# Phase 2: Eq. 11 to 16


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


def test_renaming_clients_renames_their_shares_and_nothing_else(backbone: Backbone) -> None:
    method, server = plan(), server_context(backbone, *"abc")
    state = start(method, backbone)
    shapes = {f"{kind}_prompts": tuple(state[f"{kind}_prompts"].shape) for kind in ("text", "visual")}
    sent = {name: filled(shapes, seed, 1.0) for seed, name in enumerate("abc")}

    def carried_out(names: dict[str, str]) -> tuple[Tensors, dict[str, dict[str, float]]]:
        updates = sorted((ClientUpdate(names[one], 1 / 3, sent[one]) for one in sent), key=lambda update: update.client)
        between = method.aggregate(state, phase_of(method, "prompts"), iter(updates), weighted_mean, server)
        up = {spec.name: state[spec.name] for spec in phase_of(method, "aggregators").up}
        same = [ClientUpdate(name, 1 / 3, up) for name in "abc"]
        after = method.aggregate(between, phase_of(method, "aggregators"), iter(same), weighted_mean, server)
        return after, method.measure(between, phase_of(method, "aggregators"), after, server).clients

    names = {"a": "c", "b": "a", "c": "b"}
    (plain, shares), (renamed, others) = carried_out({name: name for name in names}), carried_out(names)
    for name in shapes:
        assert_values(renamed[name], plain[name])
    assert shares["a"] != pytest.approx(shares["b"])
    for old, new in names.items():
        assert others[new] == pytest.approx(shares[old], rel=1e-4)
