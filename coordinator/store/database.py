"""Transactions: one writer at a time; readers see the last commit and never wait."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from promptfed.coordinator.store.backend import Backend, CannotOpen, DatabaseAway, InUse, one_line
from promptfed.coordinator.store.postgres import take_turns
from promptfed.coordinator.store.tables import Base

log = logging.getLogger("promptfed.coordinator")

MIGRATIONS = Path(__file__).parent / "migrations"
READS_OLDER = "7368013d"  # the last commit that reads the tables of releases before 0.4.0
TRY_AGAIN_SECONDS = 0.5
CLOSE_SECONDS = 1.0


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
                if self.backend.shared:
                    take_turns(connection)
                revision = _form(connection)
                if revision is None:
                    # In their newest form at once: migrations are for tables that are there already.
                    Base.metadata.create_all(connection, checkfirst=False)
                    FORM.create(connection)
                    connection.execute(insert(FORM).values(version_num=_forms()[-1]))
                elif revision != _forms()[-1]:
                    self._expect_upgradable(connection, revision)
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

    def _expect_upgradable(self, connection: Connection, found: str) -> None:
        """Refuse tables that other coordinators work on, unless they are up to date, and tables that are too old."""
        if self.backend.shared:
            seen = "SELECT count(*) FROM coordinators WHERE seen > extract(epoch FROM clock_timestamp()) - 5"
            listed = connection.exec_driver_sql("SELECT to_regclass('coordinators') IS NOT NULL").scalar()
            if listed and connection.exec_driver_sql(seen).scalar():
                raise CannotOpen(
                    f"the tables at {self.backend.place} have to be brought to this version's form, and other "
                    "coordinators work on them: stop those first"
                )
        self._expect_not_before(found)

    def _expect_not_before(self, found: str | None) -> None:
        if found is not None and found < _forms()[0]:
            raise CannotOpen(
                f"the tables at {self.backend.place} have the form {found} of promptfed before 0.4.0, which this "
                f"version does not read: start commit {READS_OLDER} on them, export each result, and continue from the "
                "exports in a new store (docs/guides/operate.md, upgrade)"
            )

    def expect_this_version(self) -> None:
        """Refuse tables of another version's form. Raises CannotOpen, DatabaseAway."""
        try:
            with self._watched(), self.backend.reader.connect() as connection:
                revision = _form(connection)
        except DBAPIError as error:
            raise CannotOpen(self.cannot_be_read(error)) from None
        self._expect_not_before(revision)
        if revision != _forms()[-1]:
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
        damaged = ": its file is damaged, put a backup back (docs/guides/operate.md, back up and restore)"
        return text_ + damaged if self.is_damaged(error) else text_

    def answers(self) -> bool:
        """Whether the store can be read. Raises SQLAlchemyError, DatabaseAway where it cannot."""
        with self.read() as session:
            return bool(session.execute(text("SELECT 1")).scalar() == 1)

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


FORM = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""The table in which alembic stores the revision of the others."""


def _forms() -> list[str]:
    """The revisions that there are migrations for, from the oldest on: their files begin with them."""
    return sorted(file.name.partition("_")[0] for file in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def _form(connection: Connection) -> str | None:
    """The revision of the tables; None where there are none."""
    if not inspect(connection).has_table(FORM.name):
        return None
    return connection.execute(select(FORM.c.version_num)).scalar()
