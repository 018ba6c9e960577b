"""SQLite: a file in the data folder, with the settings that make commits durable."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

from promptfed.coordinator.store.backend import Backend

log = logging.getLogger("promptfed.coordinator")
BUSY_MILLISECONDS = 10_000
READERS_MILLISECONDS = 500  # of waiting for readers of an older commit, while nobody writes
# At most, of pages: of a long federation's indexes it uses many more than of a short one's.
WRITERS_CACHE_KIB = 16 << 10
READERS_CACHE_KIB = 2000  # of each reading connection: SQLite's own default


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
