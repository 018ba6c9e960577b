"""PostgreSQL: the lock of the coordinator that works, the row that says who that is, and statements sent together."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from promptfed.coordinator.store.backend import Backend, CannotOpen, InUse, one_line
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
        parameters = {"holder": self._holder, "address": self.address, **values}
        with self.signs.connect() as connection:
            row = connection.exec_driver_sql(statement, parameters if "%(" in statement else None).first()
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
