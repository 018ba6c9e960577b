"""Compressed changes over HTTP: what is stored, aggregated and replayed are plain updates.

The fixtures of this folder compare memory with what a restart would load after every change.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from promptfed.coordinator.resources.tasks import updates
from promptfed.coordinator.store.blobs import digest_of
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.tensors import encode
from promptfed.shared.tensors.compression import added, compressed, decompressed
from promptfed.shared.tensors.torch_tensors import arrays_of, tensors_of
from promptfed.testing.clients import SHAPE, ScriptedClient, update_body
from tests.support.coordinators import InThread
from tests.support.durable import Second
from tests.support.open_phases import answer_next, launched, prompts
from tests.support.waiting import wait_for

NAMES = ("a", "b", "c")
KINDS = ["bf16", "int8"]


class Enough(Exception):
    """What is tested has happened."""


@pytest.mark.parametrize("large", [True, False])
def test_of_large_changes_one_at_a_time_is_expanded(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"context": ((4, 8), "float32")}
    method = SimpleNamespace(expected_update=lambda *_: expected)
    federation = SimpleNamespace(
        spec=SimpleNamespace(compression=SimpleNamespace(up="int8")),
        method=method,
        method_phase=lambda *_: None,
        context=lambda: None,
    )
    given = (
        SimpleNamespace(place=str),
        federation,
        SimpleNamespace(info=str),
        SimpleNamespace(round=1, step=0, payload_sha256=""),
    )

    def expand() -> None:
        with pytest.raises(Enough):
            updates.expanded(*given, SimpleNamespace(tensors=lambda: ({}, {})))

    second = Second(expand)

    def inside(*_: object) -> None:
        second.inside()
        raise Enough

    monkeypatch.setattr(updates, "decode_place", lambda place: ({}, {}))
    monkeypatch.setattr(updates, "LARGE", 4 * 8 * 4 + (0 if large else 1))
    monkeypatch.setattr(updates, "decompressed", inside)
    expand()
    assert second.end() is large


def began(coordinator: InThread, up: str, rounds: int = 2, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    asked = {"rounds": rounds, "evaluation": {"every": rounds}, "compression": {"up": up}}
    federation, clients = launched(coordinator, *NAMES, **asked, **changes)
    answer_next(coordinator, clients)
    return federation, clients


def made(client: ScriptedClient, task: dict[str, Any], up: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A compressed change, and the update that it stands for."""
    payload = arrays_of(client.payload(task))
    rng = np.random.default_rng(sum(map(ord, client.name)))
    change = {name: rng.normal(0, 0.01, one.shape).astype(np.float32) for name, one in payload.items()}
    sent = compressed(change, up, rng)
    expected = {name: (one.shape, "float32") for name, one in change.items()}
    return sent, added(decompressed(sent, expected, up), payload)


@pytest.mark.parametrize("up", KINDS)
def test_the_state_is_the_mean_of_the_decompressed_updates(coordinator: InThread, up: str) -> None:
    federation, clients = began(coordinator, up)
    updates, bodies = [], {}
    for client in clients:
        task = coordinator.task(client)
        sent, update = made(client, task, up)
        bodies[client.name] = task, update_body(tensors_of(sent), task)
        assert client.send(*bodies[client.name]).status_code == 201
        assert client.send(*bodies[client.name]).status_code == 200, "the same bytes again"
        updates.append(update)
    coordinator.until(federation, round=2)
    state = prompts(coordinator, federation, 1)
    for name, tensor in state.items():
        mean = np.mean([update[name].astype(np.float64) for update in updates], axis=0)
        np.testing.assert_allclose(tensor.numpy(), mean, rtol=1e-5, atol=1e-7)
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    for one in phase["updates"]:
        assert one["bytes"] == len(bodies[one["client"]][1]), "what was sent, not what is stored"
    replayed = coordinator.post(f"{federation}/rounds/1/replay", {})
    assert all(one["same"] for one in replayed["states"])
    task, body = bodies["a"]
    assert clients[0].send(task, body).status_code == 200, "also after the phase has closed"
    other = clients[0].send(task, body.replace(b"0.5", b"0.6"))
    assert (other.status_code, other.json()["type"].rpartition("/")[2]) == (409, "already-answered")


HOSTILE = [
    ("context#scale", torch.full((2,), float("nan")), "NaN"),
    ("context", torch.zeros(3, dtype=torch.int8), "shape"),
    ("context#scale", torch.full((2,), 3e38), "NaN or infinity"),
    ("context#scale", torch.full((2,), 1e6), "norm"),
]


def test_hostile_changes(coordinator: InThread) -> None:
    _, (client, *_) = began(coordinator, "int8")
    task = coordinator.task(client)
    sent = tensors_of(made(client, task, "int8")[0])
    for name, value, why in HOSTILE:
        if name.endswith("#scale"):
            value = value.new_empty(sent[name].shape).fill_(value[0].item())
        response = client.send(task, update_body(sent | {name: value}, task))
        assert response.status_code == 422, response.text
        assert why in response.json()["detail"]
    assert client.send(task, update_body(sent, task)).status_code == 201


@pytest.mark.extended
def test_an_accepted_change_is_known_after_its_payload_is_gone(coordinator: InThread) -> None:
    """A client that was away sends it again: the state that it was made from is no longer kept."""
    federation, clients = began(coordinator, "int8", rounds=4, retention="last_round")
    sent = []
    for round in (1, 2, 3):
        for client in clients:
            task = coordinator.task(client)
            sent.append((client, task, update_body(tensors_of(made(client, task, "int8")[0]), task)))
            assert client.send(*sent[-1][1:]).status_code == 201
        coordinator.until(federation, round=round + 1)
    client, task, body = sent[0]
    wait_for("retirement", lambda: client.http.get(task["payload"]["url"], headers=client.headers).status_code != 200)
    assert client.send(task, body).status_code == 200


def test_a_small_body_of_a_large_change_becomes_a_file(coordinator: InThread) -> None:
    """Its 200 KB stand for 800 KB, which are not to lie in memory, nor in a row of the database."""
    changes = {"method": {"name": "promptfl", "m": 16}, "rounds": 1, "evaluation": {"every": 1}}
    federation = coordinator.create(compression={"up": "int8"}, **changes)
    clients = coordinator.enrol(federation, *NAMES, backbone_shape={**SHAPE, "d_t": 12800})
    coordinator.post(f"{federation}/start")
    tasks = coordinator.training(clients)
    before = set(coordinator.registry.blobs.files())
    body = update_body(tensors_of(made(clients[0], tasks[0], "int8")[0]), tasks[0])
    assert len(body) < 250_000
    assert clients[0].send(tasks[0], body).status_code == 201
    [stored] = set(coordinator.registry.blobs.files()) - before
    assert coordinator.registry.blobs.path(stored).stat().st_size > 800_000
    wrong = update_body(tensors_of(made(clients[1], tasks[1], "int8")[0]), tasks[0])
    assert clients[1].send(tasks[1], wrong).status_code == 422
    assert clients[0].send(tasks[0], body).status_code == 200
    assert not list(coordinator.registry.blobs.incoming.iterdir())


@pytest.mark.parametrize(
    ("in_memory", "small", "stays"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_what_a_change_stands_for_is_in_memory_if_both_are_small(
    in_memory: bool, small: bool, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = {"context": np.full((4, 8), 2.0, np.float32)}
    change = compressed({"context": np.full((4, 8), 0.5, np.float32)}, "bf16", np.random.default_rng(0))
    sent, path = encode(change, {"task_id": "t"}), tmp_path / "body"
    path.write_bytes(sent)
    asked = SimpleNamespace(expected_update=lambda *_: {"context": ((4, 8), "float32")})
    federation: Any = SimpleNamespace(
        spec=SimpleNamespace(compression=SimpleNamespace(up="bf16")), method=asked, method_phase=lambda *_: None,
        context=lambda: None,
    )  # fmt: skip
    blobs: Any = SimpleNamespace(
        place=lambda digest: encode(payload), is_small=lambda size: size == 4 * 8 * 4 and small
    )
    task: Any = SimpleNamespace(round=1, step=0, payload_sha256="p")
    upload = Upload(path, len(sent), digest_of(sent), content=sent if in_memory else None)
    nobody: Any = None
    whole = encode({"context": np.full((4, 8), 2.5, np.float32)}, {"task_id": "t"})
    made = updates.expanded(blobs, federation, nobody, task, upload)
    assert (made.content, made.sha256, made.size) == (whole if stays else None, digest_of(whole), len(whole))
    assert path.read_bytes() == (sent if stays else whole)
    monkeypatch.setattr(updates, "encode_file", lambda update, draft, about: draft.write_bytes(b"") or 1 / 0)
    if not stays:
        path.write_bytes(sent)
        with pytest.raises(ZeroDivisionError):
            updates.expanded(blobs, federation, nobody, task, upload)
    assert list(tmp_path.iterdir()) == [path], "no draft is left"
    federation.spec.compression.up = "none"
    assert updates.expanded(blobs, federation, nobody, task, upload) is upload


def test_plain_updates_are_refused_where_compressed_ones_are_asked_for(coordinator: InThread) -> None:
    _, clients = began(coordinator, "int8")
    task = coordinator.task(clients[0])
    response = clients[0].send(task, update_body(clients[0].payload(task), task))
    assert response.status_code == 422
    assert "#scale' is missing" in response.json()["detail"]
