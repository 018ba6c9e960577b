"""What only one may do at a time waits while another one is in; what is changed for all is changed by one alone."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.engine import retention, token_expiry
from promptfed.coordinator.engine.committer import Committer, RegistryClosed
from promptfed.coordinator.engine.last_seen import LastSeen
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.store.bucket import ObjectCache
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.testing.clients import PATIENCE
from tests.support.coordinators import InProcess
from tests.support.open_phases import completed

Nothing: Any = None
CHANGES = Registry.changes  # as it is, not as the tests of this folder watch it


def waits(lock: Any, call: Callable[[], object]) -> bool:
    """Whether the call ends only once the lock is free."""
    thread = threading.Thread(target=call)
    with lock:
        thread.start()
        thread.join(0.03)
        waited = thread.is_alive()
    thread.join(PATIENCE)
    return waited


def entered(block: Any) -> None:
    with block:
        pass


@pytest.mark.parametrize("call", ["write", "connection", "erase", "come_back"])
def test_one_writes_at_a_time(call: str, tmp_path: Path) -> None:
    database = Database(SQLite(tmp_path / "db.sqlite3"))
    does = getattr(database, call)
    assert waits(database._turn, lambda: entered(does()) if call in ("write", "connection") else does())
    entered(database.read())  # readers wait for nobody
    with database._turn:
        entered(database.read())
    database.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda seen: seen.is_at("t", 0.5), lambda seen: seen.seen("a"), lambda seen: seen.served("t", 1),
        lambda seen: seen.flush(),
    ],
    ids=["is_at", "seen", "served", "flush"],
)  # fmt: skip
def test_figures_are_noted_one_by_one(call: Callable[[LastSeen], object]) -> None:
    seen = LastSeen(Nothing)
    assert waits(seen._lock, lambda: call(seen))


def test_files_are_held_and_removed_one_by_one(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    blobs.open()
    assert waits(blobs._lock, lambda: blobs.remove(["sha256:00"]))
    assert waits(blobs._lock, lambda: blobs._note("sha256:00"))
    held = blobs.hold()
    held.__enter__().digests.append("sha256:00")
    assert waits(blobs._lock, lambda: held.__exit__(None, None, None))
    assert blobs._held == Counter()
    cache = ObjectCache(tmp_path / "cache")
    cache.open()
    (tmp_path / "new").write_bytes(b"x")
    assert waits(cache._lock, lambda: cache.adopt(tmp_path / "new", "a"))
    assert waits(cache._lock, lambda: cache.forget(["a"]))
    assert cache._bytes == 0


def test_a_group_is_gathered_by_one() -> None:
    one = Committer(Nothing, Nothing)
    assert waits(one._lock, one.close)
    assert waits(one._lock, lambda: closed(one))
    other = Committer(Nothing, Nothing)
    other._gathered = [Nothing] * 999
    assert waits(other._lock, lambda: other._go_on(Nothing))


def closed(one: Committer) -> None:
    async def submit() -> None:
        with pytest.raises(RegistryClosed):
            await one.submit(Nothing)

    asyncio.run(submit())


@pytest.fixture
def registry(coordinator: InProcess) -> Registry:
    return coordinator.registry


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.note("nobody"), lambda one: entered(one.exclusively()), lambda one: entered(CHANGES(one)),
        lambda one: one.forget("nobody"), lambda one: one.add(SimpleNamespace(id="f", run=None)),
    ],
    ids=["note", "exclusively", "changes", "forget", "add"],
)  # fmt: skip
def test_federations_are_changed_by_one(call: Callable[[Registry], object], registry: Registry) -> None:
    before = registry.federations
    assert waits(registry._turn, lambda: call(registry))
    registry.federations = before


def test_what_concerns_all_is_written_by_one_alone(coordinator: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these has more to write than one federation's change, or changes what all look up."""
    registry, write, remove = coordinator.registry, Database.write, Blobs.remove
    exclusively, inside, wrong = Registry.exclusively, [0], list[str]()

    @contextmanager
    def counted(self: Registry) -> Iterator[None]:
        with exclusively(self):
            inside[0] += 1
            try:
                yield
            finally:
                inside[0] -= 1

    def written(self: Database) -> Any:
        if not inside[0]:
            wrong.append(what[0])
        return write(self)

    def removed(self: Blobs, digests: Any) -> Any:
        if not inside[0]:
            wrong.append(what[0])
        return remove(self, digests)

    federation, _ = completed(coordinator, "a", "b", rounds=1)
    registry.last_seen.flush()
    monkeypatch.setattr(registry.last_seen, "flush", lambda: None)
    registry.wakeups.closed = True  # the driver does nothing meanwhile
    what = [""]
    monkeypatch.setattr(Registry, "exclusively", counted)
    monkeypatch.setattr(Database, "write", written)
    monkeypatch.setattr(Blobs, "remove", removed)
    asked = {"name": "anna", "role": "viewer", "hours": 1.0}
    minted: dict[str, Any] = {}
    for name, call in (
        ("create", lambda: coordinator.create(name="other")),
        ("mint", lambda: minted.update(coordinator.post("/v1/operators", asked, status=201))),
        ("revoke", lambda: coordinator.delete(f"/v1/operators/{minted['id']}")),
        (
            "sign",
            lambda: coordinator.http.get(f"/v1/federations/{federation}/rounds/1/export", headers=coordinator.operator),
        ),
        ("collect", lambda: retention.collect(registry, registry.blobs.all())),
        ("expire", lambda: expired(registry)),
    ):
        what[0] = name
        call()
    registry.wakeups.closed = False
    what[0] = "delete"
    monkeypatch.setattr(retention, "_delete_rows", lambda registry, id: None)
    retention.delete_federation(registry, federation)
    assert wrong == []
    assert [one.name for one in registry.federations.values()] == ["other"]


def expired(registry: Registry) -> None:
    past = token_expiry.clock.parse("2020-01-01T00:00:00+00:00")
    for federation in registry.federations.values():
        tokens = {key: replace(token, expires=past) for key, token in federation.tokens.items()}
        registry.note(federation.id, tokens=tokens)
    token_expiry.mark_expired(registry)
    assert all(token.expired for one in registry.federations.values() for token in one.tokens.values())
