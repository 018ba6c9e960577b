"""Small blobs as rows: written in the transaction of the rows that name them, so that neither is without the other."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sqlalchemy import delete, select

from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import BlobRow

SMALL_BYTES = 256 << 10  # up to here a blob is a row: as files, most of the time would go into making them durable
AT_ONCE = 500  # digests that one statement names
REMEMBERED_BYTES = 8 << 20


class BlobRows:
    """The small blobs of a database. ``Batch`` writes them."""

    def __init__(self, database: Database):
        self._database = database

    def read(self, digests: Sequence[str]) -> dict[str, bytes]:
        """The contents of those that are there."""
        with self._database.read() as session:
            found = session.connection().execute(
                select(BlobRow.digest, BlobRow.content).where(BlobRow.digest.in_(digests))
            )
            return {row.digest: row.content for row in found}

    def all(self) -> list[str]:
        """Their digests."""
        with self._database.read() as session:
            return list(session.scalars(select(BlobRow.digest)))

    def remove(self, digests: Iterable[str]) -> None:
        """Remove those of ``digests`` that there are."""
        wanted = sorted(digests)
        for begin in range(0, len(wanted), AT_ONCE):
            with self._database.write() as session:
                session.execute(delete(BlobRow).where(BlobRow.digest.in_(wanted[begin : begin + AT_ONCE])))


class Remembered:
    """Contents that were asked for last, within a bound: all clients of a phase mostly get one payload."""

    def __init__(self, most: int = REMEMBERED_BYTES):
        self._most = most
        self._lock = threading.Lock()
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, digest: str) -> bytes | None:
        """The content, if it is remembered."""
        with self._lock:
            content = self._contents.get(digest)
            if content is not None:
                self._contents.move_to_end(digest)
            return content

    def add(self, digest: str, content: bytes) -> None:
        """Remember it, and forget what was asked for longest ago."""
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
