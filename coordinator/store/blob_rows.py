"""Small blobs as rows, and the keys of large ones in an object store.

Both are written in the transaction of the rows that name them, so that neither is without the other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import BlobRow, ObjectRow

SMALL_BYTES = 256 << 10  # up to here a blob is a row: as files, most of the time would go into making them durable
AT_ONCE = 500  # digests that one statement names
REMEMBERED_BYTES = 8 << 20


Named = Callable[[Session, list[str]], set[str]]
"""Returns those of some digests that a row refers to."""


class BlobRows:
    """The small blobs of a database, and the keys of its objects. ``Batch`` writes them."""

    def __init__(self, database: Database):
        self._database = database

    def read(self, digests: Sequence[str]) -> dict[str, bytes]:
        """The contents of the blobs that exist, by digest."""
        with self._database.read() as session:
            rows = session.connection().execute(
                select(BlobRow.digest, BlobRow.content).where(BlobRow.digest.in_(digests))
            )
            return {row.digest: row.content for row in rows}

    def keys(self, digests: Sequence[str]) -> dict[str, str]:
        """The keys of the blobs that are objects, by digest."""
        with self._database.read() as session:
            query = select(ObjectRow.digest, ObjectRow.key).where(ObjectRow.digest.in_(digests))
            return {row.digest: row.key for row in session.execute(query)}

    def all(self) -> list[str]:
        """Digests of all rows and objects."""
        with self._database.read() as session:
            return [*session.scalars(select(BlobRow.digest)), *session.scalars(select(ObjectRow.digest))]

    def all_keys(self) -> set[str]:
        """The keys of all objects."""
        with self._database.read() as session:
            return set(session.scalars(select(ObjectRow.key)))

    def remove(self, digests: Iterable[str], named: Named | None = None) -> tuple[list[str], list[str]]:
        """Remove blobs; returns the removed digests, and the keys of objects that are no longer used.

        named: keeps the digests that it returns. Other coordinators may refer to a digest before or after this
        transaction, and wait for it.
        """
        wanted = sorted(digests)
        gone: list[str] = []
        keys: list[str] = []
        for begin in range(0, len(wanted), AT_ONCE):
            some = wanted[begin : begin + AT_ONCE]
            with self._database.write() as session:
                if named is not None:
                    for column in (BlobRow.digest, ObjectRow.digest):
                        session.execute(select(column).where(column.in_(some)).order_by(column).with_for_update())
                    still = named(session, some)
                    some = [digest for digest in some if digest not in still]
                keys += session.scalars(select(ObjectRow.key).where(ObjectRow.digest.in_(some))).all()
                session.execute(delete(BlobRow).where(BlobRow.digest.in_(some)))
                session.execute(delete(ObjectRow).where(ObjectRow.digest.in_(some)))
            gone += some
        return gone, keys


class Remembered:
    """The contents that were read last, up to ``most`` bytes: most clients of a phase get the same payload."""

    def __init__(self, most: int = REMEMBERED_BYTES):
        self._most = most
        self._lock = threading.Lock()
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, digest: str) -> bytes | None:
        """The content, if it is cached."""
        with self._lock:
            content = self._contents.get(digest)
            if content is not None:
                self._contents.move_to_end(digest)
            return content

    def add(self, digest: str, content: bytes) -> None:
        """Cache the content, and drop the least recently used ones."""
        with self._lock:
            if digest in self._contents or len(content) > self._most:
                return
            self._contents[digest] = content
            self._bytes += len(content)
            while self._bytes > self._most:
                self._bytes -= len(self._contents.popitem(last=False)[1])

    def forget(self, digests: Iterable[str]) -> None:
        """Forget these."""
        with self._lock:
            for digest in digests:
                self._bytes -= len(self._contents.pop(digest, b""))
