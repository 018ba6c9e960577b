"""A full disk, or one that fails: 507, nothing half done, and it goes on once there is room."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy import text

from promptfed.coordinator.store import blobs
from promptfed.coordinator.store.database import Database
from promptfed.shared.methods import METHODS
from promptfed.shared.tensors.torch_tensors import encode
from promptfed.testing.clients import content_digest, drive, enrolment, spec, trained, update_body
from tests.support.coordinators import InThread, in_thread
from tests.support.open_phases import kind, open_first_phase, stored_rows
from tests.support.resending import ResendingApi, ResendingRefused
from tests.support.two_phase import TwoPhase
from tests.support.waiting import PATIENCE
from tests.support.whole_federation import run

ROUNDS = 3


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptfed.coordinator.engine.scheduler.RETRY_SECONDS", 0.05)
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)


@pytest.fixture
def coordinator(tmp_path: Path, database: dict[str, Any]) -> Iterator[InThread]:
    with in_thread(tmp_path / "data", **database) as server:
        yield server


def failing(function: Callable[..., Any], number: int = errno.ENOSPC) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fails


@contextmanager
def full_tables(coordinator: InThread) -> Iterator[None]:
    """The database finds its disk full at the end of whatever is written.

    SQLite is really so: it may not grow, and each transaction has to. PostgreSQL is made to say so.
    """
    database = coordinator.registry.database
    write = database.write
    if not database.backend.in_folder:
        with ending_with(database, DISK_FULL):
            yield
        return
    with write() as session:
        session.execute(text("CREATE TABLE ballast (content TEXT)"))
        pages = session.execute(text("PRAGMA page_count")).scalar()
        session.execute(text(f"PRAGMA max_page_count = {pages}"))

    try:
        with ending_with(database, "INSERT INTO ballast VALUES (hex(zeroblob(1000000)))"):
            yield
    finally:
        with write() as session:
            session.execute(text("PRAGMA max_page_count = 4294967294"))
            session.execute(text("DROP TABLE ballast"))


@pytest.mark.usefixtures("blobs_are_files")
@pytest.mark.parametrize(
    ("place", "number"),
    [("file", errno.ENOSPC), ("rename", errno.ENOSPC), ("folder", errno.ENOSPC), ("new folder", errno.EDQUOT)],
)
def test_an_update_that_cannot_be_kept_is_refused_and_taken_later(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    federation, (a, b), (task, other) = open_first_phase(coordinator)
    before = stored_rows(coordinator.registry, federation)
    body = update_body(trained(a.payload(task), "a", task), task)
    with monkeypatch.context() as patch:
        if place == "file":
            patch.setattr(blobs.os, "fsync", failing(os.fsync, number))
        elif place == "rename":
            patch.setattr(Path, "rename", failing(Path.rename, number))
        elif place == "folder":
            patch.setattr(blobs, "sync_folder", failing(blobs.sync_folder, number))
        else:
            patch.setattr(Path, "mkdir", failing(Path.mkdir, number))
        for _ in range(3):
            refused = a.send(task, body)
            assert (refused.status_code, kind(refused)) == (507, "storage-full")
            assert "make room and send it again" in refused.json()["detail"]
    run_, rows, kept = stored_rows(coordinator.registry, federation)
    assert (run_, rows) == before[:2]
    assert set(kept) - set(before[2]) <= {"sha256:" + name for name in ([digest(body)] if place == "folder" else [])}
    assert list(coordinator.registry.blobs.incoming.iterdir()) == []
    assert (a.send(task, body).status_code, b.answer(other).status_code) == (201, 201)
    coordinator.until(federation, round=1, phase="evaluation")


def digest(body: bytes) -> str:
    return blobs.digest_of(body).removeprefix(blobs.PREFIX)


def test_a_blob_whose_folder_could_not_be_written_is_written_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = blobs.Blobs(tmp_path)
    store.open()
    synced: list[Path] = []
    sync = blobs.sync_folder
    with monkeypatch.context() as patch:
        patch.setattr(blobs, "sync_folder", failing(sync))
        with store.hold() as held, pytest.raises(OSError, match="No space"):
            held.put(b"some")
    monkeypatch.setattr(blobs, "sync_folder", lambda folder: (synced.append(folder), sync(folder)))
    with store.hold() as held:
        found = held.put(b"some")
    assert synced == [store.path(found).parent.parent, store.path(found).parent]
    with store.hold() as held:
        held.put(b"some")
    assert len(synced) == 2, "once is enough"


@pytest.mark.usefixtures("blobs_are_files")
def test_tensor_work_is_tried_again_until_there_is_room_and_leaves_no_litter(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, clients, tasks = open_first_phase(coordinator, rounds=1)
    put, tries = blobs.Held.put, []

    def full(held: blobs.Held, content: bytes) -> str:
        if len(tries) < 5:
            tries.append(len(list(held._blobs.incoming.iterdir())))
            monkeypatch.setattr(blobs.os, "fsync", failing(os.fsync))
        else:
            monkeypatch.undo()
        return put(held, content)

    monkeypatch.setattr("promptfed.coordinator.engine.scheduler.RETRY_SECONDS", 0.05)
    for client, task in zip(clients, tasks, strict=True):
        if client is clients[-1]:
            monkeypatch.setattr(blobs.Held, "put", full)
            monkeypatch.setattr("promptfed.coordinator.engine.scheduler.RETRY_SECONDS", 0.05)
        assert client.answer(task).status_code == 201
    found = coordinator.until(federation, round=1, phase="evaluation")
    assert found["state"] == "running"
    assert tries == [0] * 5, "each attempt has cleared up behind itself"
    assert list(coordinator.registry.blobs.incoming.iterdir()) == []
    drive(clients)
    assert [one["state_hash"] is not None for one in coordinator.get(f"{federation}/rounds")["rounds"]] == [True, True]


DISK_FULL = "DO $$ BEGIN RAISE EXCEPTION 'no space' USING ERRCODE = 'disk_full'; END $$"  # as PostgreSQL says it


@contextmanager
def ending_with(database: Database, statement: str) -> Iterator[None]:
    """A block in which every write transaction ends with this statement."""
    write = database.write

    @contextmanager
    def longer() -> Iterator[Any]:
        with write() as session:
            yield session
            session.flush()
            session.execute(text(statement))

    database.write = longer
    try:
        yield
    finally:
        database.write = write


Call = tuple[str, str, dict[str, Any]]


def calls(coordinator: InThread) -> tuple[dict[str, Call], dict[str, int]]:
    """A call of every kind that changes something, and the status of each when there is room."""
    _, (a, b), (task, other) = open_first_phase(coordinator, name="open")
    paused = open_first_phase(coordinator, name="paused")[0]
    coordinator.post(f"{paused}/pause")
    open_first_phase(coordinator, name="third")
    coordinator.create(name="gone")
    waiting = coordinator.create(name="waiting", participation={"min_clients": 1})
    coordinator.enrol(waiting, "early")
    evaluating = coordinator.create(name="evaluating", participation={"min_clients": 1})
    [early] = coordinator.enrol(evaluating, "early")
    coordinator.post(f"{evaluating}/start")
    shown = coordinator.task(early)
    operator = {"headers": coordinator.operator}
    token = {"Authorization": f"Bearer {coordinator.token(waiting)}"}
    update = update_body(trained(a.payload(task), "a", task), task)
    sent = {"content": update, "headers": a.headers | {"Content-Digest": content_digest(update)}}
    failure = {"json": {"type": "x", "detail": "y"}, "headers": b.headers}
    splits = {"splits": {"test": {"accuracy": 0.5, "num_samples": 2}}}
    state = encode({"context": torch.ones(4, 8)})
    found: dict[str, tuple[Call, int]] = {
        "create": (("POST", "", {"json": spec(name="more"), **operator}), 201),
        "initial state": (("PUT", "/waiting/initial-state", {"content": state, **operator}), 200),
        "token": (("POST", "/waiting/enrolment-tokens", operator), 201),
        "enrol": (("POST", "/waiting/clients", {"json": enrolment("late"), "headers": token}), 201),
        "reset": (("POST", "/waiting/clients/early/reset", operator), 200),
        "withdraw": (("DELETE", "/third/clients/b", operator), 204),
        "start": (("POST", "/waiting/start", operator), 200),
        "update": (("PUT", f"/open/tasks/{task['task_id']}/update", sent), 201),
        "failure": (("POST", f"/open/tasks/{other['task_id']}/failure", failure), 200),
        "evaluation": (
            ("PUT", f"/evaluating/tasks/{shown['task_id']}/evaluation", {"json": splits, "headers": early.headers}),
            201,
        ), "pause": (("POST", "/third/pause", operator), 200), "resume": (("POST", "/paused/resume", operator), 200),
        "cancel": (("POST", "/third/cancel", operator), 200), "delete": (("DELETE", "/gone", operator), 204),
    }  # fmt: skip
    return {name: call for name, (call, _) in found.items()}, {name: status for name, (_, status) in found.items()}


@pytest.mark.both_databases
def test_full_tables_refuse_every_call_that_would_change_them(coordinator: InThread) -> None:
    """Every answer is described in the API: the test's HTTP client sees to that."""
    made, good = calls(coordinator)
    before = coordinator.registry.federations

    def answers() -> dict[str, httpx.Response]:
        return {
            name: coordinator.http.request(verb, f"/v1/federations{path}", **options)
            for name, (verb, path, options) in made.items()
        }

    with full_tables(coordinator):
        refused = answers()
        assert {name: one.status_code for name, one in refused.items()} == dict.fromkeys(made, 507)
        assert {kind(one) for one in refused.values()} == {"storage-full"}
        assert coordinator.registry.federations == before
        for path in ("", "/open", "/open/clients", "/open/rounds", "/open/rounds/0", "/open/metrics", "/open/prompts"):
            shown = coordinator.http.get(f"/v1/federations{path}", headers=coordinator.operator)
            assert shown.status_code == 200, "it can still be looked at"
        ready = coordinator.http.get("/readyz")
        assert (ready.status_code, ready.json()["detail"]) == (
            503,
            "nothing can be written: the disk is full, make room",
        )
    assert coordinator.registry.federations == before
    assert list(coordinator.registry.blobs.incoming.iterdir()) == []
    assert {name: one.status_code for name, one in answers().items()} == good


# A real file system that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB; skipped where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"a file system that is full: run as root; {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


class Filler:
    """Fills a file system to the last byte, and makes room again."""

    def __init__(self, place: Path):
        self._file = place / "filler"

    def fill(self) -> None:
        with self._file.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def empty(self) -> None:
        self._file.unlink(missing_ok=True)


@pytest.mark.parametrize("method", ["two_phase", pytest.param("promptfl", marks=pytest.mark.slow)])
def test_a_disk_that_is_full_again_and_again_does_not_change_what_comes_out(
    small_disk: Path, tmp_path: Path, method: str
) -> None:
    with in_thread(tmp_path / "undisturbed") as other:
        expected = run(other, method, ROUNDS)
    filler, over = Filler(small_disk), threading.Event()
    with in_thread(small_disk / "data") as coordinator:
        refused = ResendingRefused(coordinator.http, 507, "storage-full", PATIENCE)
        api = ResendingApi(refused, coordinator.operator)

        def now_and_then() -> None:
            room = 0.25
            while not over.is_set():
                filler.fill()
                over.wait(0.25)
                filler.empty()
                over.wait(room)
                room *= 1.05  # where a request takes longer than there is room, it comes through later

        thread = threading.Thread(target=now_and_then)
        thread.start()
        try:
            found = run(api, method, ROUNDS)
        finally:
            over.set()
            thread.join()
            filler.empty()
        assert found == expected
        assert api.resent > 0
        assert list(coordinator.registry.blobs.incoming.iterdir()) == []
