"""pFedPG's server half against its equations: the generator, the server step, newcomers, and who is given what."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.settings import make_settings
from promptfed.client_service.worker import Worker
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.data import open_source
from promptfed.shared.methods import describe, make_method
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import BIAS, CLASSES, WEIGHT, LinearHead
from promptfed.shared.methods.core.interface import ClientInfo, ClientUpdate, ServerContext, check_admission
from promptfed.shared.methods.core.training import batches
from promptfed.shared.methods.pfedpg import ADAPTED, BASIS, DESCRIPTORS, PFedPG
from promptfed.shared.seeds import generator
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import TorchDraws, check, decode, state_hash
from tests.shared.methods.conftest import NAMES, Wire
from tests.support.equality import assert_values
from tests.support.fake_coordinator import FakeCoordinator, made_up_source
from tests.support.literal_pfedpg import PROMPTS, Server
from tests.support.terms import training_terms
from tests.support.textless import MODEL, textless_backbone

SHAPE = BackboneShape(d_v=24, d_e=16, vision_layers=2, patch_size=8)


def method_of(**hyper: Any) -> PFedPG:
    """The method with five tokens and narrow networks."""
    made = make_method({"name": "pfedpg", "m": 5, "inner_width": 12, "hidden": 7} | hyper)
    assert isinstance(made, PFedPG)
    return made


def roster(*names: str, **changes: Any) -> ServerContext:
    """What the server half is handed for trainers of these names."""
    clients = tuple(ClientInfo(name, "trainer", 10, NAMES) for name in sorted(names))
    return replace(ServerContext(TrainingSpec(), SHAPE, None, clients, seed=3, rounds=4), **changes)


def start(method: PFedPG, context: ServerContext) -> Tensors:
    """The state before the first round."""
    return method.initial_state(context, TorchDraws().manual_seed(1))


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers of standard deviation ``scale``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def step(method: PFedPG, state: Tensors, deltas: Mapping[str, Tensor], context: ServerContext) -> Tensors:
    """The state after a round in which each client changed its prompt ``(m, d_v)`` by its delta."""
    [phase] = method.phases(1, 1)
    updates = [ClientUpdate(name, 0.25, {"delta": delta}) for name, delta in sorted(deltas.items())]

    def no_mean(updates: Any) -> Tensors:
        raise AssertionError("pfedpg takes no mean")

    return method.aggregate(state, phase, iter(updates), no_mean, context)


KINDS = ("attention", "mlp", "adain", "basis")


OPTIMIZERS = ("adam", "sgd")


CLIENTS = ["ash", "birch", "cedar"]


def prompts(method: PFedPG, state: Tensors, name: str, context: pf.ServerContext) -> Tensor:
    [client] = [client for client in context.clients if client.name == name]
    return method.payload(state, None, client, context)["prompts"]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_equal_the_equations(kind: str) -> None:
    method, context = method_of(generator=kind), roster(*CLIENTS)
    state = start(method, context)
    learned = {name: tensor for name, tensor in state.items() if not name.startswith("adam_")}
    state |= {name: tensor + noise(*tensor.shape, scale=0.1) for name, tensor in learned.items()}
    for row, name in enumerate(CLIENTS):
        descriptor = state[DESCRIPTORS][row] if DESCRIPTORS in state else torch.zeros(1)
        found = prompts(method, state, name, context)
        assert found.shape == (5, 24)
        assert found.dtype == torch.float32
        assert_values(found, PROMPTS[kind](state, descriptor))


def test_the_start_is_vpts_xaviers_and_uniform_descriptors() -> None:
    method = method_of(m=40, inner_width=30)
    state = start(method, roster(*CLIENTS))
    bounds = {
        BASIS: (6 / (3 * 8 * 8 + 24)) ** 0.5, "w_query": (6 / (24 + 30)) ** 0.5, "w_output": (6 / (30 + 24)) ** 0.5,
        DESCRIPTORS: 1.0,
    }  # fmt: skip
    for name, bound in bounds.items():
        assert float(state[name].abs().max()) <= bound
        assert float(state[name].abs().max()) > 0.9 * bound
        assert abs(float(state[name].mean())) < 0.15 * bound
    assert all(not tensor.any() for name, tensor in state.items() if name.startswith("adam_"))


def test_a_client_starts_from_the_same_descriptor_whoever_else_is_there() -> None:
    method = method_of()
    few, many = start(method, roster("birch")), start(method, roster(*CLIENTS))
    assert few[DESCRIPTORS][0].equal(many[DESCRIPTORS][1])
    assert start(method, roster())[DESCRIPTORS].shape == (0, 24)
    other = method.initial_state(roster("birch", seed=4), TorchDraws().manual_seed(1))
    assert not other[DESCRIPTORS].equal(few[DESCRIPTORS])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_server_steps_equal_autograd_and_torchs_optimizers_also_of_clients_once_away(kind: str, optimizer: str) -> None:
    method = method_of(generator=kind, generator_optimizer=optimizer, generator_learning_rate=0.02)
    context = roster(*CLIENTS)
    state = start(method, context)
    literal = Server(kind, optimizer, 0.02, state, CLIENTS)
    for round, answered in enumerate((CLIENTS, ["ash", "cedar"], ["birch"], CLIENTS)):
        deltas = {name: noise(5, 24, seed=10 * round + len(name), scale=0.3) for name in answered}
        literal.step(deltas)
        before, state = state, step(method, state, deltas, context)
        assert not any(one.requires_grad for one in (*before.values(), *state.values()))
        for name, wanted in literal.shared.items():
            assert_values(state[name], wanted)
        for row, name in enumerate(CLIENTS):
            if DESCRIPTORS in state:
                assert_values(state[DESCRIPTORS][row], literal.descriptors[name])
            assert_values(prompts(method, state, name, context), literal.prompts(name))
    check(state, {spec.name: (spec.resolve(method.dims(context)), spec.dtype) for spec in method.state_tensors()})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clients_that_did_not_answer_stay_bit_for_bit_as_they_are(optimizer: str) -> None:
    method, context = method_of(generator_optimizer=optimizer), roster(*CLIENTS)
    state = step(method, start(method, context), {name: noise(5, 24) for name in CLIENTS}, context)
    after = step(method, state, {"birch": noise(5, 24, seed=1)}, context)
    for name in state:
        if name.endswith(DESCRIPTORS):
            assert after[name][[0, 2]].equal(state[name][[0, 2]])
            assert not after[name][1].equal(state[name][1])


def test_a_step_is_deterministic_and_leaves_the_old_state_alone() -> None:
    method, context = method_of(), roster(*CLIENTS)
    state = start(method, context)
    before = state_hash(state)
    deltas = {name: noise(5, 24, seed=len(name)) for name in CLIENTS}
    after = step(method, state, deltas, context)
    assert state_hash(state) == before != state_hash(after) == state_hash(step(method, state, deltas, context))


def test_all_that_the_coordinator_learns_stays_there() -> None:
    for kind in KINDS:
        for optimizer in OPTIMIZERS:
            method, context = method_of(generator=kind, generator_optimizer=optimizer), roster(*CLIENTS)
            assert not any(spec.shared_with_clients for spec in method.state_tensors())
            assert {spec.name for spec in method.state_tensors()} == set(start(method, context))
            [phase] = method.phases(1, 2)
            for client in context.clients:
                for served in (phase, None):
                    assert list(method.payload(start(method, context), served, client, context)) == ["prompts"]
    told = describe("pfedpg")
    assert told["needs"]["text_tower"] is False
    assert told["needs"]["vision_transformer"] is True
    assert told["cached_features"] is False
    assert [tensor["name"] for tensor in told["phases"][0]["up"]] == ["delta"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_newcomer_gets_the_mean_descriptor_where_its_name_stands(optimizer: str) -> None:
    method, context = method_of(generator_optimizer=optimizer), roster("ash", "cedar")
    state = step(method, start(method, context), {name: noise(5, 24) for name in ("ash", "cedar")}, context)
    wider = roster(*CLIENTS)
    joined = method.join(state, wider.clients[1], wider)
    check(joined, {spec.name: (spec.resolve(method.dims(wider)), spec.dtype) for spec in method.state_tensors()})
    assert joined[DESCRIPTORS][1].equal(state[DESCRIPTORS].mean(0))
    for name in state:
        if name.endswith(DESCRIPTORS):
            assert joined[name][[0, 2]].equal(state[name])
            assert name == DESCRIPTORS or not joined[name][1].any()
        else:
            assert joined[name].equal(state[name])
    literal = PROMPTS["attention"](state, state[DESCRIPTORS].mean(0))
    assert_values(prompts(method, joined, "birch", wider), literal)
    for name in ("ash", "cedar"):
        assert prompts(method, joined, name, wider).equal(prompts(method, state, name, context))


def test_a_newcomer_takes_its_first_step_as_one_that_starts() -> None:
    """Adam's correction of the first steps counts each client's own."""
    method, context = method_of(generator_learning_rate=0.05), roster("ash", "cedar")
    state = start(method, context)
    for round in range(3):
        state = step(method, state, {name: noise(5, 24, seed=round) for name in ("ash", "cedar")}, context)
    wider = roster(*CLIENTS)
    joined = method.join(state, wider.clients[1], wider)
    after = step(method, joined, {"birch": noise(5, 24, seed=9)}, wider)
    moved = after[DESCRIPTORS][1] - joined[DESCRIPTORS][1]
    assert moved.abs() == pytest.approx(torch.full((24,), 0.05), rel=1e-3)
    assert after["adam_steps.descriptors"].tolist() == [3, 1, 3]


def test_backbones_and_clients_that_do_not_fit() -> None:
    method, context = method_of(), roster(*CLIENTS)
    blind = replace(context, shape=BackboneShape(d_t=8, d_e=8))
    with pytest.raises(pf.MethodError, match="pfedpg needs a vision transformer"):
        method.dims(blind)
    with pytest.raises(pf.MethodError, match="patch_size"):
        start(method, replace(context, shape=SHAPE.model_copy(update={"patch_size": None})))
    with pytest.raises(pf.MethodError, match="an evaluator has none"):
        check_admission(method, pf.ClientInfo("lab", "evaluator", 0, NAMES), None, lambda: context)
    check_admission(method, context.clients[0], None, lambda: context)


@dataclass
class Pictures:
    """Noise with labels, as preprocessed images."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def features(self) -> Tensor:
        raise AssertionError("visual prompts change the features: none may be cached")

    def raw_features(self) -> Tensor:
        raise AssertionError("visual prompts change the features: none may be cached")

    def images(self, indices: Tensor) -> Tensor:
        return self.pixels[indices]


@pytest.fixture
def textless() -> Backbone:
    return textless_backbone()


@pytest.fixture(params=["clip", "timm"])
def any_backbone(request: pytest.FixtureRequest) -> Backbone:
    found: Backbone = request.getfixturevalue("backbone" if request.param == "clip" else "textless")
    return found


def task(backbone: Backbone, count: int = 10, **training: Any) -> pf.ClientContext:
    height, width = backbone.image_size
    pictures = Pictures(noise(count, 3, height, width), torch.arange(count) % len(NAMES))
    return pf.ClientContext(
        backbone=backbone, class_names=NAMES, template="a photo of a {}.",
        terms=training_terms({"epochs": 2, "batch_size": 4, "learning_rate": 0.05, "schedule": "constant"} | training),
        client="birch",
        domain=None, peers=(), round=2, phase="train", train=pictures,
    )  # fmt: skip


def logits(backbone: Backbone, images: Tensor, P: Tensor, weight: Tensor, bias: Tensor, projected: bool) -> Tensor:
    features = backbone.encode_images_prompted(images, P.unsqueeze(0), pooled=not projected, normalize=False)
    return torch.stack(
        [torch.stack([torch.dot(w, f) + b for w, b in zip(weight, bias, strict=True)]) for f in features]
    )


@pytest.mark.parametrize("projected", [False, True])
def test_training_equals_sgd_written_out_and_sends_just_the_change(any_backbone: Backbone, projected: bool) -> None:
    method = method_of(projected=projected)
    context = task(any_backbone, weight_decay=0.01, momentum=0.9)
    served = noise(5, any_backbone.d_v, scale=0.1)
    kept = served.clone()
    found = method.train(context, {"prompts": served}, {})
    assert served.equal(kept)

    width = any_backbone.d_e if projected else any_backbone.d_v
    head = LinearHead.start(context, width)
    values = [served.clone(), head.weight.clone(), head.bias.clone()]
    velocity = [torch.zeros_like(value) for value in values]
    order = batches(10, 4, 2, generator(3, 2, "train", "birch", "batches"))
    for rows in order:
        leaves = [value.clone().requires_grad_() for value in values]
        scores = logits(any_backbone, context.train.images(rows), *leaves, projected)
        loss = F.cross_entropy(scores, context.train.labels[rows])
        for k, gradient in enumerate(torch.autograd.grad(loss, leaves)):
            velocity[k] = 0.9 * velocity[k] + gradient + 0.01 * values[k]
            values[k] = values[k] - 0.05 * velocity[k]
    assert set(found.update) == {"delta"}
    assert set(found.private) == {"adapted_prompts", WEIGHT, BIAS, CLASSES}
    assert_values(found.private["adapted_prompts"], values[0])
    assert_values(found.private[WEIGHT], values[1])
    assert_values(found.private[BIAS], values[2])
    assert found.update["delta"].equal(found.private["adapted_prompts"] - served), "ΔP is P̃ − P to the last bit"
    assert found.metrics["delta_norm"] == pytest.approx(float(found.update["delta"].norm()))
    assert all(parameter.grad is None for parameter in any_backbone.model.parameters())


def test_the_next_round_goes_on_with_the_clients_own_head_and_the_prompts_that_are_served(textless: Backbone) -> None:
    method, context = method_of(), task(textless, epochs=1)
    first = method.train(context, {"prompts": noise(5, 24, scale=0.1)}, {})
    served = noise(5, 24, seed=5, scale=0.1)
    frozen = context.with_terms(training=context.training.model_copy(update={"learning_rate": 1e-12}))
    second = method.train(frozen, {"prompts": served}, first.private)
    assert_values(second.private[WEIGHT], first.private[WEIGHT])
    assert_values(second.private["adapted_prompts"], served)


def test_it_classifies_with_the_generated_prompts_and_beside_them_with_the_adapted(any_backbone: Backbone) -> None:
    method, context = method_of(), task(any_backbone)
    trained = method.train(context, {"prompts": noise(5, any_backbone.d_v, scale=0.1)}, {}).private
    generated = noise(5, any_backbone.d_v, seed=7, scale=0.1)
    rows = torch.tensor([3, 1, 8])
    made = {"": method.classifier(context, {"prompts": generated}, trained)}
    made |= method.variants(context, {"prompts": generated}, trained)
    for variant, used in {"": generated, "adapted": trained["adapted_prompts"]}.items():
        with torch.no_grad():
            wanted = logits(any_backbone, context.train.images(rows), used, trained[WEIGHT], trained[BIAS], False)
        assert_values(made[variant].logits(context.train, rows), wanted)
    assert not made[""].logits(context.train, rows).equal(made["adapted"].logits(context.train, rows))
    some = replace(context, class_names=NAMES[1:3], label_space=NAMES)
    chosen = method.classifier(some, {"prompts": generated}, trained).logits(context.train, rows)
    assert_values(chosen, made[""].logits(context.train, rows)[:, 1:3])


def test_before_its_first_training_a_client_has_the_seeded_head_and_nothing_adapted(textless: Backbone) -> None:
    method, context = method_of(), task(textless)
    payload = {"prompts": noise(5, 24, scale=0.1)}
    rows = torch.arange(10)
    head = LinearHead.start(context, 24)
    with torch.no_grad():
        wanted = logits(textless, context.train.images(rows), payload["prompts"], head.weight, head.bias, False)
    assert_values(method.classifier(context, payload, {}).logits(context.train, rows), wanted)
    assert method.variants(context, payload, {}) == {}


# pFedPG with the real coordinator and real clients: on both kinds of backbone, what leaves a client, what it keeps.


SMALL = "topic=weather&per_class=2&test_per_class=1"


DATA = {"anna": f"symbols:sketch?{SMALL}", "bert": f"symbols:neon?{SMALL}"}


NAMES_PFEDPG_FEDERATION = open_source(DATA["anna"]).class_names


SITES = [Site(name, uri) for name, uri in DATA.items()]


TEXTLESS = {"model": MODEL, "pretrained": None}


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "styles", "method": {"name": "pfedpg", "m": 3}, "class_names": list(NAMES_PFEDPG_FEDERATION),
        "rounds": 2, "training": {"epochs": 1, "batch_size": 10, "learning_rate": 0.05}, "seed": 5,
    } | changes  # fmt: skip


def private_state(folder: Path, client: str) -> Tensors:
    return decode((folder / f"client-{client}" / "committed.safetensors").read_bytes())[0]


def test_a_federation_on_a_backbone_without_text(wire: Wire, tmp_path: Path) -> None:
    backbone = textless_backbone()
    found = simulate(spec(backbone=TEXTLESS), SITES, backbone=backbone, folder=tmp_path / "run")
    assert found.spec["backbone"]["fingerprint"] == backbone.fingerprint
    assert found.spec["backbone"]["shape"] == shape_of(backbone).model_dump()
    assert all(one.zero_shot is None for one in found.accuracies())
    for report in found.reports:
        for client in report["evaluation"]["clients"].values():
            assert set(client["splits"]) == ({"test", "test@adapted"} if report["round"] else {"test"})
            assert client["zero_shot"] == {}

    payloads = {what.split("/")[-2]: decode(body)[0] for what, _, body in wire if re.match("answer .*/payload$", what)}
    updates = {what.split("/")[-2]: decode(body)[0] for what, _, body in wire if re.match("PUT .*/update$", what)}
    assert [set(update) for update in updates.values()] == [{"delta"}] * 4
    adapted = [payloads[task]["prompts"] + update["delta"] for task, update in updates.items()]
    heads = [private_state(tmp_path / "run", name) for name in DATA]
    for head in heads:
        assert set(head) == {WEIGHT, BIAS, CLASSES, ADAPTED}
        assert any(torch.allclose(head[ADAPTED], one, atol=1e-6) for one in adapted)
        for row in head[WEIGHT]:
            trace = row[:4].contiguous().numpy().tobytes()
            assert not any(trace in body for _, _, body in wire), "the head stays with the client"
    assert not heads[0][WEIGHT].equal(heads[1][WEIGHT])


def test_a_client_whose_backbone_lacks_what_the_method_needs_says_so_before_it_enrols(tmp_path: Path) -> None:
    shape = shape_of(textless_backbone()).model_copy(update={"d_t": 8})
    coordinator = FakeCoordinator(shape, model=MODEL, pretrained=None)
    token = tmp_path / "token"
    token.write_text("enrolment-token\n")
    settings = make_settings(
        coordinator="http://127.0.0.1:1", federation="pets", name="anna", data="made-up", state_dir=tmp_path / "state",
        enrolment_token_file=token, device="cpu",
    )  # fmt: skip
    worker = Worker(settings, Parts(textless_backbone(), made_up_source()), http=coordinator.http())
    with pytest.raises(ClientError, match="promptfl needs a text tower") as error:
        asyncio.run(worker.run())
    assert error.value.exit is Exit.BACKBONE
    assert coordinator.client is None
