"""Transactions on SQLite or PostgreSQL: one writer at a time; readers see the last commit and never wait."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    insert,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from promptfed.coordinator.store.tables import Base
from promptfed.shared import get_extra

if TYPE_CHECKING:
    from psycopg import Connection as DriverConnection

log = logging.getLogger("promptfed.coordinator")
DRIVER = "postgresql+psycopg"
CONNECT = {
    "client_encoding": "utf8",
    "connect_timeout": "5",
    # A dead peer is noticed in half a minute, by us and (``SESSION``) by the server, which then frees the lock.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "20000",
    # After a failover the old server may only read: it is not ours any more.
    "target_session_attrs": "read-write",
    "application_name": "promptfed coordinator",
}
SESSION = ("tcp_keepalives_idle = 10", "tcp_keepalives_interval = 5", "tcp_keepalives_count = 4")
READERS = 8

# Who stops in the middle of a transaction keeps others from nothing for longer.
OF_SEVERAL = ("idle_in_transaction_session_timeout = 5000",)

HANG_UP_SECONDS = 0.1  # until the locks of a terminated session are gone
SIGNS = (*SESSION, "statement_timeout = 3000", "lock_timeout = 2000")
NOW = "extract(epoch FROM clock_timestamp())"
KEY = "hashtextextended('promptfed coordinator ' || coalesce(current_schema(), ''), 0)"
LOCK = f"SELECT pg_try_advisory_lock({KEY})"
IS_LISTED = "SELECT to_regclass('working') IS NOT NULL"

# In one statement: whoever is stopped behind it has said who it is.
TAKE = """
    WITH lock AS MATERIALIZED (SELECT pg_try_advisory_lock(KEY) AS taken)
    INSERT INTO working (id, holder, address, backend, since, seen)
    SELECT 1, %(holder)s, %(address)s, pg_backend_pid(), NOW, NOW FROM lock WHERE taken
    ON CONFLICT (id) DO UPDATE SET holder = excluded.holder, address = excluded.address, backend = excluded.backend,
    since = excluded.since, seen = excluded.seen
    RETURNING backend
""".replace("KEY", KEY).replace("NOW", NOW)

RENEW = """
    INSERT INTO working (id, holder, address, backend, since, seen)
    VALUES (1, %(holder)s, %(address)s, %(backend)s, NOW, NOW)
    ON CONFLICT (id) DO UPDATE SET seen = excluded.seen
    WHERE working.holder = excluded.holder AND working.backend = excluded.backend
    RETURNING backend
""".replace("NOW", NOW)

# The session of the row: it has the lock, and is no later one with the same number.
TERMINATE = """
    SELECT pg_terminate_backend(working.backend::integer) FROM working
    JOIN pg_stat_activity ON pg_stat_activity.pid = working.backend
    WHERE (working.seen < NOW - %(silent)s OR working.holder = %(holder)s)
    AND pg_stat_activity.backend_start <= to_timestamp(working.since)
    AND EXISTS (
        SELECT FROM pg_locks WHERE pid = working.backend AND locktype = 'advisory' AND granted AND objsubid = 1
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (classid::bigint << 32 | objid::bigint) = KEY
    )
""".replace("KEY", KEY).replace("NOW", NOW)

MIGRATIONS = Path(__file__).parent / "migrations"
READS_OLDER = "7368013d"  # the last commit that reads the tables of releases before 0.4.0
TRY_AGAIN_SECONDS = 0.5
CLOSE_SECONDS = 1.0

FORM = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""The table in which alembic stores the revision of the others."""

BUSY_MILLISECONDS = 10_000
READERS_MILLISECONDS = 500  # of waiting for readers of an older commit, while nobody writes
WRITERS_CACHE_KIB = (
    16 << 10
)  # at most, of pages: of a long federation's indexes it uses many more than of a short one's
READERS_CACHE_KIB = 2000  # of each reading connection: SQLite's own default


class CannotOpen(Exception):
    """The store cannot be opened; the text says in one line why and what to do."""


class InUse(CannotOpen):
    """Another coordinator uses the store."""


class DatabaseAway(Exception):
    """The database does not answer, or has lost the lock; the text says why."""


class Backend(ABC):
    """Two pools of connections: one connection that writes, and some that read the last commit."""

    place: str
    """Where the database is, without a password."""
    in_folder: bool
    """Whether it lies in the data folder, beside the blobs that it names."""
    writer: Engine
    reader: Engine

    @abstractmethod
    def check(self) -> None:
        """Refuse a database that does not meet the requirements. Raises CannotOpen."""

    @abstractmethod
    def why_away(self, error: DBAPIError) -> str | None:
        """One line on why the database is away, or None where the error is of another kind."""

    @abstractmethod
    def is_full(self, error: DBAPIError) -> bool:
        """Whether the database's disk is full."""

    @abstractmethod
    def is_damaged(self, error: DBAPIError) -> bool:
        """Whether the error reports damaged data."""

    @abstractmethod
    def erase(self) -> None:
        """Overwrite deleted rows on disk, where the coordinator owns the files."""

    @abstractmethod
    def cut(self) -> None:
        """Close every connection. Threads that wait for one get an error."""

    def renew(self) -> bool:
        """Say that this coordinator is there; False where another one has the lock now. Raises SQLAlchemyError."""
        return True

    def terminate_silent(self, seconds: float) -> None:
        """Terminate the session of a coordinator that was not seen for ``seconds``, or an earlier one of this one.

        Raises SQLAlchemyError.
        """
        return


def one_line(error: object) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())


class PostgreSQL(Backend):
    """One database (or schema) of a server. An advisory lock of the session excludes other coordinators.

    The writing connection takes it when it is made, and it ends with that connection. With an ``address`` the
    coordinator is one of several that wait for each other (`turns.Turn`): the statement that takes the lock also says
    who has it. ``writing`` is the server's process id of the writing session.
    """

    in_folder = False

    def __init__(self, url: str, address: str | None = None, holder: str = ""):
        """Does not connect yet. ``holder``: the id of this coordinator among several. Raises CannotOpen."""
        self.address = address
        self._holder = holder
        self.writing: int | None = None
        try:
            import psycopg
        except ImportError:
            raise CannotOpen(f"PostgreSQL needs its driver: {get_extra('postgres')}") from None
        self._driver = psycopg
        self._open: WeakSet[DriverConnection[Any]] = WeakSet()
        self._warned = False
        try:
            parsed = make_url(url).set(drivername=DRIVER)
        except (ArgumentError, ValueError):
            # The error's own text may hold the password.
            raise CannotOpen("the database URL cannot be read: postgresql+psycopg://USER:PASSWORD@HOST/NAME") from None
        self.place = f"{parsed.host or 'localhost'}:{parsed.port or 5432}/{parsed.database or ''}"
        parsed = parsed.update_query_dict({key: value for key, value in CONNECT.items() if key not in parsed.query})
        self.writer = create_engine(parsed, pool_size=1, max_overflow=0, hide_parameters=True)
        self.reader = create_engine(
            parsed, pool_size=READERS, max_overflow=READERS, pool_pre_ping=True, hide_parameters=True
        )
        # Apart from transactions: they do not delay it, and what stops here keeps no row locked.
        self.signs = create_engine(parsed, pool_size=1, pool_pre_ping=True, hide_parameters=True)
        self._on_connect(self.writer, self._prepare_writer)
        self._on_connect(self.reader, self._prepare_reader)
        self._on_connect(self.signs, self._prepare_signs)

    def check(self) -> None:
        """Require an encoding that holds every name; warn about ``fsync=off``."""
        with self.writer.connect() as connection:
            encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
            fsync = connection.exec_driver_sql("SHOW fsync").scalar()
        if encoding != "UTF8":
            raise CannotOpen(f"the database at {self.place} has encoding {encoding}: create it with ENCODING 'UTF8'")
        if fsync == "off" and not self._warned:
            self._warned = True
            log.warning("the database server runs with fsync=off: a power cut can lose updates answered with 201")

    def renew(self) -> bool:
        if self.writing is None:
            return False
        return not self._is_listed() or self._sign(RENEW, backend=self.writing) is not None

    def terminate_silent(self, seconds: float) -> None:
        if self._is_listed() and self._sign(TERMINATE, silent=seconds) is not None:
            time.sleep(HANG_UP_SECONDS)

    def _is_listed(self) -> bool:
        return self._sign(IS_LISTED) == (True,)

    def _sign(self, statement: str, **values: object) -> tuple[object, ...] | None:
        known = {"holder": self._holder, "address": self.address, **values}
        with self.signs.connect() as connection:
            row = connection.exec_driver_sql(statement, known if "%(" in statement else None).first()
            return tuple(row) if row is not None else None

    def why_away(self, error: DBAPIError) -> str | None:
        """The server ended, refused or restarted, or it is read-only now."""
        errors = self._driver.errors
        gone = (self._driver.OperationalError, self._driver.InterfaceError, errors.ReadOnlySqlTransaction)
        if isinstance(error.orig, gone) and not self.is_full(error):
            return one_line(error.orig)
        return None

    def is_damaged(self, error: DBAPIError) -> bool:
        errors = self._driver.errors
        return isinstance(error.orig, (errors.DataCorrupted, errors.IndexCorrupted))

    def is_full(self, error: DBAPIError) -> bool:
        return isinstance(error.orig, self._driver.errors.DiskFull)

    def erase(self) -> None:
        """The server cleans its own files."""

    def cut(self) -> None:
        """Shut the sockets down: threads that wait for an answer find the end of the stream."""
        for connection in list(self._open):
            try:
                with socket.socket(fileno=os.dup(connection.fileno())) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
            except (OSError, self._driver.Error):
                pass  # It is closed already.

    def _on_connect(self, engine: Engine, prepare: Any) -> None:
        @event.listens_for(engine, "do_connect")
        def connect(dialect: Any, _record: object, arguments: Any, options: Any) -> DriverConnection[Any]:
            connection: DriverConnection[Any] = dialect.connect(*arguments, **options)
            try:
                self._open.add(connection)
                prepare(connection)
            except BaseException:
                connection.close()
                raise
            return connection

    def _prepare_writer(self, connection: DriverConnection[Any]) -> None:
        connection.autocommit = True
        if not self._lock(connection):
            raise InUse(f"another coordinator works on the database at {self.place}: stop it, or give another database")
        self.writing = connection.info.backend_pid
        for setting in (*SESSION, *(OF_SEVERAL if self.address is not None else ())):
            connection.execute(f"SET {setting}".encode())
        # Every value but this one waits for the server's own disk.
        if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):
            connection.execute("SET synchronous_commit = on")
        connection.autocommit = False

    def _lock(self, connection: DriverConnection[Any]) -> bool:
        if self.address is None or connection.execute(IS_LISTED).fetchone() != (True,):
            return connection.execute(LOCK.encode()).fetchone() == (True,)
        row = connection.execute(TAKE.encode(), {"holder": self._holder, "address": self.address}).fetchone()
        return row is not None

    def _prepare_signs(self, connection: DriverConnection[Any]) -> None:
        connection.autocommit = True
        for setting in SIGNS:
            connection.execute(f"SET {setting}".encode())

    def _prepare_reader(self, connection: DriverConnection[Any]) -> None:
        # As SQLite's readers: all statements of a transaction see one commit.
        connection.isolation_level = self._driver.IsolationLevel.REPEATABLE_READ
        connection.read_only = True


@contextmanager
def together(connection: Connection) -> Iterator[None]:
    """A block whose statements PostgreSQL receives without waiting for each (pipeline mode); results are not available.

    Raises DBAPIError at the end of the block for a statement that fails.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    import psycopg

    driver: DriverConnection[Any] = connection.connection.driver_connection  # type: ignore[assignment]
    try:
        with driver.pipeline():
            yield
    except psycopg.Error as error:
        about = "statements sent together"
        raise DBAPIError.instance(about, None, error, psycopg.Error, hide_parameters=True) from error


class Database:
    """The tables, on a backend.

    After a lost connection nothing is read or written before ``come_back``: a commit without an answer may have
    happened, so the caller's memory may be older than the tables, and another coordinator may have had the lock.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.away: str | None = None
        self.on_away: Callable[[], None] = lambda: None
        self._turn = threading.Lock()

    def connect(self, wait_seconds: float) -> None:
        """Connect and lock, waiting until the database answers and is free. Raises DatabaseAway, CannotOpen."""
        end = time.monotonic() + wait_seconds
        warned = False
        while True:
            try:
                self.come_back()
                self.backend.check()
                return
            except (DatabaseAway, InUse) as error:
                if time.monotonic() >= end:
                    raise
                if not warned:
                    log.warning("waiting %g s for the database at %s: %s", wait_seconds, self.backend.place, error)
                warned = True
            time.sleep(TRY_AGAIN_SECONDS)

    def migrate(self) -> None:
        """Create the tables, or upgrade those of an earlier version. Raises CannotOpen."""
        try:
            with self._turn, self._watched(), self.backend.writer.begin() as connection:
                revision = _form(connection)
                if revision is None:
                    # In their newest form at once: migrations are for tables that are there already.
                    Base.metadata.create_all(connection, checkfirst=False)
                    FORM.create(connection)
                    connection.execute(insert(FORM).values(version_num=_forms()[-1]))
                elif revision != _forms()[-1]:
                    self._expect_not_before(revision)
                    self._upgrade(connection)
        except DBAPIError as error:
            if self.is_damaged(error):
                raise CannotOpen(self.cannot_be_read(error)) from None
            text_ = f"the tables cannot be made in the database at {self.backend.place}"
            raise CannotOpen(f"{text_}: {str(error.orig).splitlines()[0]}") from None

    def _upgrade(self, connection: Connection) -> None:
        # Imported here, since a store is seldom upgraded, and each start of the coordinator would wait for it.
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            text_ = f"the database at {self.backend.place} was made by another version: {one_line(error)}"
            raise CannotOpen(f"{text_}: install the version that made it, or a later one") from None

    def _expect_not_before(self, found: str | None) -> None:
        if found is not None and found < _forms()[0]:
            raise CannotOpen(
                f"the tables at {self.backend.place} have the form {found} of promptfed before 0.4.0, which this "
                f"version does not read: start commit {READS_OLDER} on them, export each result, and continue from the "
                "exports in a new store (docs/guides/upgrade.md)"
            )

    def expect_this_version(self, or_none: bool = False) -> None:
        """Refuse tables of another version's form; ``or_none``: not where there are none. Raises CannotOpen,
        DatabaseAway.
        """
        try:
            with self._watched(), self.backend.reader.connect() as connection:
                revision = _form(connection)
        except DBAPIError as error:
            raise CannotOpen(self.cannot_be_read(error)) from None
        self._expect_not_before(revision)
        if revision != _forms()[-1] and not (or_none and revision is None):
            text_ = f"the tables at {self.backend.place} have the form {revision} instead of {_forms()[-1]}"
            raise CannotOpen(f"{text_}: start this version of the coordinator on them once")

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that is committed at the end of the block, or rolled back where it raises.

        Raises:
            DatabaseAway: it may have been committed all the same.
        """
        with self._turn, self._watched(), self._session(self.backend.writer) as session:
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that only reads. Raises DatabaseAway."""
        with self._watched(), self._session(self.backend.reader) as session:
            yield session

    def is_full(self, error: Exception) -> bool:
        """Whether ``error`` says that the disk is full, the database's or that of the data folder."""
        if isinstance(error, OSError):
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
        return isinstance(error, DBAPIError) and self.backend.is_full(error)

    def is_damaged(self, error: Exception) -> bool:
        """Whether ``error`` says that the database's file is damaged."""
        return isinstance(error, DBAPIError) and self.backend.is_damaged(error)

    def cannot_be_read(self, error: SQLAlchemyError) -> str:
        """One line about a database that answers but cannot be used."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        text_ = f"the database at {self.backend.place} cannot be used: {one_line(cause)}"
        damaged = ": its file is damaged, put a backup back (docs/guides/backup.md)"
        return text_ + damaged if self.is_damaged(error) else text_

    def beat(self) -> None:
        """Check the connection that holds the lock. Raises DatabaseAway."""
        if not self.backend.in_folder:
            with self.write() as session:
                session.execute(text("SELECT 1"))

    def come_back(self) -> None:
        """Reconnect. Raises DatabaseAway; InUse where another coordinator holds the lock."""
        with self._turn:
            self.backend.reader.dispose()
            for last in (False, True):
                try:
                    with self.backend.writer.connect() as connection:
                        connection.execute(text("SELECT 1"))
                        break
                except DBAPIError as error:
                    why = self.backend.why_away(error)
                    if why is None:
                        raise CannotOpen(self.cannot_be_read(error)) from None
                    if last:
                        raise DatabaseAway(f"the database at {self.backend.place} does not answer: {why}") from None
                    # The connection of before is found dead and dropped; the second try makes another.
            self.away = None

    def cut(self, why: str) -> None:
        """Give up a server that does not answer: threads that wait for it get an error."""
        if not self.backend.in_folder:
            self._lose(why)
            self.backend.cut()

    def erase(self) -> None:
        """Overwrite deleted rows in the database's files, where the coordinator owns them. Raises DatabaseAway."""
        with self._turn, self._watched():
            self.backend.erase()

    def close(self) -> None:
        """Close all connections. A thread that still waits for an answer gets an error."""
        free = self._turn.acquire(timeout=CLOSE_SECONDS)
        if not free:
            self.backend.cut()
        self.away = self.away or "the coordinator has closed it"  # what still computes must not connect again
        self.backend.reader.dispose()
        self.backend.writer.dispose()
        if free:
            self._turn.release()

    @contextmanager
    def _session(self, engine: Engine) -> Iterator[Session]:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if self.away is not None:
            raise DatabaseAway(self.away)
        try:
            yield
        except DBAPIError as error:
            why = self.backend.why_away(error)
            if why is None:
                raise
            reason = f"the database at {self.backend.place} is away: {why}"
            self._lose(reason)
            raise DatabaseAway(reason) from None

    def _lose(self, why: str) -> None:
        if self.away is None:
            self.away = why
            log.error("%s", why)
            self.on_away()


def _forms() -> list[str]:
    """The revisions that there are migrations for, from the oldest on: their files begin with them."""
    return sorted(file.name.partition("_")[0] for file in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def _form(connection: Connection) -> str | None:
    """The revision of the tables; None where there are none."""
    if not inspect(connection).has_table(FORM.name):
        return None
    return connection.execute(select(FORM.c.version_num)).scalar()


class SQLite(Backend):
    """One file in the data folder, whose lock excludes other coordinators."""

    in_folder = True

    def __init__(self, path: Path):
        self.place = str(path)
        self.writer = _engine(path, "BEGIN IMMEDIATE", pool_size=1, cache_kib=WRITERS_CACHE_KIB)
        self.reader = _engine(path, "BEGIN", pool_size=16)

    def check(self) -> None:
        """Nothing to check: the pragmas below ensure durability."""

    def why_away(self, error: DBAPIError) -> str | None:
        return None  # a file does not go away

    def is_full(self, error: DBAPIError) -> bool:
        cause = error.orig
        return isinstance(cause, sqlite3.OperationalError) and cause.sqlite_errorcode == sqlite3.SQLITE_FULL

    def is_damaged(self, error: DBAPIError) -> bool:
        cause = error.orig
        damaged = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        return isinstance(cause, sqlite3.DatabaseError) and cause.sqlite_errorcode & 0xFF in damaged

    def erase(self) -> None:
        """Empty the write-ahead log, which holds deleted rows until it is overwritten.

        If a reader still needs it or the disk refuses, later commits overwrite it; the deletion itself holds.
        """
        connection = self.writer.raw_connection()
        cursor = connection.cursor()
        try:
            cursor.execute(f"PRAGMA busy_timeout={READERS_MILLISECONDS}")
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.DatabaseError as error:
            log.warning("the write-ahead log of %s was not emptied behind a deletion: %s", self.place, error)
        finally:
            cursor.execute(f"PRAGMA busy_timeout={BUSY_MILLISECONDS}")
            cursor.close()
            connection.close()

    def cut(self) -> None:
        """Nothing to close: no wait is longer than ``busy_timeout``."""


def _engine(path: Path, begin: str, pool_size: int, cache_kib: int = READERS_CACHE_KIB) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}", pool_size=pool_size, max_overflow=0 if pool_size == 1 else 64, hide_parameters=True
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: object) -> None:
        # The driver must not open transactions by itself: BEGIN is ours, below.
        connection.isolation_level = None
        cursor = connection.cursor()
        pragmas = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_MILLISECONDS}")
        # Updates and keys of noise are rows: what is deleted is written over, and not left in a free page.
        for pragma in (*pragmas, "secure_delete=ON", f"cache_size=-{cache_kib}"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def open_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
