"""PostgreSQL. The writing connection also holds the lock, so nothing is written without it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sqlalchemy import Connection as SQLConnection
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from promptfed.coordinator.store.backend import Backend, CannotOpen, InUse, one_line

if TYPE_CHECKING:
    from psycopg import Connection

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
LOCK = "SELECT pg_try_advisory_lock(hashtextextended('promptfed coordinator ' || coalesce(current_schema(), ''), 0))"
SHARED_LOCK = LOCK.replace("pg_try_advisory_lock(", "pg_try_advisory_lock_shared(")
# Who stops in the middle of a transaction keeps others from nothing for longer.
OF_SEVERAL = ("idle_in_transaction_session_timeout = 5000",)
READERS = 8


class PostgreSQL(Backend):
    """One database (or schema) of a server, for one coordinator, or for several (``shared``).

    An advisory lock of the session excludes other coordinators, or with ``shared`` those that work alone. The writing
    connection takes it when it is made, and it ends with that connection. ``leases`` is for the leases of several
    coordinators; ``writing`` is the server's process id of the writing session.
    """

    in_folder = False

    def __init__(self, url: str, shared: bool = False):
        """Does not connect yet. Raises CannotOpen."""
        self.shared = shared
        self.writing: int | None = None
        try:
            import psycopg
        except ImportError:
            raise CannotOpen("PostgreSQL needs its driver: pip install 'promptfed[postgres]'") from None
        self._driver = psycopg
        self._open: WeakSet[Connection[Any]] = WeakSet()
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
        self.leases = create_engine(parsed, pool_size=2, pool_pre_ping=True, hide_parameters=True)
        self._on_connect(self.writer, self._prepare_writer)
        self._on_connect(self.reader, self._prepare_reader)

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
        def connect(dialect: Any, _record: object, arguments: Any, options: Any) -> Connection[Any]:
            connection: Connection[Any] = dialect.connect(*arguments, **options)
            try:
                self._open.add(connection)
                prepare(connection)
            except BaseException:
                connection.close()
                raise
            return connection

    def _prepare_writer(self, connection: Connection[Any]) -> None:
        connection.autocommit = True
        locked = connection.execute(SHARED_LOCK if self.shared else LOCK).fetchone()
        if locked != (True,):
            raise InUse(f"another coordinator works on the database at {self.place}: stop it, or give another database")
        self.writing = connection.info.backend_pid
        for setting in (*SESSION, *(OF_SEVERAL if self.shared else ())):
            connection.execute(f"SET {setting}".encode())
        # Every value but this one waits for the server's own disk.
        if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):
            connection.execute("SET synchronous_commit = on")
        connection.autocommit = False

    def _prepare_reader(self, connection: Connection[Any]) -> None:
        # As SQLite's readers: all statements of a transaction see one commit.
        connection.isolation_level = self._driver.IsolationLevel.REPEATABLE_READ
        connection.read_only = True


def take_turns(connection: SQLConnection) -> None:
    """Exclude other coordinators from starting until this transaction ends."""
    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtextextended('promptfed start', 0))")


def chain_audit_log(connection: SQLConnection) -> None:
    """Exclude other coordinators from the audit log, whose entries are numbered, until this transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtextextended('promptfed audit log', 0))")


@contextmanager
def together(connection: SQLConnection) -> Iterator[None]:
    """A block whose statements PostgreSQL receives without waiting for each (pipeline mode); results are not available.

    Raises DBAPIError at the end of the block for a statement that fails.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    import psycopg

    driver: Connection[Any] = connection.connection.driver_connection  # type: ignore[assignment]
    try:
        with driver.pipeline():
            yield
    except psycopg.Error as error:
        about = "statements sent together"
        raise DBAPIError.instance(about, None, error, psycopg.Error, hide_parameters=True) from error
