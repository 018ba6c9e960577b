"""pFedPG at the coordinator: prompts that only their client sees, descriptors that last, steps off the event loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientInfo, ServerContext
from promptfed.shared.methods.pfedpg import PFedPG
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.testing.clients import ScriptedClient, bearer, update_body
from tests.support.coordinators import InThread
from tests.support.open_phases import prompts

METHOD = {"name": "pfedpg", "m": 3, "inner_width": 5, "generator_learning_rate": 0.05}
SHAPE = {"d_v": 6, "d_e": 6, "vision_layers": 2, "patch_size": 8}


def federation_of(coordinator: InThread, *names: str, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    federation = coordinator.create(method=METHOD, **changes)
    clients = coordinator.enrol(federation, *names, backbone_shape=SHAPE)
    coordinator.post(f"{federation}/start")
    return federation, clients


def delta(name: str, round: int) -> Tensor:
    draws = torch.Generator().manual_seed(100 * round + ord(name[0]))
    return torch.randn(3, 6, generator=draws)


def answer(client: ScriptedClient, task: dict[str, Any]) -> None:
    """Either kind of task."""
    if task["kind"] == "evaluate":
        assert client.evaluate(task).status_code == 201
        return
    body = update_body({"delta": delta(client.name, task["round"])}, task)
    assert client.send(task, body).status_code == 201


def context_of(*names: str) -> ServerContext:
    clients = tuple(ClientInfo(name, "trainer", 10, ("circle", "square", "star")) for name in sorted(names))
    return ServerContext(TrainingSpec(), BackboneShape(**SHAPE), None, clients, seed=7, rounds=2)


def method() -> PFedPG:
    return make_method(METHOD)


def test_nobody_else_s_prompts_can_be_fetched(coordinator: InThread) -> None:
    federation, clients = federation_of(coordinator, "a", "b")
    other, strangers = federation_of(coordinator, "c", "d", name="other")
    tasks = [coordinator.task(client) for client in clients]
    own = [client.payload(task)["prompts"] for client, task in zip(clients, tasks, strict=True)]
    assert not own[0].equal(own[1])
    first = prompts(coordinator, federation)
    names = ["a", "b"]
    for row, one in enumerate(own):
        client = context_of(*names).clients[row]
        assert one.equal(method().payload(first, None, client, context_of(*names))["prompts"])
    tokens = {"nobody's": {}, "unknown": bearer("0" * 64), "enrolment": bearer(coordinator.token(federation))}
    tokens |= {"another client's": clients[1].headers, "a stranger's": strangers[0].headers}
    tokens["operator"] = coordinator.operator
    for whose, headers in tokens.items():
        for url in (tasks[0]["payload"]["url"], tasks[0]["payload"]["url"].replace(federation, other)):
            status = coordinator.http.get(url, headers=headers).status_code
            assert status in (401, 403, 404), f"the {whose} token reads a's prompts"
    for client in (*clients, *strangers):
        for path in ("prompts", "rounds", "rounds/0", "metrics"):
            status = coordinator.http.get(f"{client.path}/{path}", headers=client.headers).status_code
            assert status == 403, "clients see nothing of the global state"


def test_a_change_whose_square_is_no_float32_is_refused_and_the_round_goes_on(coordinator: InThread) -> None:
    """One that is nearly as long, which the spec admits here, still comes to a finite state."""
    federation, clients = federation_of(coordinator, "a", "b", rounds=1, admission={"max_update_norm": 1e30})
    tasks = coordinator.training(clients)
    refused = clients[0].send(tasks[0], update_body({"delta": torch.full((3, 6), 1e25)}, tasks[0]))
    assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (422, "norm-too-large")
    assert "lower training.learning_rate" in refused.json()["detail"]
    largest = {"delta": torch.full((3, 6), 0.99e9 / 18**0.5)}
    assert clients[0].send(tasks[0], update_body(largest, tasks[0])).status_code == 201
    answer(clients[1], tasks[1])
    assert coordinator.task(clients[0])["kind"] == "evaluate", "the server's step came to a state"
    assert all(tensor.double().isfinite().all() for tensor in prompts(coordinator, federation).values())


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("pfedpg", {"d_t": 8, "d_e": 8, "context_length": 77}, "needs a vision transformer"),
        ("pfedpg", {"d_e": 8, "d_v": 6, "vision_layers": 2}, "patch_size"),
        ("zero_shot", SHAPE, "zero_shot needs a text tower; this backbone has none: choose a CLIP model"),
    ],
)
def test_a_method_needs_a_backbone_of_its_kind(
    coordinator: InThread, name: str, shape: dict[str, int], text: str
) -> None:
    spec = {"name": "eyes", "method": {"name": name}, "backbone": {"shape": shape}}
    refused = coordinator.post("/v1/federations", spec, status=422)
    assert refused["errors"][0]["path"] == "backbone.shape"
    assert text in refused["detail"]
    federation = coordinator.post("/v1/federations", spec | {"backbone": {}}, status=201)["id"]
    response = coordinator.client(federation, "a").enrol(coordinator.token(federation), backbone_shape=shape)
    assert (response.status_code, response.json()["type"].rsplit("/", 1)[-1]) == (409, "cannot-start")
    assert coordinator.get(federation)["backbone"]["fingerprint"] is None
    assert text in response.json()["detail"]
