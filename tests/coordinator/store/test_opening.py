"""A folder and a database are tied to each other; who only looks changes nothing; ends that come at any moment."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy.exc import DBAPIError

from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store import database as databases
from promptfed.coordinator.store import opening, turns
from promptfed.coordinator.store import postgres as postgresql
from promptfed.coordinator.store.backend import CannotOpen, DatabaseAway, InUse
from promptfed.coordinator.store.bucket import ObjectStoreAway
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.folder import ID_FILE, SQLITE_FILE
from promptfed.coordinator.store.form import migrate
from promptfed.coordinator.store.opening import open_store, open_to_look
from promptfed.coordinator.store.postgres import OF_SEVERAL, SESSION, PostgreSQL
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.coordinator.store.tables import ObjectRow
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


class Named:
    """An object store with a name, or none, and perhaps with objects."""

    def __init__(self, name: str | None, held: bool = False, error: Exception | None = None):
        self.place, self._name, self._held, self._error = "s3://b", name, held, error
        self.given: list[str] = []

    def name(self) -> str | None:
        if self._error is not None:
            raise self._error
        return self._name

    def blobs(self) -> Iterator[tuple[str, float]]:
        yield from [("blobs/aa/1", 0.0)] * self._held

    def give_name(self, name: str) -> None:
        self.given.append(name)


@pytest.mark.parametrize(
    ("rows", "bucket", "named", "why"),
    [
        (False, None, [], None),
        (True, None, [], "names objects of an object store: give --store as it was used before"),
        (False, Named(None), ["me"], None),
        (False, Named(None, held=True), [], "do not belong together: give --store"),
        (True, Named(None), [], "do not belong together: give --store"),
        (True, Named("me", held=True), [], None),
        (False, Named("me"), [], None),
        (True, Named("you"), [], "do not belong together: give --store"),
        (False, Named("you"), [], "do not belong together: give --store"),
    ],
)
def test_objects_and_a_database_keep_one_name(
    rows: bool, bucket: Named | None, named: list[str], why: str | None, tmp_path: Path
) -> None:
    database = Database(SQLite(tmp_path / "db.sqlite3"))
    migrate(database)
    with database.write() as session:
        session.add_all([ObjectRow(digest="sha256:0", key="k")] * rows)
    asked: Any = bucket
    if why is None:
        opening._tie_objects(asked, database, "me")
    else:
        with pytest.raises(CannotOpen, match=why):
            opening._tie_objects(asked, database, "me")
    assert (bucket.given if bucket is not None else []) == named


def test_a_database_is_waited_for_as_long_as_the_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(Database, "connect", lambda self, seconds: waited.append(seconds))
    settings = Settings(data_dir=tmp_path, database_wait_seconds=7)
    for look in (open_store, open_to_look):
        look(settings).close()
    assert waited == [7, 7]


def test_who_cannot_be_opened_lets_go_of_all_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = Named(None, error=ObjectStoreAway("it is away"))
    opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(opening, "bucket_of", lambda settings: away)
        for look in (open_store, open_to_look):
            with pytest.raises(CannotOpen, match="it is away"):
                look(Settings(data_dir=tmp_path))
    opened(tmp_path)


def test_a_coordinator_waits_for_its_turn_and_gives_it_back_where_it_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, checked = Server(tmp_path / "shared.sqlite3"), [CannotOpen("no UTF8"), None]
    monkeypatch.setattr(opening, "backend_of", lambda settings, holder="": StandIn(server))
    monkeypatch.setattr(opening, "bucket_of", lambda settings: None)

    def check(self: StandIn) -> None:
        if (error := checked.pop(0)) is not None:
            raise error

    monkeypatch.setattr(StandIn, "check", check)
    waiting = opening.Waiting(Settings(data_dir=tmp_path / "a"))
    with pytest.raises(CannotOpen, match="no UTF8"):
        waiting.next_store()
    assert server.holder is None, "another one may have its turn"
    store = waiting.next_store()
    assert store is not None
    assert store.turn is not None
    assert (store.turn.works, server.holder is not None) == (True, True)
    with pytest.raises(CannotOpen, match="another coordinator works on"):
        opening.Waiting(Settings(data_dir=tmp_path / "a"))
    store.close()
    assert (store.turn.works, server.holder) == (False, None)
    waiting.stop()
    assert waiting.next_store() is None
    waiting.close()
    opening.Waiting(Settings(data_dir=tmp_path / "a")).close()


@pytest.mark.parametrize(
    ("encoding", "fsync", "refused", "warned"),
    [("UTF8", "on", False, 0), ("UTF8", "off", False, 1), ("SQL_ASCII", "on", True, 0)],
)
def test_a_server_holds_every_name_and_is_warned_of_once(
    encoding: str, fsync: str, refused: bool, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {"SHOW server_encoding": encoding, "SHOW fsync": fsync}

    @contextmanager
    def connect() -> Iterator[Any]:
        yield SimpleNamespace(exec_driver_sql=lambda text: SimpleNamespace(scalar=lambda: answers[text]))

    backend: Any = SimpleNamespace(writer=SimpleNamespace(connect=connect), place="here", _warned=False)
    for _ in range(2):
        with pytest.raises(CannotOpen, match="create it with ENCODING 'UTF8'") if refused else nullcontext():
            PostgreSQL.check(backend)
    assert len(caplog.messages) == warned


def test_a_store_that_cannot_be_opened_lets_go_of_database_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Database] = []
    monkeypatch.setattr(Database, "close", lambda self: closed.append(self))
    with monkeypatch.context() as broken, pytest.raises(OSError, match="no room"):
        broken.setattr(opening, "_opened", Mock(side_effect=OSError("no room")))
        open_store(Settings(data_dir=tmp_path))
    assert len(closed) == 1
    open_store(Settings(data_dir=tmp_path)).close()


class Session:
    """A connection of a server that answers the statements which begin so."""

    def __init__(self, **answers: tuple[Any, ...]):
        self.answers, self.said = answers, list[str]()
        self.autocommit, self.info = False, SimpleNamespace(backend_pid=7)

    def execute(self, statement: str | bytes, values: Any = None) -> Any:
        text = statement if isinstance(statement, str) else statement.decode()
        word = next((word for word in ("synchronous", "regclass", "INSERT", "try_advisory") if word in text), text)
        self.said.append(f"{word} {values['holder']} {values['address']}" if values else word)
        assert self.autocommit, "no transaction begins with it"
        return SimpleNamespace(fetchone=lambda: self.answers.get(word))


def postgres(address: str | None = None, **about: Any) -> Any:
    """The backend of a server that is not asked, unless by what is given."""
    backend = object.__new__(PostgreSQL)
    vars(backend).update({"address": address, "_holder": "me", "place": "here", "writing": None} | about)
    return backend


SETTINGS, OF_OTHERS = ([f"SET {one}" for one in some] for some in (SESSION, OF_SEVERAL))


@pytest.mark.parametrize(("address", "answers", "said"), [
    (None, {"try_advisory": (False,)}, None), (None, {"try_advisory": (True,)}, ["try_advisory", *SETTINGS]),
    ("a", {"regclass": (False,), "try_advisory": (False,)}, None), ("a", {"regclass": (True,)}, None),
    ("a", {"regclass": (True,), "INSERT": (7,)}, ["regclass", "INSERT me a", *SETTINGS, *OF_OTHERS]),
    ("a", {"regclass": (False,), "try_advisory": (True,)}, ["regclass", "try_advisory", *SETTINGS, *OF_OTHERS]),
])  # fmt: skip
@pytest.mark.parametrize("durable", ["on", "off", "remote_apply"])
def test_who_writes_has_the_lock_and_waits_for_the_disk(
    address: str | None, answers: dict[str, Any], said: list[str] | None, durable: str
) -> None:
    backend, session = postgres(address), Session(**answers, synchronous=(durable,))
    if said is None:
        with pytest.raises(InUse, match="another coordinator works on the database at here"):
            backend._prepare_writer(session)
        assert backend.writing is None
    else:
        backend._prepare_writer(session)
        assert session.said == [*said, "synchronous", *["synchronous"] * (durable == "off")]
        assert (backend.writing, session.autocommit) == (7, False)


@pytest.mark.parametrize(
    ("listed", "row", "renewed", "waited"),
    [(False, None, True, 0), (True, None, False, 0), (True, (7,), True, 1), (True, (None,), True, 1)],
)
def test_a_sign_of_life_and_a_silent_session(
    listed: bool, row: Any, renewed: bool, waited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, slept = list[Any](), list[float]()
    monkeypatch.setattr(postgresql, "time", SimpleNamespace(sleep=slept.append))
    backend = postgres(_is_listed=lambda: listed, _sign=lambda text, **values: asked.append((text, values)) or row)
    assert (backend.renew(), asked) == (False, []), "it does not write yet"
    backend.writing = 7
    assert backend.renew() is renewed
    backend.terminate_silent(9.0)
    assert asked == [(postgresql.RENEW, {"backend": 7}), (postgresql.TERMINATE, {"silent": 9.0})] * listed
    assert slept == [postgresql.HANG_UP_SECONDS] * waited


class Gone(Exception):
    """The server does not answer; a full disk is a kind of it for the driver."""


class Full(Gone):
    """The server's disk is full."""


DRIVER: Any = SimpleNamespace(
    OperationalError=Gone, InterfaceError=EOFError, IsolationLevel=SimpleNamespace(REPEATABLE_READ="R")
)
DRIVER.errors = SimpleNamespace(
    OperationalError=Gone, InterfaceError=EOFError, ReadOnlySqlTransaction=PermissionError, DataCorrupted=KeyError,
    IndexCorrupted=IndexError, DiskFull=Full,
)  # fmt: skip


@pytest.mark.parametrize(("error", "away", "damaged", "full"), [
    (Gone("no answer"), "no answer", False, False), (EOFError("cut off"), "cut off", False, False),
    (PermissionError("a standby"), "a standby", False, False), (Full("no room"), None, False, True),
    (KeyError("page"), None, True, False), (IndexError("tree"), None, True, False),
    (ValueError("other"), None, False, False),
])  # fmt: skip
def test_an_error_of_the_server_is_of_one_kind(error: Any, away: str | None, damaged: bool, full: bool) -> None:
    backend, told = postgres(_driver=DRIVER), DBAPIError("SELECT", {}, error)
    assert (backend.why_away(told), backend.is_damaged(told), backend.is_full(told)) == (away, damaged, full)


def test_connections_are_prepared_and_known_or_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners, session, errors = list[Any](), Session(), [None, InUse("another"), KeyboardInterrupt()]
    monkeypatch.setattr(postgresql.event, "listens_for", lambda engine, name: listeners.append)
    backend, closed = postgres(_open=Mock(), _driver=DRIVER), Mock()

    def prepare(connection: Any) -> None:
        if (error := errors.pop(0)) is not None:
            raise error

    backend._on_connect(Mock(), prepare)
    dialect = SimpleNamespace(connect=lambda *given, **options: SimpleNamespace(given=(given, options), close=closed))
    [connect] = listeners
    made = connect(dialect, None, ("a",), {"b": 1})
    assert made.given == (("a",), {"b": 1})
    assert (backend._open.add.call_args.args, closed.call_count) == ((made,), 0)
    for error in (InUse, KeyboardInterrupt):
        with pytest.raises(error):
            connect(dialect, None, (), {})
    assert closed.call_count == 2
    backend._prepare_signs(session)
    assert (session.said, session.autocommit) == ([f"SET {one}" for one in postgresql.SIGNS], True)
    reader: Any = SimpleNamespace()
    backend._prepare_reader(reader)
    assert (reader.isolation_level, reader.read_only) == ("R", True)


def test_a_turn_is_taken_once_the_silent_have_been_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, steps, answers = [100.0], list[Any](), [True, False, *[True] * 4]
    errors = [*[InUse("another works")] * 3, DatabaseAway("no answer"), None]

    def come_back() -> None:
        if (error := errors.pop(0)) is not None:
            raise error

    def wait(seconds: float) -> None:
        now[0] += seconds

    def thread(**about: Any) -> Any:
        return SimpleNamespace(start=lambda: steps.append((about["name"], about["daemon"])))

    monkeypatch.setattr(turns, "boot_time", lambda: now[0])
    monkeypatch.setattr(turns, "expect_this_version", lambda database, or_none: steps.append(or_none))
    database: Any = SimpleNamespace(away=None, come_back=come_back)
    database.backend = SimpleNamespace(terminate_silent=lambda seconds: steps.append(seconds))
    turn = Turn(database, lambda: answers.pop(0))
    ended: Any = SimpleNamespace(is_set=lambda: False, wait=wait)
    turn._ended = ended
    monkeypatch.setattr(turns.threading, "Thread", thread)
    assert turn.take(lambda: False, 1.5)
    monkeypatch.undo()
    silent = turns.SILENT_SECONDS
    assert steps == [silent, silent, silent, True, silent, silent, ("turn", True)], "tables from 1.5 seconds on"
    said = ["another works", "the object store does not answer", "another works", "no answer"]
    assert caplog.messages == [f"waiting: {one}" for one in said]
    turn._ended = threading.Event()
    turn.end()
    asked = iter([False])
    assert not turn.take(lambda: next(asked))
