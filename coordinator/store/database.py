"""Transactions on SQLite or PostgreSQL: one writer at a time; readers see the last commit and never wait."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from promptfed.coordinator.store.backend import Backend, CannotOpen, DatabaseAway, InUse, one_line

log = logging.getLogger("promptfed.coordinator")

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

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A transaction that may change the tables themselves. Raises DatabaseAway."""
        with self._turn, self._watched(), self.backend.writer.begin() as connection:
            yield connection

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
