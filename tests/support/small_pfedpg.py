"""A small pFedPG, rosters of trainers, its server step without the wire, and noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientInfo, ClientUpdate, ServerContext
from promptfed.shared.methods.pfedpg import PFedPG
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import TorchDraws
from tests.shared.methods.conftest import NAMES

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
