"""What a database does, on SQLite and PostgreSQL alike, and its errors."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError


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
