"""The database: SQLite in WAL mode, every commit on the disk before it is answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.orm import Session

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_MILLISECONDS = 10_000


class Database:
    """Transactions on one file. Writers take turns; readers see the last commit and wait for nobody."""

    def __init__(self, path: Path):
        self._writer = _engine(path, "BEGIN IMMEDIATE", pool_size=1)
        self._reader = _engine(path, "BEGIN", pool_size=16)
        self._turn = threading.Lock()

    def migrate(self) -> None:
        """Bring the tables to this version's form."""
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        with self._writer.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that is committed at the end of the block, or rolled back where it raises."""
        with self._turn, Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that only reads."""
        with Session(self._reader) as session, session.begin():
            yield session

    def answers(self) -> bool:
        """Whether the store can be read. Raises SQLAlchemyError where it cannot."""
        with self._reader.connect() as connection:
            return bool(connection.execute(text("SELECT 1")).scalar() == 1)

    def close(self) -> None:
        """Let the files go."""
        self._reader.dispose()
        self._writer.dispose()


def _engine(path: Path, begin: str, pool_size: int) -> Engine:
    engine = create_engine(f"sqlite:///{path}", pool_size=pool_size, max_overflow=0 if pool_size == 1 else 64)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: object) -> None:
        # The driver must not open transactions by itself: BEGIN is ours, below.
        connection.isolation_level = None
        cursor = connection.cursor()
        pragmas = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_MILLISECONDS}")
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def open_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
