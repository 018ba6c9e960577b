"""Blobs as rows: small ones with their content, objects with their key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import delete, select

from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import BlobRow, ObjectRow

AT_ONCE = 500  # digests that one statement names


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

    def remove(self, digests: Iterable[str]) -> list[str]:
        """Remove blobs; returns the keys of objects that are no longer used."""
        ordered = sorted(digests)
        keys: list[str] = []
        for begin in range(0, len(ordered), AT_ONCE):
            some = ordered[begin : begin + AT_ONCE]
            with self._database.write() as session:
                keys += session.scalars(select(ObjectRow.key).where(ObjectRow.digest.in_(some))).all()
                session.execute(delete(BlobRow).where(BlobRow.digest.in_(some)))
                session.execute(delete(ObjectRow).where(ObjectRow.digest.in_(some)))
        return keys
