"""What a method's server half gives to clients is what it declares: a client takes nothing else."""

from __future__ import annotations

import pytest
import torch

from promptfed.client_service.training.payloads import check_payload, known_sizes
from promptfed.shared.messages import Domain
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface import AdoptsStates, ClientInfo, ServerContext
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import TensorError

SHAPE = BackboneShape(
    d_t=16,
    d_v=16,
    d_e=16,
    text_layers=3,
    vision_layers=3,
    context_length=77,
    patch_size=4,
    mlp_width=64,
    positions=17,
    heads_v=2,
    heads_t=2,
)
NAMES = ("sun", "anchor", "umbrella")
CLIENTS = tuple(
    ClientInfo(name, "trainer", 5, NAMES, Domain(name=name, description=f"a {name} of a {{}}")) for name in "abc"
)


@pytest.mark.parametrize("name", sorted(METHODS.own()))
def test_payloads_are_as_declared(name: str) -> None:
    method = make_method({"name": name})
    context = ServerContext(TrainingSpec(), SHAPE, NAMES, CLIENTS, seed=0, rounds=2)
    state = method.initial_state(context, initial_draws(0))
    state = method.adopt(state, context) if isinstance(method, AdoptsStates) else state
    sizes = known_sizes(method, SHAPE, NAMES)
    first = next(iter(method.phases(1, 2)), None)
    for phase in (first, None):
        payload = method.payload(state, phase, CLIENTS[0], context)
        check_payload(payload, method, phase, sizes)
        for tensor_name in payload:
            with pytest.raises(TensorError):
                check_payload(payload | {tensor_name: torch.zeros(1, 2, 3, 4, 5)}, method, phase, sizes)
        others = [method.payload(state, phase, client, context) for client in CLIENTS[1:]]
        same = all(other[key].equal(payload[key]) for other in others for key in payload)
        assert same or not method.one_payload
