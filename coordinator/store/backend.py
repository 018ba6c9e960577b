"""What the store needs of a database system; there are two, ``sqlite`` and ``postgres``."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError


class CannotOpen(Exception):
    """The store is not to be opened as things are; the text says in one line why and what to do."""


class InUse(CannotOpen):
    """Another coordinator works on it."""


class DatabaseAway(Exception):
    """The database does not answer, or no longer gives its lock; the text says why."""


class Backend(ABC):
    """Two pools of connections: one connection that writes, and some that read the last commit."""

    place: str
    """Where the database is, without a password."""
    in_folder: bool
    """Whether it lies in the data folder, beside the blobs that it names."""
    writer: Engine
    reader: Engine
    shared: bool = False
    """Whether several coordinators work on it, each carrying out federations of its own."""

    @abstractmethod
    def check(self) -> None:
        """Refuse a database that cannot keep what we promise. Raises CannotOpen."""

    @abstractmethod
    def why_away(self, error: DBAPIError) -> str | None:
        """One line on why the database is away, or None where the error is of another kind."""

    @abstractmethod
    def is_full(self, error: DBAPIError) -> bool:
        """Whether the database's disk is full."""

    @abstractmethod
    def is_damaged(self, error: DBAPIError) -> bool:
        """Whether the database finds that what it reads is not what it wrote."""

    @abstractmethod
    def erase(self) -> None:
        """Overwrite what was deleted, as far as this is ours to do."""

    @abstractmethod
    def cut(self) -> None:
        """End every connection, also those that a thread waits on: its wait ends with an error."""


def one_line(error: object) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())
