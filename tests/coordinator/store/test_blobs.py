"""Blobs lie under their digest, durably, for as long as somebody holds or names them."""

from __future__ import annotations

import errno
import hashlib
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sqlalchemy import text

from promptfed.coordinator.store import blob_rows, blobs, sqlite, stored_tensors
from promptfed.coordinator.store.blob_rows import BlobRows
from promptfed.coordinator.store.blobs import Blobs, DamagedBlob
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.form import migrate
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.coordinator.store.tables import BlobRow, ObjectRow
from promptfed.shared.tensors import encode
from promptfed.testing.clients import update_body
from tests.support.coordinators import InProcess
from tests.support.durable import Second, synced_by
from tests.support.open_phases import open_first_phase


def test_blobs_lie_under_their_digest_and_are_kept_while_held(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)

    class Counts(Counter[str]):
        def __setitem__(self, digest: str, count: int) -> None:
            assert blobs._lock.locked()
            super().__setitem__(digest, count)

    blobs._held = Counts()
    blobs.open()
    with blobs.hold() as held:
        digest = held.put(b"abc")
        assert digest == "sha256:" + hashlib.sha256(b"abc").hexdigest()
        assert held.put(b"abc") == digest
        assert blobs.read(digest) == b"abc"
        assert blobs.all() == [digest]
        assert blobs.remove([digest]) == [], "someone is about to commit a row that names it"
    with blobs.hold() as held:
        held.put(b"abc")
        with blobs.hold() as other:
            other.put(b"abc")
        assert blobs.remove([digest]) == [], "one of two holds it"
    assert not blobs._held
    assert blobs.remove([digest]) == [digest]
    assert blobs.all() == []
    with pytest.raises(DamagedBlob, match="is missing"):
        blobs.read(digest)


def test_a_blob_is_synced_before_its_rename_and_its_folders_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blobs_are_files: None
) -> None:
    store = Blobs(tmp_path)
    store.open()
    monkeypatch.setattr(store, "temporary", lambda: store.incoming / "t")
    name = hashlib.sha256(b"abc").hexdigest()
    folder, above = f"blobs/{name[:2]}", store.path(f"sha256:{name}").parents[1]

    def put(content: bytes) -> None:
        with store.hold() as held:
            held.put(content)

    renamed = [("sync", "incoming/t"), ("rename", f"{folder}/{name}")]
    assert synced_by(monkeypatch, above, lambda: put(b"abc")) == [
        *renamed, ("sync", "blobs"), ("sync", folder),
    ]  # fmt: skip
    assert synced_by(monkeypatch, above, lambda: put(b"abc")) == [], "it is there"
    store.remove([f"sha256:{name}"])
    with monkeypatch.context() as patch:
        patch.setattr(blobs, "sync_folder", lambda folder: (_ for _ in ()).throw(OSError("no power")))
        with pytest.raises(OSError, match="no power"):
            put(b"abc")
    assert synced_by(monkeypatch, above, lambda: put(b"abc")) == [("sync", "blobs"), ("sync", folder)]


def test_an_update_that_was_accepted_is_on_the_disk(
    coordinator: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blobs_are_files: None
) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator)
    body = update_body({"context": torch.ones(4, 8)}, task)
    place = coordinator.registry.blobs.path(blobs.digest_of(body)).relative_to(tmp_path)
    # A folder is of a digest's first two digits: another blob may have made it.
    new = [] if (tmp_path / place).parent.exists() else [("sync", str(place.parents[1]))]
    done = synced_by(monkeypatch, tmp_path / "data", lambda: a.send(task, body))
    renamed = done.index(("rename", str(place)))
    assert done[renamed - 1][0] == "sync"
    assert done[renamed - 1][1].startswith("data/incoming/")
    assert done[renamed + 1 : renamed + 2 + len(new)] == [*new, ("sync", str(place.parent))]


def test_a_blob_that_is_about_to_be_named_is_not_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blobs_are_files: None
) -> None:
    store, unlink = Blobs(tmp_path), Path.unlink
    store.open()
    with store.hold() as held:
        digest = held.put(b"abc")

    def put_again() -> None:
        with store.hold() as held:
            held.put(b"abc")
            assert store.read(digest) == b"abc"

    second = Second(put_again)

    def removed(path: Path, missing_ok: bool = False) -> None:
        if path == store.path(digest):
            second.inside()
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", removed)
    store.remove([digest])
    assert second.end(), "it waited, and wrote the blob anew"


def test_a_file_is_read_again_once_it_was_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Blobs(tmp_path)
    store.open()
    read: list[Path] = []
    digest_of_file = blobs.digest_of_file
    monkeypatch.setattr(blobs, "digest_of_file", lambda path: read.append(path) or digest_of_file(path))
    with store.hold() as held:
        digest = held.put(b"abc")
    assert [store.read(digest), store.read(digest)] == [b"abc", b"abc"]
    assert not read, "nobody has written to it since it was kept"
    again = Blobs(tmp_path)
    assert [again.read(digest), again.read(digest)] == [b"abc", b"abc"]
    assert len(read) == 1, "what another process wrote is read once"
    path, before = store.path(digest), store.path(digest).stat().st_mtime_ns
    path.write_bytes(b"abd")
    os.utime(path, ns=(before + 1, before + 1))  # clocks of file systems tick every few milliseconds
    for one in (store, again):
        for _ in range(2):
            with pytest.raises(DamagedBlob, match="has changed"):
                one.read(digest)


def test_updates_wait_in_memory_within_a_bound_and_not_beyond_their_removal(tmp_path: Path) -> None:
    store = Blobs(tmp_path)
    store.open()
    with store.hold() as held:
        first = held.put(b"an update")
    store.admitted.add(first, ({}, 1.0), 9)
    assert store.admitted.get(first) == ({}, 1.0)
    store.remove([first])
    assert store.admitted.get(first) is None
    for number in range(3):
        store.admitted.add(f"sha256:{number}", ({}, float(number)), blobs.ADMITTED_BYTES // 2)
    assert [store.admitted.get(f"sha256:{number}") for number in range(3)] == [None, ({}, 1.0), ({}, 2.0)]


def test_what_cut_off_uploads_left_is_removed_at_the_start(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    blobs.open()
    blobs.temporary().write_bytes(b"half")
    blobs.open()
    assert list(blobs.incoming.iterdir()) == []


def test_a_file_that_cannot_be_looked_at_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert blobs._version(tmp_path) is not None
    for number in blobs.UNREADABLE:
        monkeypatch.setattr(Path, "stat", Mock(side_effect=OSError(number, "no")))
        assert blobs._version(tmp_path) is None
    monkeypatch.setattr(Path, "stat", Mock(side_effect=OSError(errno.EMFILE, "too many")))
    with pytest.raises(OSError, match="too many"):
        blobs._version(tmp_path)


def test_rows_and_objects_go_together_and_out_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database, log = Database(SQLite(tmp_path / "db")), tmp_path / "db-wal"
    migrate(database)
    with database.write() as session:
        session.add_all(ObjectRow(digest=f"sha256:{number}", key=f"k{number}") for number in range(4))
        session.add(BlobRow(digest="sha256:9", content=b"small"))
    monkeypatch.setattr(blob_rows, "AT_ONCE", 2)
    rows = BlobRows(database)
    assert sorted(rows.remove(["sha256:3", "sha256:0", "sha256:2", "sha256:9"])) == ["k0", "k2", "k3"]
    assert (rows.all_keys(), rows.all()) == ({"k1"}, ["sha256:1"])
    assert log.stat().st_size > 0
    database.backend.erase()
    assert log.stat().st_size == 0
    with database.write() as session:
        assert session.scalar(text("PRAGMA busy_timeout")) == sqlite.BUSY_MILLISECONDS
    database.close()


TENSORS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(2, np.float32)}


@pytest.mark.parametrize(("large", "waits"), [(33, True), (32, False)])
def test_large_tensors_are_files_at_once_and_small_ones_wait(
    large: int, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes either way, of 32 bytes of numbers."""
    monkeypatch.setattr(stored_tensors, "LARGE", large)
    rows: Any = SimpleNamespace()  # which hold small ones, once they are written
    store = Blobs(tmp_path, rows)
    store.open()
    content = encode(TENSORS)
    with store.hold() as held:
        stored = stored_tensors.put_tensors(store, held, TENSORS)
        assert stored == stored_tensors.Stored(blobs.digest_of(content), len(content))
        assert stored_tensors.put_tensors(store, held, TENSORS) == stored, "it may be there already"
        assert held.small == ({stored.digest: content} if waits else {})
        assert store.files() == ([] if waits else [stored.digest])
    assert list(store.incoming.iterdir()) == []
    assert waits or store.path(stored.digest).read_bytes() == content
    monkeypatch.setattr(stored_tensors, "encode_file", lambda tensors, place: place.write_bytes(b"x") / 0)
    if not waits:
        with pytest.raises(ZeroDivisionError), store.hold() as held:
            stored_tensors.put_tensors(store, held, TENSORS)
        assert list(store.incoming.iterdir()) == [], "what was begun is removed"


def test_tensors_in_files_last_as_long_as_whoever_has_them(tmp_path: Path) -> None:
    store = Blobs(tmp_path)
    store.open()
    with stored_tensors.room(store) as allocate:
        first, empty, other = (allocate(shape, dtype=np.float64) for shape in ((2, 3), (0, 3), (4,)))
        first[:], other[:] = 1.0, 2.0
        files = list(store.incoming.iterdir())
        assert sorted(file.stat().st_size for file in files) == [32, 48], "what is empty needs no file"
        files[0].unlink()  # as if somebody had swept them
    assert list(store.incoming.iterdir()) == []
    assert (first.sum(), other.sum(), empty.shape) == (6.0, 8.0, (0, 3))
