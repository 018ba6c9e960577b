"""A disk that lies: damaged updates, payloads and states are noticed, named, and mended by the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy import delete, select, update

from promptfed.coordinator.engine import scheduler
from promptfed.coordinator.operations import mending
from promptfed.coordinator.store import blob_rows
from promptfed.coordinator.store.tables import BlobRow, StateRow
from promptfed.shared.methods.core.interface.base import MethodError
from promptfed.shared.tensors.torch_tensors import encode
from promptfed.testing.clients import ScriptedClient, drive, trained, update_body
from tests.support.coordinators import InThread, in_thread
from tests.support.waiting import wait_for

PLACES = ("rows", "files")
HOWS = ("flipped", "truncated", "missing")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(scheduler, "FLUSH_SECONDS", 0.05)


@pytest.fixture(params=PLACES)
def kept_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether blobs are rows or files."""
    if request.param == "files":
        monkeypatch.setattr(blob_rows, "SMALL_BYTES", -1)
    return str(request.param)


def damage(coordinator: InThread, digest: str, how: str = "flipped") -> None:
    """What a disk may do to a blob."""
    blobs = coordinator.registry.blobs
    content = blobs.read(digest)
    middle = len(content) - 3
    changed = {
        "flipped": content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :],
        "truncated": content[:middle],
        "missing": None,
    }[how]
    path = blobs.path(digest)
    if path.exists() and changed is not None:
        path.write_bytes(changed)
    elif path.exists():
        path.unlink()
    else:
        with coordinator.registry.database.write() as session:
            here = BlobRow.digest == digest
            session.execute(delete(BlobRow).where(here))
            if changed is not None:
                session.add(BlobRow(digest=digest, content=changed))
    blobs._remembered.forget([digest])


def started(coordinator: InThread, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    """A federation whose clients' first updates are accepted, and the phase not closed yet: it is paused."""
    federation = coordinator.create(rounds=2, **changes)
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    tasks = coordinator.training(clients)
    coordinator.post(f"{federation}/pause")
    for client, task in zip(clients, tasks, strict=True):
        assert client.answer(task).status_code == 201
    return federation, clients


def hashes(coordinator: InThread, federation: str) -> list[str]:
    return [report["state_hash"] for report in coordinator.get(f"{federation}/rounds")["rounds"]]


def undisturbed(coordinator: InThread, **changes: Any) -> list[str]:
    federation, clients = started(coordinator, name="undisturbed", **changes)
    coordinator.post(f"{federation}/resume")
    drive(clients)
    return hashes(coordinator, federation)


def paused(coordinator: InThread, federation: str) -> str:
    """Why it waits for what is damaged."""
    found = coordinator.until(federation, state="paused")
    reason = wait_for("the reason", lambda: coordinator.get(federation)["reason"])
    assert found["state"] == "paused"
    return str(reason)


@pytest.mark.both_databases
@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_update_is_named_and_the_same_bytes_mend_it(coordinator: InThread, kept_as: str, how: str) -> None:
    wanted = undisturbed(coordinator)
    federation, (a, b) = started(coordinator)
    digest, body = digest_and_body(a)
    damage(coordinator, digest, how)
    coordinator.post(f"{federation}/resume")
    reason = paused(coordinator, federation)
    assert reason.startswith(f"damaged: the update of 'a' in round 1 (train) ({digest}) ")
    assert {"flipped": "has changed", "truncated": "has changed", "missing": "is missing"}[how] in reason
    assert b.task().status_code == 204, "whose update is whole is asked for nothing"
    asked = coordinator.task(a)
    assert asked["task_id"] == next(iter(a.sent)), "its client is asked for that update again"
    other = update_body(trained(a.payload(asked), "somebody else", asked), asked)
    assert a.send(asked, other).json()["type"].endswith("/already-answered")
    assert coordinator.get(federation)["state"] == "paused"
    assert a.send(asked, body).status_code == 200
    coordinator.until(federation, state="running", reason=None)
    drive([a, b])
    assert hashes(coordinator, federation) == wanted


def digest_and_body(client: ScriptedClient) -> tuple[str, bytes]:
    """The client's last update."""
    body = list(client.sent.values())[-1]
    return "sha256:" + hashlib.sha256(body).hexdigest(), body


def test_bytes_that_are_put_back_let_it_go_on(coordinator: InThread, kept_as: str) -> None:
    federation, clients = started(coordinator)
    digest, body = digest_and_body(clients[0])
    damage(coordinator, digest)
    coordinator.post(f"{federation}/resume")
    paused(coordinator, federation)
    coordinator.post(f"{federation}/resume")  # which does not help
    assert "damaged" in paused(coordinator, federation)
    if kept_as == "files":
        coordinator.registry.blobs.path(digest).write_bytes(body)
    else:
        with coordinator.registry.database.write() as session:
            session.execute(update(BlobRow).where(BlobRow.digest == digest).values(content=body))
    coordinator.until(federation, state="running")
    drive(clients)


def test_a_restart_looks_at_it_again(tmp_path: Path) -> None:
    with in_thread(tmp_path / "data") as coordinator:
        federation, clients = started(coordinator)
        digest, body = digest_and_body(clients[0])
        damage(coordinator, digest)
        coordinator.post(f"{federation}/resume")
        before = paused(coordinator, federation)
    with in_thread(tmp_path / "data") as coordinator:
        for client in clients:
            client.http = coordinator.http
        wait_for("the reason", lambda: coordinator.get(federation)["reason"] == before)
        assert clients[0].send(coordinator.task(clients[0]), body).status_code == 200
        coordinator.until(federation, state="running")
        drive(clients)


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_payload_is_made_again(coordinator: InThread, kept_as: str, how: str) -> None:
    federation = coordinator.create(rounds=1)
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    task = coordinator.training(clients)[0]
    damage(coordinator, task["payload"]["sha256"], how)
    answer = get(coordinator, clients[0], task)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
    assert answer.json()["type"].endswith("/storage-damaged")
    wait_for("the payload", lambda: get(coordinator, clients[0], task).status_code == 200)
    clients[0].payload(task)  # which compares its digest
    drive(clients)


def get(coordinator: InThread, client: ScriptedClient, task: dict[str, Any]) -> httpx.Response:
    return coordinator.http.get(task["payload"]["url"], headers=client.headers)


def finished(coordinator: InThread) -> tuple[str, list[ScriptedClient]]:
    federation, clients = started(coordinator)
    coordinator.post(f"{federation}/resume")
    drive(clients)
    return federation, clients


def states(coordinator: InThread) -> list[str]:
    """Digests of all states, in order."""
    with coordinator.registry.database.read() as session:
        return list(session.scalars(select(StateRow.sha256).order_by(StateRow.id)))


def prompts(coordinator: InThread, federation: str, round: int) -> httpx.Response:
    url = f"/v1/federations/{federation}/prompts"
    return coordinator.http.get(url, params={"round": round}, headers=coordinator.operator)


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_state_is_not_served_and_made_again_of_what_it_followed_from(
    coordinator: InThread, kept_as: str, how: str
) -> None:
    federation, _ = finished(coordinator)
    whole = [prompts(coordinator, federation, round) for round in range(3)]
    for digest in states(coordinator):
        damage(coordinator, digest, how)
    answer = prompts(coordinator, federation, 2)
    assert answer.status_code == 503
    assert "ETag" not in answer.headers
    wait_for("the state", lambda: prompts(coordinator, federation, 2).status_code == 200)
    for round, before in enumerate(whole):
        again = prompts(coordinator, federation, round)
        assert (again.content, again.headers["ETag"]) == (before.content, before.headers["ETag"])


def test_a_state_that_nothing_can_make_again_is_never_served(coordinator: InThread) -> None:
    federation, clients = finished(coordinator)
    digest, body = digest_and_body(clients[0])
    damage(coordinator, digest)
    damage(coordinator, states(coordinator)[-1])
    for _ in range(3):
        answer = prompts(coordinator, federation, 2)
        assert (answer.status_code, answer.headers.get("ETag")) == (503, None)
    assert coordinator.get(federation)["state"] == "finished"
    assert prompts(coordinator, federation, 1).status_code == 200
    task = {"task_id": list(clients[0].sent)[-1]}
    assert clients[0].send(task, body).status_code == 200, "the update comes again"
    wait_for("the state", lambda: prompts(coordinator, federation, 2).status_code == 200)


def test_the_state_that_is_needed_next_pauses_the_federation_where_it_cannot_be_made_again(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, clients = started(coordinator)
    body = coordinator.registry.blobs.read(states(coordinator)[-1])
    with replay_that_fails(monkeypatch):
        damage(coordinator, states(coordinator)[-1])
        coordinator.post(f"{federation}/resume")
        assert "damaged: the state of round 0 (sha256:" in paused(coordinator, federation)
        with coordinator.registry.database.write() as session:
            session.execute(update(BlobRow).where(BlobRow.digest == states(coordinator)[-1]).values(content=body))
        coordinator.until(federation, state="running")
    drive(clients)


@contextmanager
def replay_that_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise MethodError("another machine")

    with monkeypatch.context() as patched:
        patched.setattr(mending.replay, "computed", fail)
        yield


@pytest.mark.parametrize("which", ["the update", "the state", "the state before"])
def test_a_replay_over_changed_bytes_is_refused_and_never_the_same(coordinator: InThread, which: str) -> None:
    federation, clients = finished(coordinator)
    found = states(coordinator)
    digest = {"the update": digest_and_body(clients[0])[0], "the state": found[-1], "the state before": found[-2]}[
        which
    ]
    damage(coordinator, digest)
    refused = coordinator.post(f"{federation}/rounds/2/replay", {}, status=503)
    assert refused["type"].endswith("/storage-damaged")


def test_a_supplied_state_that_is_damaged_is_supplied_again(coordinator: InThread, kept_as: str) -> None:
    federation = coordinator.create(rounds=1)
    body = encode({"context": torch.full((4, 8), 0.25)})
    url = f"/v1/federations/{federation}/initial-state"
    assert coordinator.http.put(url, content=body, headers=coordinator.operator).status_code == 200
    [digest] = coordinator.registry.blobs.all()
    damage(coordinator, digest)
    clients = coordinator.enrol(federation, "a", "b")
    assert coordinator.post(f"{federation}/start", status=503)["type"].endswith("/storage-damaged")
    wait_for("the reason", lambda: "supply it again" in (coordinator.get(federation)["reason"] or ""))
    assert coordinator.http.put(url, content=body, headers=coordinator.operator).status_code == 200
    coordinator.until(federation, reason=None)
    coordinator.post(f"{federation}/start")
    drive(clients)


def test_an_update_that_was_removed_on_purpose_stays_removed(coordinator: InThread) -> None:
    federation, clients = finished(coordinator)
    digest, body = digest_and_body(clients[0])
    coordinator.delete(f"{federation}/clients/a/updates")
    assert clients[0].send({"task_id": list(clients[0].sent)[-1]}, body).status_code == 200
    assert digest not in coordinator.registry.blobs.all()
    assert coordinator.post(f"{federation}/rounds/2/replay", {}, status=410)["type"].endswith("/updates-gone")
