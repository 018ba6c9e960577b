"""pFedPG's server half against its equations: the generator, the server step, newcomers, and who is given what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from promptfed.shared.methods import describe, make_method
from promptfed.shared.methods.core.interface import ClientInfo, MethodError, ServerContext, check_admission
from promptfed.shared.methods.pfedpg import BASIS, DESCRIPTORS, PFedPG
from promptfed.shared.spec.spec import BackboneShape
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import TorchDraws, check, state_hash
from tests.shared.methods.conftest import NAMES
from tests.support.equality import assert_values
from tests.support.literal_pfedpg import PROMPTS, Server
from tests.support.small_pfedpg import SHAPE, method_of, noise, roster, start, step

KINDS = ("attention", "mlp", "adain", "basis")
OPTIMIZERS = ("adam", "sgd")
CLIENTS = ["ash", "birch", "cedar"]


def prompts(method: PFedPG, state: Tensors, name: str, context: ServerContext) -> Tensor:
    [client] = [client for client in context.clients if client.name == name]
    return method.payload(state, None, client, context)["prompts"]


# The generator (equation 3) and its ablations


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


def test_the_attention_shifts_all_tokens_alike_and_each_client_differently() -> None:
    method, context = method_of(), roster(*CLIENTS)
    state = start(method, context)
    shifts = [prompts(method, state, name, context) - state[BASIS] for name in CLIENTS]
    for shift in shifts:
        assert_values(shift, shift[:1].expand(5, -1))
    assert float((shifts[0] - shifts[1]).norm()) > 1e-3


def test_the_start_is_vpts_xaviers_and_uniform_descriptors() -> None:
    method = method_of(m=40, inner_width=30)
    state = start(method, roster(*CLIENTS))
    bounds = {
        BASIS: (6 / (3 * 8 * 8 + 24)) ** 0.5,
        "w_query": (6 / (24 + 30)) ** 0.5,
        "w_output": (6 / (30 + 24)) ** 0.5,
        DESCRIPTORS: 1.0,
    }
    for name, bound in bounds.items():
        assert float(state[name].abs().max()) <= bound
        assert float(state[name].abs().max()) > 0.9 * bound
        assert abs(float(state[name].mean())) < 0.15 * bound
    assert all(not tensor.any() for name, tensor in state.items() if name.startswith("adam_"))


def test_a_client_starts_from_the_same_descriptor_whoever_else_is_there() -> None:
    method = method_of()
    few, many = start(method, roster("birch")), start(method, roster(*CLIENTS))
    assert few[DESCRIPTORS][0].equal(many[DESCRIPTORS][1])
    other = method.initial_state(roster("birch", seed=4), TorchDraws().manual_seed(1))
    assert not other[DESCRIPTORS].equal(few[DESCRIPTORS])


# The server step (equations 4 and 5, with −ΔP as the gradient)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_server_steps_equal_autograd_and_torchs_optimizers_also_of_clients_that_were_away(
    kind: str, optimizer: str
) -> None:
    method = method_of(generator=kind, generator_optimizer=optimizer, generator_learning_rate=0.02)
    context = roster(*CLIENTS)
    state = start(method, context)
    literal = Server(kind, optimizer, 0.02, state, CLIENTS)
    for round, answered in enumerate((CLIENTS, ["ash", "cedar"], ["birch"], CLIENTS)):
        deltas = {name: noise(5, 24, seed=10 * round + len(name), scale=0.3) for name in answered}
        literal.step(deltas)
        state = step(method, state, deltas, context)
        for name, wanted in literal.shared.items():
            assert_values(state[name], wanted)
        for row, name in enumerate(CLIENTS):
            if DESCRIPTORS in state:
                assert_values(state[DESCRIPTORS][row], literal.descriptors[name])
            assert_values(prompts(method, state, name, context), literal.prompts(name))
    check(state, {spec.name: (spec.resolve(method.dims(context)), spec.dtype) for spec in method.state_tensors()})


def test_gradients_equal_autograd() -> None:
    """With SGD at rate 1 a step is the gradient itself."""
    method = method_of(generator_optimizer="sgd", generator_learning_rate=1.0)
    context = roster(*CLIENTS)
    state = start(method, context)
    literal = Server("attention", "sgd", 1.0, state, CLIENTS)
    deltas = {name: noise(5, 24, seed=len(name), scale=0.3) for name in CLIENTS}
    literal.step(deltas)
    after = step(method, state, deltas, context)
    wanted = {name: leaf.grad for name, leaf in literal.shared.items()}
    wanted[DESCRIPTORS] = torch.stack([row.grad for row in literal.descriptors.values() if row.grad is not None])
    for name, gradient in wanted.items():
        assert gradient is not None
        found = state[name].double() - after[name].double()
        assert float(gradient.abs().max()) > 0
        # What a float32 state can hold of its change is limited by its own size.
        room = 1e-4 * float(gradient.abs().max()) + 2**-23 * float(state[name].abs().max() + gradient.abs().max())
        assert float((found - gradient).abs().max()) <= room, name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clients_that_did_not_answer_stay_bit_for_bit_as_they_are(optimizer: str) -> None:
    method, context = method_of(generator_optimizer=optimizer), roster(*CLIENTS)
    state = step(method, start(method, context), {name: noise(5, 24) for name in CLIENTS}, context)
    after = step(method, state, {"birch": noise(5, 24, seed=1)}, context)
    for name in state:
        if name.endswith(DESCRIPTORS):
            assert after[name][[0, 2]].equal(state[name][[0, 2]])
            assert not after[name][1].equal(state[name][1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [128, 768])
@pytest.mark.parametrize("distance", [0.1, 0.5])
def test_after_one_step_the_generated_prompts_are_nearer_to_what_the_clients_made_of_them(
    kind: str, optimizer: str, width: int, distance: float
) -> None:
    """All of them together and each client's own, at the default rate from a fresh state, towards fixed P̃."""
    method = make_method({"name": "pfedpg", "generator": kind, "generator_optimizer": optimizer})
    assert isinstance(method, PFedPG)
    context = roster(*CLIENTS, shape=BackboneShape(d_v=width, d_e=512, vision_layers=12, patch_size=16))
    state = start(method, context)
    before = {name: prompts(method, state, name, context) for name in CLIENTS}
    goals = {name: P + noise(10, width, seed=len(name), scale=distance) for name, P in before.items()}
    after = step(method, state, {name: goals[name] - before[name] for name in CLIENTS}, context)
    for name in CLIENTS:
        gone = (goals[name] - prompts(method, after, name, context)).norm() / (goals[name] - before[name]).norm()
        assert float(gone) < 1, name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_change_at_the_clients_changes_nothing(kind: str, optimizer: str) -> None:
    method, context = method_of(generator=kind, generator_optimizer=optimizer), roster(*CLIENTS)
    state = start(method, context)
    after = step(method, state, {name: torch.zeros(5, 24) for name in CLIENTS}, context)
    learned = [name for name in state if not name.startswith("adam_steps")]
    assert all(after[name].equal(state[name]) for name in learned)


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


# Newcomers


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


# Refusals


def test_backbones_and_clients_that_do_not_fit() -> None:
    method, context = method_of(), roster(*CLIENTS)
    blind = replace(context, shape=BackboneShape(d_t=8, d_e=8))
    with pytest.raises(MethodError, match="pfedpg needs a vision transformer"):
        method.dims(blind)
    with pytest.raises(MethodError, match="patch_size"):
        start(method, replace(context, shape=SHAPE.model_copy(update={"patch_size": None})))
    with pytest.raises(MethodError, match="an evaluator has none"):
        check_admission(method, ClientInfo("lab", "evaluator", 0, NAMES), None, lambda: context)
    check_admission(method, context.clients[0], None, lambda: context)
