"""The server half with numpy against the same with torch: of every method, of every rule, and of the draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.aggregation.global_state import Combined, call, call_with_torch
from promptfed.coordinator.aggregation.rules import RULES, Rule, ServerOptimizer
from promptfed.coordinator.domain.federation import Federation, new_federation
from promptfed.shared.messages import Domain
from promptfed.shared.methods import METHODS, resolve_spec
from promptfed.shared.methods.core.interface import (
    AdoptsStates,
    ClientInfo,
    ClientUpdate,
    MeasuresPhases,
    MeasuresUpdates,
    ServerContext,
    computed,
)
from promptfed.shared.seeds import draws, generator
from promptfed.shared.spec.sections import AggregationSpec, ServerOptimizerSpec
from promptfed.shared.spec.spec import BackboneShape
from promptfed.shared.tensors import Arrays
from promptfed.testing.clients import CLASSES, spec

SHAPE = {
    "d_t": 8, "d_e": 8, "d_v": 8, "text_layers": 2, "vision_layers": 2, "context_length": 16, "patch_size": 2,
    "patch_tokens": 4, "mlp_width": 8, "positions": 5, "heads_t": 2, "heads_v": 2,
}  # fmt: skip
TEXT = {"m": 4}
TOWER = {"trainable": "last_k", "k": 1}
SMALL: dict[str, dict[str, Any]] = {
    "coop": TEXT,
    "diprompt": {"m": 2},
    "fast_pt": TEXT,
    "fedapt": {"m": 2},
    "fedavg": {"trainable": "all"},
    "fedbabu": {"trainable": "norms"},
    "fedclip": {},
    "fedclipadapter": {"reduction": 2, "sides": "both"},
    "fedcocoop": TEXT | {"reduction": 2},
    "fedkgcoop": TEXT,
    "fedlora": {"r": 2},
    "fedlp": {},
    "fedmaple": {"m": 2},
    "fedotp": TEXT,
    "fedpgp": TEXT,
    "fedpr": {"m": 2},
    "fedprox": {"trainable": "biases"},
    "fedrep": TOWER,
    "fedrod": {"trainable": "norms"},
    "fedtaskres": {},
    "fedtpg": TEXT,
    "fedvpt": TEXT,
    "fedvpt_deep": {"m": 2},
    "perfedavg": {"trainable": "norms"},
    "pfedmoap": TEXT,
    "pfedpg": {"m": 2, "inner_width": 4},
    "pfedprompt": TEXT,
    "plan": {"m": 2, "reduction": 4},
    "promptfl": TEXT,
    "promptfl_amp": TEXT,
    "promptfl_ft": TEXT,
    "promptfl_per": TEXT,
    "promptfl_prox": TEXT,
    "promptfolio": TEXT,
    "singleset_full": {"trainable": "norms"},
    "singleset_vpt": {"m": 2},
    "zero_shot": {},
}
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
    if isinstance(method, AdoptsStates):
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
        function = "aggregate_measured" if isinstance(method, MeasuresUpdates) else "aggregate"
        after, after_torch = made(federation, function, state, phase, updates, combine, context)
        if function == "aggregate_measured":
            assert after[1].phase == pytest.approx(after_torch[1].phase, rel=1e-5)
            after, after_torch = after[0], after_torch[0]
        assert_close(after, after_torch)
        if isinstance(method, MeasuresPhases):
            first, second = made(federation, "measure", state, phase, after, context)
            assert first.phase == pytest.approx(second.phase, rel=1e-4, abs=1e-6)
            for client_name, numbers in first.clients.items():
                assert numbers == pytest.approx(second.clients[client_name], rel=1e-4, abs=1e-6)
        state = after


def test_only_pfedpg_needs_torch() -> None:
    functions = ("initial_state", "adopt", "join", "forget", "payload", "aggregate", "aggregate_measured", "measure")
    needing = {
        (name, function)
        for name in SMALL
        for function in functions
        if computed(METHODS[name](METHODS[name].Hyper()), function) == "torch"
    }
    assert {name for name, _ in needing} == {"pfedpg"}


@pytest.mark.parametrize(
    ("rule", "clip"),
    [(rule, clip) for rule in sorted(RULES) for clip in (None, "median", 2.0)],
)
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


def test_draws_are_those_of_torch() -> None:
    for seed in (0, 5, (1 << 62) + 11):
        with_numpy, with_torch = draws(seed, "a"), generator(seed, "a")
        for size in (1, 3, 15, 16, 17, 40, 1000):
            assert np.array_equal(with_numpy.uniform(size), with_torch.uniform(size).numpy())
            # The last digits of torch's logarithms are those of the CPU's instructions.
            np.testing.assert_allclose(with_numpy.normal(size), with_torch.normal(size).numpy(), rtol=0, atol=1e-5)
            assert with_numpy.permutation(size) == with_torch.permutation(size)
        assert with_numpy.normal(2, 3).shape == (2, 3)
