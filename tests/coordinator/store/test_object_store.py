"""Large blobs as objects: what holds for files holds for them, over real HTTP."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from promptfed.coordinator.__main__ import main
from promptfed.coordinator.engine import scheduler
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store import blobs
from promptfed.coordinator.store.backend import CannotOpen
from promptfed.coordinator.store.bucket import Bucket, NoObject, ObjectStoreAway, fresh_key
from promptfed.coordinator.store.opening import open_store
from promptfed.testing.clients import ScriptedClient, drive
from tests.support.coordinators import InThread, in_thread
from tests.support.object_store import ObjectStoreServer
from tests.support.open_phases import completed, launched, paused_phase
from tests.support.waiting import wait_for
from tests.support.whole_federation import outcome


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "SMALL_BYTES", -1)
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(scheduler, "FLUSH_SECONDS", 0.05)


@pytest.fixture
def served(tmp_path: Path, object_store: str, database: dict[str, Any]) -> Iterator[InThread]:
    with in_thread(tmp_path / "data", store=object_store, **database) as server:
        yield server


def keys(url: str) -> set[str]:
    return {key for key, _ in Bucket(url).blobs()}


def names(url: str) -> set[str]:
    """The digests that the keys begin with."""
    return {key.split("/")[-1].partition(".")[0] for key in keys(url)}


def key_of(coordinator: InThread, digest: str) -> str:
    return coordinator.registry.blobs._rows.keys([digest])[digest]


def played(coordinator: InThread, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    federation, clients = completed(coordinator, "a", "b", **changes)
    return federation, clients


def go_on(coordinator: InThread, federation: str, clients: list[ScriptedClient]) -> None:
    """From a pause to the end, with another coordinator."""
    for client in clients:
        client.http = coordinator.http
    coordinator.post(f"{federation}/resume")
    drive(clients)
    assert coordinator.get(federation)["state"] == "finished"


def digest_and_body(client: ScriptedClient) -> tuple[str, bytes]:
    body = list(client.sent.values())[-1]
    return "sha256:" + hashlib.sha256(body).hexdigest(), body


@pytest.mark.door
@pytest.mark.both_databases
def test_a_run_with_objects_is_the_run_with_files(
    served: InThread, object_store: str, tmp_path: Path, database: dict[str, Any]
) -> None:
    federation, _ = played(served)
    with in_thread(tmp_path / "other") as other:
        assert outcome(other, played(other)[0]) == outcome(served, federation)
    digests = set(served.registry.blobs.all())
    assert len(digests) >= 5
    assert names(object_store) == {d[7:] for d in digests}
    assert len(keys(object_store)) == len(digests), "what was put again, as an evaluated payload, lies there once"
    assert served.registry.blobs.files() == [], "nothing of it lies in the folder"
    assert served.registry.blobs._rows.read(sorted(digests)) == {}
    replayed = served.post(f"{federation}/rounds/1/replay", {})
    assert [one["same"] for one in replayed["states"]] == [True], "what is stored is read back"
    served.delete(federation)
    assert keys(object_store) == set()


@pytest.mark.slow
def test_last_round_keeps_the_last_round_s_objects(served: InThread, object_store: str) -> None:
    federation, _ = played(served, rounds=4, retention="last_round")
    kept = {d[7:] for d in served.registry.blobs.all()}
    wait_for("the removal", lambda: len(served.registry.blobs.all()) < len(kept))
    wait_for("the removal", lambda: names(object_store) == {d[7:] for d in served.registry.blobs.all()})
    assert served.registry.retired[federation] == 4


@pytest.mark.door
@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_damaged_object_is_named_and_waited_for(served: InThread, object_store: str, how: str) -> None:
    federation, (a, b) = paused_phase(served, rounds=1)
    digest, body = digest_and_body(a)
    bucket, key = Bucket(object_store), key_of(served, digest)
    if how == "missing":
        bucket.remove([key])
    else:
        bucket.put(key, body[:-1] + bytes([body[-1] ^ 1]))
    served.registry.blobs._cache.forget([digest[7:]])
    served.post(f"{federation}/resume")
    reason = served.until(federation, state="paused")["reason"]
    assert reason.startswith(f"damaged: {digest} ")
    assert ("is missing" if how == "missing" else "has changed") in reason
    bucket.put(key, body)
    served.post(f"{federation}/resume")
    drive([a, b])
    assert served.get(federation)["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("retention", "objects"), [("all", "copied back"), ("all", "left as they are"), ("last_round", "copied back")]
)
def test_a_restored_backup_comes_to_the_state(tmp_path: Path, object_store: str, retention: str, objects: str) -> None:
    """Without a copy of the objects too, where retention takes none of them."""
    asked = {"rounds": 3, "retention": retention}
    with in_thread(tmp_path / "files") as coordinator:
        federation, _ = played(coordinator, **asked)
        undisturbed = coordinator.get(federation)["state_hash"]
    data, backup, bucket = tmp_path / "data", tmp_path / "backup", Bucket(object_store)
    with in_thread(data, store=object_store) as coordinator:
        federation, clients = paused_phase(coordinator, **asked)
    copied = {key: bucket.read(key) for key in keys(object_store)}
    shutil.copytree(data, backup)
    with in_thread(data, store=object_store) as coordinator:
        go_on(coordinator, federation, clients)
        later = coordinator.get(federation)["state_hash"]
        if retention == "last_round":
            wait_for("the removal", lambda: not copied.keys() & keys(object_store))
    shutil.rmtree(data)
    shutil.copytree(backup, data)
    if objects == "copied back":
        bucket.remove(keys(object_store))
        for key, content in copied.items():
            bucket.put(key, content)
    with in_thread(data, store=object_store) as coordinator:
        assert coordinator.get(federation)["state"] == "paused"
        go_on(coordinator, federation, clients)
        restored = coordinator.get(federation)["state_hash"]
        stored = names(object_store)  # first: what retention removes meanwhile leaves the rows before the bucket
        assert {d[7:] for d in coordinator.registry.blobs.all()} <= stored
    assert undisturbed == later == restored


@pytest.mark.slow
def test_verify_reads_objects_no_copies(tmp_path: Path, object_store: str, capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(tmp_path / "data", store=object_store) as coordinator:
        _, (a, _) = played(coordinator)
        digest, body = digest_and_body(a)
        key = key_of(coordinator, digest)
    look = ["--verify", "--data-dir", str(tmp_path / "data"), "--store", object_store]
    assert main(look) == 0
    Bucket(object_store).put(key, body[:-1])
    assert main(look) == 1
    assert f"of eyes ({digest}) has changed" in capsys.readouterr().out
    Bucket(object_store).put(key, body)
    assert main(look) == 0


@pytest.mark.slow
def test_what_crashes_have_left_is_swept_at_the_next_start(
    tmp_path: Path, object_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(object_store)
    with in_thread(tmp_path / "data", store=object_store) as coordinator:
        played(coordinator)
        named = keys(object_store)
        bucket.put(fresh_key("sha256:" + "0" * 64), b"litter")
    with in_thread(tmp_path / "data", store=object_store):
        assert keys(object_store) > named, "it may be about to get its row"
    monkeypatch.setattr(blobs, "LITTER_SECONDS", -60.0)
    with in_thread(tmp_path / "data", store=object_store):
        assert keys(object_store) == named


@pytest.mark.slow
def test_what_was_put_just_now_is_no_litter(tmp_path: Path, object_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, key = Bucket(object_store), fresh_key("sha256:" + "0" * 64)
    bucket.put(key, b"about to be named")
    store = open_store_at(tmp_path / "data", object_store + "/elsewhere")
    try:
        mine = blobs.Blobs(tmp_path / "data", store.blobs._rows, bucket)
        assert mine.remove_litter() == 0
        monkeypatch.setattr(blobs, "LITTER_SECONDS", -60.0)
        assert mine.remove_litter() == 1
    finally:
        store.close()


def open_store_at(folder: Path, url: str | None) -> Any:
    return open_store(Settings(data_dir=folder, store=url))


@pytest.mark.slow
def test_an_old_key_never_takes_a_newer_object_with_it(served: InThread, object_store: str) -> None:
    """Whoever was paused between a look and a removal removes what nobody names any more."""
    _, (a, _) = paused_phase(served)
    digest, body = digest_and_body(a)
    store = served.registry.blobs
    before = key_of(served, digest)
    with store.hold() as held, served.registry.changes() as changes:
        held.put(body)
        changes.batch.objects.update(held.keys)
    assert key_of(served, digest) != before
    assert before not in keys(object_store)
    Bucket(object_store).remove([before])
    store._cache.forget([digest.removeprefix("sha256:")])
    assert store.places([digest])


def test_a_store_that_is_away_is_503_and_costs_nothing(
    served: InThread, object_server: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, clients = launched(served, "a", "b")
    tasks = served.training(clients)
    updates = [client.answer for client in clients]
    payload = clients[0].payload(tasks[0])
    assert payload
    object_server.stop()
    try:
        answer = updates[0](tasks[0])
        assert answer.status_code == 503
        assert answer.json()["type"].endswith("/store-away")
        assert answer.headers["retry-after"] == "2"
        assert served.http.get("/readyz").status_code == 503
    finally:
        object_server.start()
    for answer_, task in zip(updates, tasks, strict=True):
        assert answer_(task).status_code == 201
    drive(clients)
    assert served.get(federation)["state"] == "finished"


@pytest.mark.slow
def test_a_prefix_and_a_database_belong_together(tmp_path: Path, object_store: str) -> None:
    with in_thread(tmp_path / "data", store=object_store) as coordinator:
        played(coordinator)
    with pytest.raises(CannotOpen, match="do not belong together: give --store"):
        open_store_at(tmp_path / "other", object_store)
    with pytest.raises(CannotOpen, match="give --store as it was used before"):
        open_store_at(tmp_path / "data", None)
    with pytest.raises(CannotOpen, match="do not belong together: give --store"):
        open_store_at(tmp_path / "data", object_store + "/empty")
    Bucket(object_store + "/litter").put(fresh_key("sha256:" + "0" * 64), b"somebody's")
    with pytest.raises(CannotOpen, match="do not belong together: give --store"):
        open_store_at(tmp_path / "new", object_store + "/litter")


@pytest.mark.slow
def test_files_of_before_are_found_beside_objects(tmp_path: Path, object_store: str) -> None:
    with in_thread(tmp_path / "data") as coordinator:
        federation, _ = paused_phase(coordinator)
        files = set(coordinator.registry.blobs.files())
    with in_thread(tmp_path / "data", store=object_store) as coordinator:
        coordinator.post(f"{federation}/resume")
        drive([coordinator.client(federation, name) for name in ("a", "b")])
        assert coordinator.get(federation)["state"] == "finished"
        assert set(coordinator.registry.blobs.files()) == files
        assert keys(object_store)


@pytest.mark.slow
def test_a_store_without_an_answer_is_one_line(
    tmp_path: Path, object_store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    options = ["--data-dir", str(tmp_path / "data"), "--store", object_store, "--port", "0"]
    assert main(options) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert f"the object store at {object_store} does not answer" in told[0]


@pytest.mark.door
def test_a_bucket_by_itself(object_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(object_store)
    assert bucket.name() is None
    bucket.give_name("me")
    assert bucket.name() == "me"
    with pytest.raises(NoObject):
        bucket.read("nothing")
    bucket.remove(["nothing"])
    bucket.probe()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://somewhere.example")
    with pytest.raises(ObjectStoreAway):
        Bucket(object_store).read("unencrypted, to another machine")
