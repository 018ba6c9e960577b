"""``compression.down`` over HTTP: rounded payloads, differences, and who may have which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from promptfed.shared.methods import resolve_spec
from promptfed.shared.service.addresses import BASE
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors.deltas import applied
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.testing.clients import SHAPE, ScriptedClient, update_body
from tests.support.coordinators import InThread

NAMES = ("a", "b")
PRIVATE = {"level": "client", "clip": 1.0, "noise_multiplier": 1.0}


def began(coordinator: InThread, compression: dict[str, str], **changes: Any) -> tuple[str, list[ScriptedClient]]:
    changes = {"method": {"name": "promptfl", "m": 64}} | changes
    federation = coordinator.create(rounds=3, compression=compression, **changes)
    clients = coordinator.enrol(federation, *NAMES, backbone_shape={**SHAPE, "d_t": 512})
    coordinator.post(f"{federation}/start")
    for client in clients:
        assert client.answer(coordinator.task(client)).status_code == 201
    return federation, clients


def state(coordinator: InThread, federation: str, round: int) -> np.ndarray:
    response = coordinator.http.get(
        f"/v1/federations/{federation}/prompts", params={"round": round}, headers=coordinator.operator
    )
    [tensor] = decode(response.content)[0].values()
    return tensor.numpy()


@pytest.mark.both_databases
def test_changes_from_a_rounded_payload_are_added_to_the_state_itself(coordinator: InThread) -> None:
    """Changes far below a step of bfloat16 add up, where a mean of rounded tensors would stand still."""
    federation, clients = began(coordinator, {"down": "bf16"}, evaluation={"every": 3})
    before = state(coordinator, federation, 0)
    tiny = 1e-7
    for round in (1, 2):
        for client in clients:
            task = coordinator.task(client)
            [(name, payload)] = client.payload(task).items()
            assert payload.dtype == torch.bfloat16
            assert torch.equal(payload, torch.from_numpy(state(coordinator, federation, round - 1)).bfloat16())
            whole = {name: payload.double() + round * tiny}
            assert client.send(task, update_body({name: whole[name].float()}, task)).status_code == 201
        coordinator.until(federation, round=round + 1)
        wanted = before.astype(np.float64) + tiny * sum(range(1, round + 1))
        after = state(coordinator, federation, round)
        # What a float32 update of a payload of this size can hold of such a change.
        np.testing.assert_allclose(after, wanted, rtol=0, atol=1e-8 * round)
        assert all(one["same"] for one in coordinator.post(f"{federation}/rounds/{round}/replay", {})["states"])


def get(client: ScriptedClient, task: dict[str, Any], base: str | None) -> Any:
    params = {} if base is None else {"base": base}
    response = client.http.get(task["payload"]["url"], params=params, headers=client.headers)
    assert response.status_code == 200, response.text
    return response


def trained(coordinator: InThread, federation: str, clients: list[ScriptedClient], round: int) -> list[dict[str, Any]]:
    tasks = []
    for client in clients:
        task = coordinator.task(client)
        made = {name: one * 1.001 for name, one in client.payload(task).items()}
        assert client.send(task, update_body(made, task)).status_code == 201
        tasks.append(task)
    coordinator.until(federation, round=round + 1)
    return tasks


def test_a_payload_comes_as_the_difference_to_one_that_the_client_has(coordinator: InThread) -> None:
    federation, [a, b] = began(coordinator, {"down": "delta"}, evaluation={"every": 3})
    [first, _] = trained(coordinator, federation, [a, b], 1)
    whole = get(a, first, None).content
    second = coordinator.task(a)
    base = first["payload"]["sha256"]
    told = get(a, second, base)
    assert told.headers[BASE] == base
    assert "etag" not in told.headers
    body = get(a, second, None)
    assert BASE not in body.headers
    assert len(told.content) < len(body.content)
    assert b"".join(applied([told.content], whole)) == body.content
    served = coordinator.get(f"{federation}/rounds/2")["phases"][0]["bytes_down"]
    assert served >= len(told.content)
    nobody = "sha256:" + "0" * 64
    assert BASE not in get(a, second, nobody).headers, "what nobody has is no base"


def test_a_deleted_federation_leaves_no_difference(coordinator: InThread) -> None:
    federation, [a, b] = began(coordinator, {"down": "delta"}, evaluation={"every": 3})
    [first, _] = trained(coordinator, federation, [a, b], 1)
    base = first["payload"]["sha256"]
    assert get(a, coordinator.task(a), base).headers[BASE] == base
    assert coordinator.registry.deltas._made
    assert coordinator.http.delete(f"/v1/federations/{federation}", headers=coordinator.operator).status_code == 204
    assert not coordinator.registry.deltas._made


def test_a_payload_that_another_client_was_given_is_no_base(coordinator: InThread) -> None:
    """By the difference to it, a client would learn another client's payload."""
    federation, clients = began(
        coordinator, {"down": "delta"}, method={"name": "promptfl_amp", "m": 64}, evaluation={"every": 3}
    )
    for number, client in enumerate(clients):
        task = coordinator.task(client)
        made = {"context": client.payload(task)["message"] * (1 + number / 1000)}
        assert client.send(task, update_body(made, task)).status_code == 201
    coordinator.until(federation, round=2)
    [a, b] = clients
    mine, other = coordinator.task(a), coordinator.task(b)
    assert mine["payload"]["sha256"] != other["payload"]["sha256"]
    assert get(a, mine, mine["payload"]["sha256"]).headers[BASE] == mine["payload"]["sha256"]
    assert BASE not in get(a, mine, other["payload"]["sha256"]).headers


def test_without_the_option_there_are_no_differences(coordinator: InThread) -> None:
    federation, clients = began(coordinator, {}, evaluation={"every": 3})
    [first, _] = trained(coordinator, federation, clients, 1)
    assert BASE not in get(clients[0], coordinator.task(clients[0]), first["payload"]["sha256"]).headers


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"secure_aggregation": {}, "participation": {"min_clients": 3}}, "began at the state itself"),
        ({"privacy": PRIVATE, "aggregation": {"weighting": "uniform"}}, "from the state itself"),
        ({"method": {"name": "plan"}}, "rounding would add up"),
    ],
)
def test_what_cannot_be_rounded_is_refused_and_may_be_sent_as_differences(changes: dict[str, Any], why: str) -> None:
    raw: dict[str, Any] = {"name": "down", "method": {"name": "promptfl"}, **changes}
    with pytest.raises(SpecError, match=why):
        resolve_spec(raw | {"compression": {"down": "bf16"}})
    assert resolve_spec(raw | {"compression": {"down": "delta"}}).compression.down == "delta"
