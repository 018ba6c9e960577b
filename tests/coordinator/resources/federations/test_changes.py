"""What a client has changed is judged, not what it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, select

from promptfed.coordinator.engine import answers
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.resources.tasks import updates
from promptfed.coordinator.store import blobs
from promptfed.coordinator.store.tables import BlobRow, TaskRow, UpdateRow
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import encode
from promptfed.testing.clients import ScriptedClient, content_digest, drive, trained, update_body
from tests.support.coordinators import InThread, in_thread
from tests.support.kill_campaign import MethodClient
from tests.support.open_phases import (
    answer_next,
    enrolled,
    kind,
    open_first_phase,
    paused_phase,
    prompts,
    stored_rows,
    supply,
)


def send(client: ScriptedClient, task: dict[str, Any], tensors: Tensors) -> int:
    body = update_body(tensors, task)
    path = f"{client.path}/tasks/{task['task_id']}/update"
    headers = client.headers | {"Content-Digest": content_digest(body)}
    return client.http.put(path, content=body, headers=headers).status_code


def started(
    coordinator: InThread, size: float, **changes: Any
) -> tuple[str, list[ScriptedClient], list[dict[str, Any]]]:
    """A federation of three that starts from a context of this size."""
    federation, clients = enrolled(coordinator, "a", "b", "c", rounds=1, **changes)
    state = encode({"context": torch.full((4, 8), size)})
    put = supply(coordinator, federation, state)
    assert put.status_code == 200, put.text
    coordinator.post(f"{federation}/start")
    return federation, clients, coordinator.training(clients)


def test_what_was_given_counts_for_nobody(coordinator: InThread) -> None:
    """The prompts have a norm of 5,657; the limit is one of changes."""
    federation, clients, tasks = started(coordinator, 1000.0, admission={"max_update_norm": 10})
    for client, task in zip(clients[:2], tasks, strict=False):
        assert send(client, task, {"context": client.payload(task)["context"] + 1.0}) == 201
    far = {"context": clients[2].payload(tasks[2])["context"] + 2.0}
    assert send(clients[2], tasks[2], far) == 422
    refusal = coordinator.get(f"{federation}/clients")["clients"][2]["last_refusal"]
    assert (refusal["type"], "is 11.3137; 10 is allowed" in refusal["detail"]) == ("norm-too-large", True)


def test_a_change_far_over_the_others_is_told(coordinator: InThread) -> None:
    federation, clients, tasks = started(coordinator, 1.0)
    for client, task, step in zip(clients, tasks, (0.1, 0.2, 5.0), strict=True):
        assert send(client, task, {"context": client.payload(task)["context"] + step}) == 201
    answer_next(coordinator, clients)
    coordinator.until(federation, state="finished")
    report = coordinator.get(f"{federation}/rounds/1")
    updates = {one["client"]: one for one in report["phases"][0]["updates"]}
    far = {"a": None, "b": None, "c": pytest.approx(25, rel=1e-4)}
    assert {name: one["far"] for name, one in updates.items()} == far
    assert updates["c"]["change"] == pytest.approx(5 * 32**0.5, rel=1e-5)
    assert report["phases"][0]["measured"] == {"phase": {}, "clients": {}}


def test_without_a_limit_in_the_spec_the_method_s_is_taken(coordinator: InThread) -> None:
    """promptfl allows a root mean square of 10: a norm of 56.6 for the 32 numbers of this context."""
    federation, clients, tasks = started(coordinator, 1000.0)
    assert send(clients[0], tasks[0], {"context": clients[0].payload(tasks[0])["context"] + 9.9}) == 201
    assert send(clients[1], tasks[1], {"context": clients[1].payload(tasks[1])["context"] + 10.1}) == 422
    refusal = coordinator.get(f"{federation}/clients")["clients"][1]["last_refusal"]
    assert refusal["type"] == "norm-too-large"
    assert "the change's norm is 57.1341; 56.5685 is allowed (promptfl's limit for 32 numbers)" in refusal["detail"]
    assert "admission.max_update_norm" in refusal["detail"], "it says what to do"


# Mutations of a good update: refused or good, and nothing breaks.


kinds = st.sampled_from(["flip", "cut", "insert", "repeat", "zero"])
mutations = st.lists(st.tuples(kinds, st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4)


def mutate(body: bytes, steps: list[tuple[str, int, int]]) -> bytes:
    content = bytearray(body)
    for what, where, value in steps:
        at = where % max(1, len(content))
        if what == "flip" and content:
            content[at] ^= value or 1
        elif what == "cut":
            del content[at:]
        elif what == "insert":
            content[at:at] = bytes([value]) * (1 + where % 9)
        elif what == "repeat":
            content += content[at : at + 50]
        elif content:
            content[at : at + 8] = bytes(min(8, len(content) - at))
    return bytes(content)


@pytest.mark.extended
def test_mutated_updates_are_refused_or_good_and_never_break_anything(tmp_path_factory: pytest.TempPathFactory) -> None:
    with in_thread(tmp_path_factory.mktemp("fuzz") / "data") as coordinator:
        federation, (a, _), (task, _) = open_first_phase(coordinator)
        good = update_body(trained(a.payload(task), "a", task), task)
        live = coordinator.registry.federations[federation]
        client = live.clients["a"]
        before = stored_rows(coordinator.registry, federation)
        seen: set[str] = set()

        @settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
        @given(mutations, st.booleans())
        @example([("flip", good.index(task["task_id"].encode()), 1)], True)
        @example([("flip", good.index(b"payload_sha256"), 1)], True)
        def one(steps: list[tuple[str, int, int]], over_http: bool) -> None:
            body = mutate(good, steps)
            refusal = judged(coordinator.registry, live, client, task, body)
            if refusal is None:
                return  # A flipped bit of a number or a metric is still an update.
            seen.add(refusal)
            if over_http:
                response = a.send(task, body)
                assert 400 <= response.status_code < 500, response.text
                assert kind(response) == refusal
            assert coordinator.registry.federations[federation].run == before[0]

        one()
        assert stored_rows(coordinator.registry, federation) == before
        assert {"not-safetensors", "bad-metadata", "wrong-task"} <= seen
        assert a.send(task, good).status_code == 201


def judged(registry: Registry, live: Any, client: Any, task: dict[str, Any], body: bytes) -> str | None:
    """The kind of the refusal that a body meets, or None: the examination by itself, without storing."""
    from promptfed.coordinator.problems import Refusal
    from promptfed.coordinator.store.blobs import digest_of
    from promptfed.coordinator.store.upload import Upload

    path = registry.blobs.temporary()
    path.write_bytes(body)
    try:
        asked = answers.asked_task(registry.database, live, client, task["task_id"])
        updates._examine(registry, live, client, asked, Upload(path, len(body), digest_of(body)))
    except Refusal as refusal:
        return refusal.kind
    finally:
        path.unlink()
    return None


# A withdrawn client's context reaches nobody any more, and leaves the state with its updates, as a replay shows.


def tasks(coordinator: InThread, clients: list[MethodClient], kind: str) -> list[dict[str, Any]]:
    """The open task of each client, once the coordinator has come so far."""
    found = [coordinator.task(client) for client in clients]
    assert {task["kind"] for task in found} == {kind}
    return found


def answered(coordinator: InThread, clients: list[MethodClient], kind: str) -> list[Tensors]:
    """The payloads of the open stage, which all have answered."""
    open_tasks = tasks(coordinator, clients, kind)
    payloads = [client.payload(task) for client, task in zip(clients, open_tasks, strict=True)]
    for client, task in zip(clients, open_tasks, strict=True):
        assert client.answer(task).status_code in (200, 201)
    return payloads


@pytest.mark.parametrize("method", ["pfedmoap", "promptfl_amp"])
def test_who_is_withdrawn_and_deleted_leaves_the_state(coordinator: InThread, method: str) -> None:
    federation = coordinator.create(method={"name": method, "m": 4}, rounds=3)
    token = coordinator.token(federation)
    clients = [MethodClient(coordinator.http, federation, name) for name in ("a", "b", "c")]
    for client in clients:
        assert client.enrol(token).status_code == 201
    staying = clients[:2]
    coordinator.post(f"{federation}/start")
    answered(coordinator, clients, "evaluate")
    answered(coordinator, clients, "train")
    tasks(coordinator, clients, "evaluate")
    before = prompts(coordinator, federation)
    assert before["answered"].tolist() == [1, 1, 1]
    gone = before["client_contexts"][2]
    coordinator.delete(f"{federation}/clients/c")
    answered(coordinator, staying, "evaluate")
    for payload in answered(coordinator, staying, "train"):
        rows = torch.cat([tensor.reshape(-1, *gone.shape) for tensor in payload.values()])
        assert not any(torch.equal(row, gone) for row in rows), "a withdrawn client's context goes to nobody"
        if method == "promptfl_amp":
            both = before["client_contexts"][:2]
            assert bool((rows >= both.amin(0) - 1e-6).all() and (rows <= both.amax(0) + 1e-6).all())
    tasks(coordinator, staying, "evaluate")
    coordinator.delete(f"{federation}/clients/c/updates")
    after = prompts(coordinator, federation)
    assert after["answered"].tolist() == [2, 2, 0]
    assert not after["client_contexts"][2].any()
    coordinator.delete(f"{federation}/clients/c/updates")
    answered(coordinator, staying, "evaluate")
    answered(coordinator, staying, "train")
    answered(coordinator, staying, "evaluate")
    coordinator.until(federation, state="finished")
    assert prompts(coordinator, federation)["answered"].tolist() == [3, 3, 0]
    states = coordinator.post(f"{federation}/rounds/2/replay", {}, status=200)["states"]
    states += coordinator.post(f"{federation}/rounds/3/replay", {}, status=200)["states"]
    assert [(one["origin"], one["same"]) for one in states] == [("train", True), ("forget", True), ("train", True)]


# A disk that lies: damaged bytes are noticed and named, and the federation waits until they are put back.

PLACES = ("rows", "files")


@pytest.fixture(params=PLACES)
def kept_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether blobs are rows or files."""
    if request.param == "files":
        monkeypatch.setattr(blobs, "SMALL_BYTES", -1)
    return str(request.param)


def damage(coordinator: InThread, digest: str, how: str = "flipped", restarted: bool = True) -> None:
    """What a disk may do to a blob. ``restarted``: nothing of it is in memory, as after a restart."""
    blobs = coordinator.registry.blobs
    content = blobs.read(digest)
    middle = len(content) - 3
    flipped = content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]
    changed = {"flipped": flipped, "truncated": content[:middle], "missing": None}[how]
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
    if restarted:
        for memory in (blobs._remembered, blobs.admitted):
            memory.forget([digest])


def put_back(coordinator: InThread, digest: str, content: bytes) -> None:
    """As from a backup."""
    path = coordinator.registry.blobs.path(digest)
    if coordinator.registry.blobs.is_small(len(content)):
        with coordinator.registry.database.write() as session:
            session.execute(delete(BlobRow).where(BlobRow.digest == digest))
            session.add(BlobRow(digest=digest, content=content))
    else:
        path.write_bytes(content)


def test_an_admitted_update_is_aggregated_from_memory_and_to_the_same_state(coordinator: InThread) -> None:
    hashes = []
    for damaged in (False, True):
        federation, clients = paused_phase(coordinator, rounds=1, name=f"damaged-{damaged}".lower())
        if damaged:
            with coordinator.registry.database.read() as session:
                mine = UpdateRow.task_id.in_(select(TaskRow.id).where(TaskRow.federation_id == federation))
                digests = list(session.scalars(select(UpdateRow.sha256).where(mine)))
            assert len(digests) == len(clients)
            for digest in digests:
                damage(coordinator, digest, "missing", restarted=False)
        coordinator.post(f"{federation}/resume")
        drive(clients)
        hashes.append(coordinator.get(federation)["state_hash"])
    assert hashes[0] == hashes[1]
    assert not coordinator.registry.blobs.admitted._values


@pytest.mark.usefixtures("kept_as")
def test_a_damaged_update_is_named_and_waited_for_until_put_back(coordinator: InThread) -> None:
    federation, clients = paused_phase(coordinator, rounds=1)
    with coordinator.registry.database.read() as session:
        digest = session.scalars(select(UpdateRow.sha256).order_by(UpdateRow.task_id)).first()
    assert digest is not None
    content = coordinator.registry.blobs.read(digest)
    for how, what in (("flipped", "has changed"), ("truncated", "has changed"), ("missing", "is missing")):
        damage(coordinator, digest, how)
        for _ in range(2):  # as long as it is damaged, a resume comes to the same end
            coordinator.post(f"{federation}/resume")
            reason = coordinator.until(federation, state="paused")["reason"]
            assert reason.startswith(f"damaged: {digest} ")
            assert what in reason, how
        put_back(coordinator, digest, content)
    coordinator.post(f"{federation}/resume")
    drive(clients)
    assert coordinator.get(federation)["state"] == "finished"
