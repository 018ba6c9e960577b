"""A folder and a database are tied to each other; who only looks changes nothing; ends that come at any moment."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store import database as databases
from promptfed.coordinator.store import opening, turns
from promptfed.coordinator.store.backend import CannotOpen
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.folder import ID_FILE, SQLITE_FILE
from promptfed.coordinator.store.opening import open_store, open_to_look
from promptfed.coordinator.store.postgres import PostgreSQL
from promptfed.coordinator.store.turns import Turn
from tests.support.stand_in_lock import Server, StandIn

APART = "do not belong together: give --data-dir and --database-url as they were used before"


def opened(folder: Path) -> str:
    """The name of the folder once its store was opened."""
    open_store(Settings(data_dir=folder)).close()
    return (folder / ID_FILE).read_text().strip()


def test_a_folder_and_its_database_keep_one_name(tmp_path: Path) -> None:
    name = opened(tmp_path)
    assert opened(tmp_path) == name
    (tmp_path / ID_FILE).write_text("another\n")
    with pytest.raises(CannotOpen, match=APART):
        opened(tmp_path)
    (tmp_path / ID_FILE).unlink()
    assert opened(tmp_path) == name, "the database lies in the folder"
    (tmp_path / SQLITE_FILE).unlink()
    with pytest.raises(CannotOpen, match=APART):
        opened(tmp_path)


def test_a_database_elsewhere_is_taken_by_an_empty_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path / "shared.sqlite3")
    monkeypatch.setattr(opening, "backend_of", lambda settings, holder="": StandIn(server))
    name = opened(tmp_path / "a")
    assert opened(tmp_path / "b") == name
    full = tmp_path / "c" / "blobs" / "aa"
    full.mkdir(parents=True)
    (full / ("a" * 64)).write_bytes(b"x")
    with pytest.raises(CannotOpen, match=APART):
        opened(tmp_path / "c")


def test_who_looks_makes_nothing(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with pytest.raises(CannotOpen, match="is no coordinator's data folder"):
        open_to_look(settings)
    assert list(tmp_path.iterdir()) == []
    opened(tmp_path)
    for _ in range(2):  # the lock is free again
        open_to_look(settings).close()
    (tmp_path / SQLITE_FILE).unlink()
    for _ in range(2):
        with pytest.raises(CannotOpen, match="is missing: put a backup back"):
            open_to_look(settings)
    assert not (tmp_path / SQLITE_FILE).exists()


@pytest.mark.parametrize("busy", [False, True])
def test_a_close_cuts_only_who_still_waits(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "CLOSE_SECONDS", 0.01)
    done: list[str] = []
    pools = {name: SimpleNamespace(dispose=lambda name=name: done.append(name)) for name in ("reader", "writer")}
    backend: Any = SimpleNamespace(cut=lambda: done.append("cut"), **pools)
    found = Database(backend)
    if busy:
        found._turn.acquire()
    found.close()
    assert done == [*(["cut"] if busy else []), "reader", "writer"]
    assert found._turn.locked() == busy
    assert found.away == "the coordinator has closed it"


def test_a_cut_ends_every_connection_also_beside_closed_ones() -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)

    def closed() -> int:
        raise OSError("the connection is closed")

    backend: Any = SimpleNamespace(_driver=SimpleNamespace(Error=ValueError))
    backend._open = [SimpleNamespace(fileno=closed), ours, SimpleNamespace(fileno=closed)]
    with ours, theirs:
        PostgreSQL.cut(backend)
        assert theirs.recv(1) == b""


def test_who_waits_for_a_turn_tries_now_and_then() -> None:
    tries: list[float] = []
    database: Any = SimpleNamespace(away=None)
    turn = Turn(database, lambda: False)
    turn._ended = threading.Event()
    turn._ended.wait = tries.append
    asked: list[None] = []
    assert not turn.take(lambda: asked.append(None) or len(asked) > 3)
    assert tries == [turns.TRY_SECONDS] * 3
