"""The server half with numpy against the same with torch: of every method, of every rule, and of the draws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy import stats

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.aggregation.global_state import Combined, call, call_with_torch
from promptfed.coordinator.aggregation.rules import MOMENTUM, RULES, Rule, ServerOptimizer
from promptfed.coordinator.aggregation.secure_sums import NoiseTerms, private_mean
from promptfed.coordinator.domain.federation import Federation, new_federation
from promptfed.shared.messages import Domain
from promptfed.shared.methods import METHODS, resolve_spec
from promptfed.shared.methods.core import interface
from promptfed.shared.methods.core.array_library import computed
from promptfed.shared.methods.core.interface import ClientInfo, ClientUpdate, MethodError, ServerContext
from promptfed.shared.privacy.noise import NoiseStream
from promptfed.shared.seeds import draws, generator
from promptfed.shared.spec.sections import AggregationSpec, ServerOptimizerSpec
from promptfed.shared.spec.spec import BackboneShape
from promptfed.shared.tensors import Arrays, TensorError, Tensors
from promptfed.testing.clients import CLASSES, spec

SHAPE = {
    "d_t": 8, "d_e": 8, "d_v": 8, "text_layers": 2, "vision_layers": 2, "context_length": 16, "patch_size": 2,
    "patch_tokens": 4, "mlp_width": 8, "positions": 5, "heads_t": 2, "heads_v": 2,
}  # fmt: skip


TEXT = {"m": 4}


NONE, NORMS, TWO = {}, {"trainable": "norms"}, {"m": 2}
OF_TEXT = "coop fast_pt fedkgcoop fedotp fedpgp fedtpg fedvpt pfedmoap pfedprompt promptfl promptfl_amp promptfl_ft"
SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys([*OF_TEXT.split(), "promptfl_per", "promptfl_prox", "promptfolio"], TEXT),
    **dict.fromkeys(["diprompt", "fedapt", "fedmaple", "fedpr", "fedvpt_deep", "singleset_vpt"], TWO),
    **dict.fromkeys(["fedbabu", "fedrod", "perfedavg", "singleset_full"], NORMS),
    **dict.fromkeys(["fedclip", "fedlp", "fedtaskres", "zero_shot"], NONE), "fedavg": {"trainable": "all"},
    "fedclipadapter": {"reduction": 2}, "fedcocoop": TEXT | {"reduction": 2}, "fedlora": {"r": 2},
    "fedprox": {"trainable": "biases"}, "fedrep": {"trainable": "last_k", "k": 1},
    "pfedpg": {"m": 2, "inner_width": 4}, "plan": {"m": 2, "reduction": 4},
}  # fmt: skip


"""Options with which each method is small."""


NAMES = ("B", "a", "c")


DOMAINS = {"B": "a blueprint of a {}", "a": "a sketch of a {}", "c": "a neon sign of a {}"}


CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def federation_of(name: str) -> Federation:
    raw = spec(rounds=2, class_names=CLASSES) | {"method": {"name": name, **SMALL[name]}}
    return new_federation("fed-1", resolve_spec(raw))


def context_of(federation: Federation) -> ServerContext:
    clients = tuple(
        ClientInfo(name, "trainer", 10 + place, tuple(CLASSES), Domain(name=name, description=DOMAINS[name]))
        for place, name in enumerate(sorted(NAMES))
    )
    shape = BackboneShape.model_validate(SHAPE)
    return ServerContext(federation.spec.training, shape, tuple(CLASSES), clients, 7, federation.spec.rounds)


def made(federation: Federation, name: str, *arguments: Any) -> tuple[Any, Any]:
    """The result of a server function with numpy, and with torch."""
    return call(federation, name, *arguments), call_with_torch(federation.method, name, arguments, 1)


def assert_close(first: Arrays, second: Arrays) -> None:
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.shape) == (second[name].dtype, second[name].shape), name
        np.testing.assert_allclose(array.astype(float), second[name].astype(float), **CLOSE, err_msg=name)


def test_every_method_is_compared() -> None:
    assert set(SMALL) == set(METHODS.own())


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_method_computes_the_same_with_both(name: str) -> None:
    federation = federation_of(name)
    context, method = context_of(federation), federation.method
    state, in_torch = made(federation, "initial_state", context)
    assert_close(state, in_torch)
    if interface.has_own(method, "adopt"):
        adopted = made(federation, "adopt", state, context)
        assert_close(*adopted)
        state = adopted[0]
    random = np.random.default_rng(5)
    for phase in method.phases(1, federation.spec.rounds):
        for client in context.clients:
            assert_close(*made(federation, "payload", state, phase, client, context))
        expected = method.expected_update(phase, context.clients[0], context)
        updates = []
        for place, client in enumerate(context.clients):
            sizes = {key: 0.1 * random.standard_normal(shape) for key, (shape, _) in expected.items()}
            tensors = {key: values.astype(np.float32) for key, values in sizes.items()}
            updates.append(ClientUpdate(client.name, (0.2, 0.3, 0.5)[place], tensors))
        combine = Combined(Rule(AggregationSpec(), state), ServerOptimizer(ServerOptimizerSpec(), state))
        after, after_torch = made(federation, "aggregate", state, phase, updates, combine, context)
        assert_close(after, after_torch)
        if interface.has_own(method, "measure"):
            first, second = made(federation, "measure", state, phase, after, context)
            assert first.phase == pytest.approx(second.phase, rel=1e-4, abs=1e-6)
            for client_name, numbers in first.clients.items():
                assert numbers == pytest.approx(second.clients[client_name], rel=1e-4, abs=1e-6)
        state = after


def test_only_pfedpg_needs_torch() -> None:
    functions = ("initial_state", "adopt", "join", "forget", "payload", "aggregate", "measure")
    made = {name: METHODS[name](METHODS[name].Hyper()) for name in SMALL}
    needing = {(name, one) for name in made for one in functions if computed(made[name], one) == "torch"}
    assert {name for name, _ in needing} == {"pfedpg"}


def test_without_torch_what_needs_it_is_named_and_all_else_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_state, "has_torch", lambda: False)
    for name in ("pfedpg", "promptfl"):
        federation = federation_of(name)
        if name == "promptfl":
            assert call(federation, "initial_state", context_of(federation))["context"].shape == (4, 8)
            continue
        with pytest.raises(global_state.NoTorch, match="pfedpg computes initial_state with torch, which this"):
            call(federation, "initial_state", context_of(federation))


def test_a_start_that_fails_and_a_state_that_is_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federation_of("promptfl")
    context = context_of(federation)
    state = call(federation, "initial_state", context)
    assert global_state.adopted(federation, state, context) is state
    for wrong in ({}, {"context": state["context"][0]}, state | {"more": state["context"]}):
        with pytest.raises(TensorError):
            global_state.check_state(federation, wrong, context)
    for error, kind, told in (
        (MethodError("too few"), MethodError, "^too few$"), (TensorError("wrong-shape", "odd"), TensorError, "odd"),
        (ValueError("odd"), MethodError, r"initial_state of promptfl failed \(ValueError: odd\)"),
    ):  # fmt: skip
        monkeypatch.setattr(global_state, "call", Mock(side_effect=error))
        with pytest.raises(kind, match=told):
            global_state._made(federation, context)


def test_a_state_is_adopted_for_the_clients_and_forgets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federation_of("pfedmoap")
    context = context_of(federation)
    supplied = call(federation, "initial_state", replace(context, clients=context.clients[:1]))
    adopted = global_state.adopted(federation, supplied, context)
    assert len(adopted["client_contexts"]) == 3
    known = replace(federation, clients={one.name: one for one in context.clients}, shape=context.shape)
    moved = {name: tensor + 1 for name, tensor in adopted.items()}
    after = global_state.forgotten(known, moved, "a", context)
    assert (after["answered"].tolist(), moved["answered"].tolist()) == ([1, 0, 1], [1, 1, 1])
    assert global_state.forgotten(known, after, "a", context) is after, "nothing of it is left"
    phase = federation.method.phases(1, 2)[0]
    for wrong in ({}, after | {"more": after["answered"]}):  # checked before it is a state
        monkeypatch.setattr(global_state, "call", lambda *given, wrong=wrong: wrong)
        for act in (
            lambda: global_state.forgotten(known, after, "a", context),
            lambda: global_state.joined(known, after, ["a", "c"], ["B"]),
            lambda: global_state.after_mean(known, after, phase, {}, context),
        ):
            with pytest.raises(TensorError):
                act()


@pytest.mark.parametrize(("rule", "clip"), [(rule, clip) for rule in sorted(RULES) for clip in (None, "median", 2.0)])
def test_every_rule_comes_to_the_same_with_both(rule: str, clip: float | str | None) -> None:
    given: dict[str, Any] = {"rule": rule, "clip_norm": clip}
    if rule in ("trimmed_mean", "krum", "multi_krum"):
        given["tolerate"] = 0.2
    settings = AggregationSpec.model_validate({name: value for name, value in given.items() if value is not None})
    random = np.random.default_rng(1)
    base = {"x": random.standard_normal((3, 4)).astype(np.float32)}
    updates = [
        ClientUpdate(f"c{place}", weight, {"x": base["x"] + random.standard_normal((3, 4)).astype(np.float32)})
        for place, weight in enumerate(np.linspace(0.5, 1.5, 9) / 9)
    ]
    rules = [Rule(settings, base), Rule(settings, base)]
    results = []
    for own, through in zip(rules, (lambda value: value, global_state._tensors), strict=True):
        combined = Combined(own, ServerOptimizer(ServerOptimizerSpec(), base))
        results.append(global_state._arrays(through(combined)([through(update) for update in updates])))
    assert_close(*results)


def test_a_known_mean_takes_the_optimizer_s_step_with_both() -> None:
    spec = ServerOptimizerSpec(optimizer="momentum", learning_rate=0.5, momentum=0.9)
    state = {"x": np.ones(2, np.float32), MOMENTUM + "x": np.full(2, 2.0, np.float32)}
    both = Combined({"x": np.array([3.0, 1.0], np.float32)}, ServerOptimizer(spec, state))
    in_torch = both.in_torch()
    stepped, there = both([]), in_torch([])
    assert isinstance(there["x"], torch.Tensor)
    assert stepped["x"].tolist() == there["x"].tolist() == pytest.approx([2.9, 1.9])  # 1 + 0.5·(0.9·2 + Δ)
    told = Combined({}, ServerOptimizer(spec, state))
    told.take_judgements(in_torch)
    assert_close(told.optimizer.moments, both.optimizer.moments)
    assert told.optimizer.moments[MOMENTUM + "x"].tolist() == pytest.approx([3.8, 1.8])
    assert both.rule.keys() == {"x"}, "a mean has judged nobody"


def test_results_are_arrays_however_deep_they_lie() -> None:
    given = {"a": (torch.ones(2, requires_grad=True), np.float32(2)), "b": {"c": torch.zeros(1)}, "d": "text", "e": 1.5}
    found = global_state._arrays(given)
    assert [type(part) for part in (*found["a"], found["b"]["c"])] == [np.ndarray] * 3
    assert isinstance(found["a"], tuple)
    assert (found["a"][0].tolist(), found["a"][1].item(), found["d"], found["e"]) == ([1, 1], 2, "text", 1.5)


def test_draws_are_those_of_torch() -> None:
    for seed in (0, 5, (1 << 62) + 11):
        with_numpy, with_torch = draws(seed, "a"), generator(seed, "a")
        for size in (1, 3, 15, 16, 17, 40, 1000):
            assert np.array_equal(with_numpy.uniform(size), with_torch.uniform(size).numpy())
            # The last digits of torch's logarithms are those of the CPU's instructions.
            np.testing.assert_allclose(with_numpy.normal(size), with_torch.normal(size).numpy(), rtol=0, atol=1e-5)
            assert with_numpy.permutation(size) == with_torch.permutation(size)
        assert with_numpy.normal(2, 3).shape == (2, 3)


# Means with central noise, against the formula written out and against what its noise must look like.


SHAPES = {"b": (2, 3), "a": (4,)}


KEY = bytes(range(32))


def tensors(seed: int, scale: float = 1.0) -> Tensors:
    draws = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(shape, generator=draws) * scale).numpy() for name, shape in SHAPES.items()}


def flat(given: Tensors) -> list[float]:
    """All numbers in order of name, as Python's floats."""
    return [float(value) for name in sorted(given) for value in given[name].flatten()]


def literal_mean(updates: list[Tensors], base: Tensors, clip: float, z: float, expected: float) -> list[float]:
    """base + (Σ Δ·min(1, S/‖Δ‖) + z·S·ξ)/K̄, number by number."""
    start = flat(base)
    total = [0.0] * len(start)
    for update in updates:
        change = [after - before for after, before in zip(flat(update), start, strict=True)]
        length = math.sqrt(sum(number * number for number in change))
        factor = min(1.0, clip / length) if length else 1.0
        total = [one + number * factor for one, number in zip(total, change, strict=True)]
    drawn = NoiseStream(KEY).normals(len(start)).tolist()
    noised = zip(start, total, drawn, strict=True)
    return [before + (one + z * clip * noise) / expected for before, one, noise in noised]


@pytest.mark.parametrize("came", [5, 3, 0], ids=["all", "two dropped out", "nobody"])
def test_the_formula_written_out_with_a_divisor_that_nobody_who_stays_away_moves(came: int) -> None:
    base = tensors(0)
    updates = [tensors(number, 0.1 if number == 1 else 3.0) for number in range(1, came + 1)]
    given = [ClientUpdate(f"c{number}", 1 / 5, update) for number, update in enumerate(updates)]
    found = private_mean(given, base, SHAPES, NoiseTerms(1.5, 0.8, 5.0, KEY))
    wanted = literal_mean(updates, base, 1.5, 0.8, 5.0)
    assert flat(found.tensors) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert all(tensor.dtype == np.float32 for tensor in found.tensors.values())
    assert set(found.lengths) == {f"c{number}" for number in range(came)}


def test_one_client_moves_the_sum_by_the_clip_at_most() -> None:
    base, others = tensors(0), [ClientUpdate("a", 0.5, tensors(1))]
    wild = [*others, ClientUpdate("b", 0.5, tensors(2, 1e6))]
    with_it = private_mean(wild, base, SHAPES, NoiseTerms(0.5, 0.3, 2.0, KEY)).tensors
    without = private_mean(others, base, SHAPES, NoiseTerms(0.5, 0.3, 2.0, KEY)).tensors
    moved = np.linalg.norm(np.subtract(flat(with_it), flat(without)))
    assert moved == pytest.approx(0.5 / 2, rel=1e-5)


def test_a_change_of_nothing_is_no_division_by_zero_and_what_is_not_in_the_payload_begins_at_zero() -> None:
    base = {"a": np.ones(4, np.float32)}
    same = ClientUpdate("a", 1.0, {"a": np.ones(4, np.float32), "b": np.zeros((2, 3), np.float32)})
    found = private_mean([same], base, SHAPES, NoiseTerms(1.0, 0.5, 1.0, KEY))
    assert found.lengths == {"a": 0.0}
    noise = 0.5 * NoiseStream(KEY).normals(10)
    assert flat(found.tensors) == pytest.approx([*(1 + noise[:4]), *noise[4:]], rel=1e-6)


def test_the_noise_is_normal_of_the_right_size_and_other_keys_make_other_noise() -> None:
    size = 200_000
    base, terms = {"a": np.zeros(size, np.float32)}, NoiseTerms(0.7, 1.3, 4.0, KEY)
    found = private_mean([], base, {"a": (size,)}, terms).tensors["a"].astype(float)
    scaled = found * 4.0 / (0.7 * 1.3)
    assert abs(scaled.mean()) < 4 / math.sqrt(size)
    assert abs(scaled.var() - 1) < 4 * math.sqrt(2 / size)
    assert stats.kstest(scaled, "norm").pvalue > 1e-6
    lags = [float(np.mean(scaled[lag:] * scaled[:-lag])) for lag in range(1, 65)]
    assert max(map(abs, lags)) < 5 / math.sqrt(size)
    other = private_mean([], base, {"a": (size,)}, NoiseTerms(0.7, 1.3, 4.0, bytes(32))).tensors["a"].astype(float)
    assert abs(float(np.corrcoef(found, other)[0, 1])) < 5 / math.sqrt(size)
