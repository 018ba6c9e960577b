"""A small PLAN, its phases carried out without the wire, and the checks of its states and references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from promptfed.coordinator.aggregation.rules import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, ClientUpdate, Phase, TrainResult
from promptfed.shared.methods.plan import Plan
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import TorchDraws
from tests.support import literal_visual as literal
from tests.support.visual_clients import NAMES, client_context, filled, server_context


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
