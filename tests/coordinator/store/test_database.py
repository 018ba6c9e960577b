"""Transactions."""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError

from promptfed.coordinator.store import database as databases
from promptfed.coordinator.store import sqlite as sqlites
from promptfed.coordinator.store.backend import CannotOpen, DatabaseAway, InUse
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.form import migrate
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.coordinator.store.tables import StateRow, TokenRow


@pytest.fixture
def database(tmp_path: Path) -> Database:
    found = Database(SQLite(tmp_path / "db.sqlite3"))
    migrate(found)
    return found


def test_every_commit_is_on_the_disk_before_it_is_answered(database: Database) -> None:
    with database.write() as session:
        pragmas = [session.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous")]
        assert pragmas == ["wal", 2]
        assert session.execute(text("PRAGMA foreign_keys")).scalar() == 1


def test_a_transaction_that_raises_leaves_nothing(database: Database) -> None:
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(TokenRow(digest="x", federation_id="nobody", created_at="", expires_at=""))
    with database.read() as session:
        assert session.query(TokenRow).count() == 0


def test_readers_do_not_wait_for_a_writer(database: Database) -> None:
    with database.write() as writer:
        writer.execute(text("DELETE FROM events"))
        with database.read() as reader:
            assert reader.execute(text("SELECT count(*) FROM events")).scalar() == 0


def test_the_database_itself_refuses_a_second_aggregate_of_a_phase() -> None:
    [unique] = [one for one in StateRow.__table__.constraints if type(one).__name__ == "UniqueConstraint"]
    assert [column.name for column in unique.columns] == ["phase_id"]


def failed(why: str) -> OperationalError:
    return OperationalError("SELECT 1", {}, Exception(why))


def server(*answers: Exception | None, in_folder: bool = False) -> tuple[Database, list[str]]:
    """A database whose connections come to these, and what is done to it; it is away where an error says "gone"."""
    coming, done = iter(answers), list[str]()

    @contextmanager
    def connect() -> Iterator[Any]:
        done.append("connect")
        if (error := next(coming)) is not None:
            raise error
        yield SimpleNamespace(execute=lambda statement: None)

    backend: Any = SimpleNamespace(
        place="here",
        in_folder=in_folder,
        writer=SimpleNamespace(connect=connect),
        reader=SimpleNamespace(dispose=lambda: done.append("dispose")),
        check=lambda: done.append("check"),
        cut=lambda: done.append("cut"),
        why_away=lambda error: "gone" if "gone" in str(error.orig) else None,
        is_full=lambda error: "full" in str(error.orig),
        is_damaged=lambda error: "damaged" in str(error.orig),
    )
    return Database(backend), done


def test_a_lost_connection_is_made_again_once_and_only_a_whole_database_comes_back() -> None:
    for answers, tries in (([None], 1), ([failed("gone"), None], 2)):
        database, done = server(*answers)
        database.away = "lost"
        database.come_back()
        assert (database.away, done) == (None, ["dispose", *["connect"] * tries])
    for answers, kind, words in (
        ([failed("gone")] * 2, DatabaseAway, "the database at here does not answer: gone"),
        ([failed("syntax")], CannotOpen, "the database at here cannot be used: syntax"),
        ([failed("damaged")], CannotOpen, "cannot be used: damaged: its file is damaged, put a backup back"),
    ):
        database, done = server(*answers)
        database.away = "lost"
        with pytest.raises(kind, match=words):
            database.come_back()
        assert (database.away, done) == ("lost", ["dispose", *["connect"] * len(answers)])


def test_a_start_waits_for_a_database_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(databases, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    for error in (InUse("another one"), failed("gone")):
        database, done = server(error, error, error, error, None)
        database.connect(10)
        assert done[-1] == "check"
        assert [line for line in caplog.messages if line.startswith("waiting 10 s for the database at here: ")] != []
        assert len(caplog.messages) == 1
        caplog.clear()
        now[0], slept[:] = 0.0, []
        database, _ = server(*[error] * 99)
        with pytest.raises((InUse, DatabaseAway)):
            database.connect(1)
        assert slept == [databases.TRY_AGAIN_SECONDS] * 2, "until its time is over"
        caplog.clear()
        now[0] = 0.0


@pytest.mark.parametrize("in_folder", [True, False])
def test_a_server_that_was_given_up_is_told_once_and_not_asked(
    in_folder: bool, caplog: pytest.LogCaptureFixture
) -> None:
    database, done = server(in_folder=in_folder)
    woken: list[str | None] = []
    database.on_away = lambda: woken.append(database.away)
    for why in ("it hangs", "it still hangs"):
        database.cut(why)
    if in_folder:
        assert (database.away, done, woken) == (None, [], []), "a file is never away"
        database.beat()
        return
    assert (database.away, done, woken) == ("it hangs", ["cut"] * 2, ["it hangs"])
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    for block in (database.read, database.write, database.connection, database.beat, database.erase):
        with pytest.raises(DatabaseAway, match="it hangs"):
            entered(block)


def entered(block: Callable[[], Any]) -> None:
    with block():
        raise AssertionError("it is away")


def test_an_error_inside_of_a_transaction_is_a_loss_where_the_backend_says_so(tmp_path: Path) -> None:
    database = Database(SQLite(tmp_path / "db.sqlite3"))
    database.backend.why_away = lambda error: "gone" if "gone" in str(error.orig) else None
    with pytest.raises(OperationalError), database.read():
        raise failed("syntax")
    assert database.away is None
    with pytest.raises(DatabaseAway, match="is away: gone"), database.read():
        raise failed("gone")
    assert database.away == f"the database at {tmp_path / 'db.sqlite3'} is away: gone"


@pytest.mark.parametrize(
    ("error", "full", "damaged"),
    [
        (OSError(errno.ENOSPC, "No space"), True, False),
        (OSError(errno.EDQUOT, "Quota"), True, False),
        (OSError(errno.EACCES, "full of damaged rights"), False, False),
        (failed("full"), True, False),
        (failed("damaged"), False, True),
        (SQLAlchemyError("full and damaged"), False, False),
        (ValueError("full and damaged"), False, False),
    ],
)
def test_a_full_disk_and_a_damaged_file_are_told_apart(error: Exception, full: bool, damaged: bool) -> None:
    database, _ = server()
    assert (database.is_full(error), database.is_damaged(error)) == (full, damaged)
    if isinstance(error, SQLAlchemyError):
        cause = error.orig if isinstance(error, DBAPIError) else error
        line = f"the database at here cannot be used: {cause}"
        advice = ": its file is damaged, put a backup back (docs/guides/backup.md)" if damaged else ""
        assert database.cannot_be_read(error) == line + advice


@pytest.mark.parametrize(
    ("kind", "code", "full", "damaged"),
    [
        (sqlite3.OperationalError, sqlite3.SQLITE_FULL, True, False),
        (sqlite3.OperationalError, sqlite3.SQLITE_BUSY, False, False),
        (sqlite3.OperationalError, sqlite3.SQLITE_IOERR, False, False),
        (sqlite3.DatabaseError, sqlite3.SQLITE_CORRUPT, False, True),
        (sqlite3.DatabaseError, sqlite3.SQLITE_NOTADB, False, True),
        (sqlite3.OperationalError, sqlite3.SQLITE_CORRUPT_INDEX, False, True),
        (sqlite3.IntegrityError, sqlite3.SQLITE_CONSTRAINT_UNIQUE, False, False),
        (Exception, sqlite3.SQLITE_FULL, False, False),
        (Exception, sqlite3.SQLITE_CORRUPT, False, False),
    ],
)
def test_sqlite_says_by_its_code_what_is_wrong(kind: type[Exception], code: int, full: bool, damaged: bool) -> None:
    """The low byte of an extended code is the code itself; what is no error of SQLite has none."""
    cause = kind("x")
    if kind is not Exception:
        cause.sqlite_errorcode = code
    backend, error = SQLite(Path("unused.sqlite3")), DBAPIError("x", {}, cause)
    assert (backend.is_full(error), backend.is_damaged(error)) == (full, damaged)


def test_one_connection_writes_and_what_is_erased_waits_little_for_readers(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer: Any = database.backend.writer
    assert (writer.pool.size(), writer.pool._max_overflow) == (1, 0)
    monkeypatch.setattr(sqlites, "READERS_MILLISECONDS", 1)
    with database.read() as reader:
        reader.execute(text("SELECT count(*) FROM events")).scalar()
        with database.write() as session:
            session.execute(text("CREATE TABLE more (id INTEGER)"))
        began = time.monotonic()
        database.erase()
        assert time.monotonic() - began < 0.5 * sqlites.BUSY_MILLISECONDS / 1000
    with database.write() as session:
        assert session.execute(text("PRAGMA busy_timeout")).scalar() == sqlites.BUSY_MILLISECONDS
        session.execute(text("DROP TABLE more"))
    log = Path(f"{database.backend.place}-wal")
    assert log.stat().st_size > 0
    database.erase()
    assert log.stat().st_size == 0


def test_an_error_does_not_tell_what_was_to_be_stored(database: Database) -> None:
    for block in (database.write, database.read):
        with pytest.raises(OperationalError, match="no such table") as told, block() as session:
            session.execute(text("SELECT * FROM no_table WHERE token = :token"), {"token": "a secret"})
        assert "a secret" not in str(told.value)
