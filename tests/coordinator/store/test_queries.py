"""Rows that wait together: what is written of them, what a second write does, and what replaces what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.dialects import sqlite

from promptfed.coordinator.store import queries
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.form import migrate
from promptfed.coordinator.store.queries import Batch
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.coordinator.store.tables import BlobRow, ObjectRow


@pytest.fixture
def database(tmp_path: Path) -> Database:
    found = Database(SQLite(tmp_path / "db.sqlite3"))
    migrate(found)
    return found


def stored(database: Database, *columns: Any) -> list[tuple[Any, ...]]:
    with database.read() as session:
        return sorted(tuple(row) for row in session.execute(select(*columns)))


def test_a_newer_object_replaces_the_key_of_the_earlier_one_which_is_told(database: Database) -> None:
    for keys, superseded in (({"d1": "k1", "d2": "k2"}, []), ({}, []), ({"d2": "k3", "d3": "k4"}, ["k2"])):
        batch = Batch()
        batch.objects.update(keys)
        with database.write() as session:
            batch.write(session)
            batch.write(session)
        assert (batch.superseded, batch.objects) == (superseded, {}), "once"
    assert stored(database, ObjectRow.digest, ObjectRow.key) == [("d1", "k1"), ("d2", "k3"), ("d3", "k4")]


def test_damaged_bytes_are_mended_by_whole_ones(database: Database) -> None:
    for blobs in ({"d1": b"damaged", "d2": b"b"}, {"d1": b"a", "d2": b"b", "d3": b"c"}):
        batch = Batch()
        batch.blobs.update(blobs)
        with database.write() as session:
            batch.write(session)
        assert batch.blobs == {}
    assert stored(database, BlobRow.digest, BlobRow.content) == [("d1", b"a"), ("d2", b"b"), ("d3", b"c")]
    text = str(queries._keep_blobs(sqlite.insert).compile(dialect=sqlite.dialect()))
    assert (
        "ON CONFLICT (digest) DO UPDATE SET content = excluded.content WHERE blobs.content != excluded.content" in text
    )
    text = str(queries._keep_objects(sqlite.insert).compile(dialect=sqlite.dialect()))
    assert text.endswith('ON CONFLICT (digest) DO UPDATE SET "key" = excluded."key"')
    assert "WHERE blobs.digest = ?" in str(queries._updated(BlobRow, BlobRow.digest).compile(dialect=sqlite.dialect()))


def test_a_payload_of_a_task_that_waits_is_written_with_it() -> None:
    batch = Batch()
    batch.tasks["new"] = {"id": "new", "payload_sha256": None}
    batch.serve({"new": ("sha256:0", 5), "old": ("sha256:1", 6)})
    served = {"payload_sha256": "sha256:1", "payload_bytes": 6, "payload_stored": True}
    assert batch.tasks == {"new": {"id": "new", **served, "payload_sha256": "sha256:0", "payload_bytes": 5}}
    assert batch._served == [{"key": "old", **served}]
    batch.count({"new": 0.5, "old": None})
    weighed = [{"key": "new", "counted": True, "weight": 0.5}, {"key": "old", "counted": True, "weight": None}]
    assert batch._counted == weighed
