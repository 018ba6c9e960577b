"""The store: migrations, transactions, blobs."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text
from sqlalchemy.exc import IntegrityError

from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store import blobs
from promptfed.coordinator.store import database as module
from promptfed.coordinator.store.blobs import Blobs, DamagedBlob
from promptfed.coordinator.store.database import CannotOpen, Database, PostgreSQL, SQLite
from promptfed.coordinator.store.opening import FolderInUse, FolderLock, Writable, open_store
from promptfed.coordinator.store.tables import Base, StateRow, TokenRow
from promptfed.testing.clients import update_body
from tests.support.coordinators import InProcess, in_process
from tests.support.durable import Second, synced_by
from tests.support.open_phases import open_first_phase


@pytest.fixture
def database(tmp_path: Path) -> Database:
    found = Database(SQLite(tmp_path / "db.sqlite3"))
    found.migrate()
    return found


@pytest.fixture
def own(tmp_path: Path) -> Iterator[InProcess]:
    with in_process(tmp_path / "data") as server:
        yield server


def test_every_commit_is_on_the_disk_before_it_is_answered(database: Database) -> None:
    with database.write() as session:
        pragmas = [session.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous")]
        assert pragmas == ["wal", 2]
        assert session.execute(text("PRAGMA foreign_keys")).scalar() == 1


def test_a_transaction_that_raises_leaves_nothing(database: Database) -> None:
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(TokenRow(digest="x", federation_id="nobody", created_at="", expires_at=""))
    with database.read() as session:
        assert session.query(TokenRow).count() == 0


def test_readers_do_not_wait_for_a_writer(database: Database) -> None:
    with database.write() as writer:
        writer.execute(text("DELETE FROM events"))
        with database.read() as reader:
            assert reader.execute(text("SELECT count(*) FROM events")).scalar() == 0


def test_the_database_itself_refuses_a_second_aggregate_of_a_phase() -> None:
    [unique] = [one for one in StateRow.__table__.constraints if type(one).__name__ == "UniqueConstraint"]
    assert [column.name for column in unique.columns] == ["phase_id"]


def test_blobs_lie_under_their_digest_and_are_kept_while_held(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    blobs.open()
    with blobs.hold() as held:
        digest = held.put(b"abc")
        assert digest == "sha256:" + hashlib.sha256(b"abc").hexdigest()
        assert held.put(b"abc") == digest
        assert blobs.read(digest) == b"abc"
        assert blobs.all() == [digest]
        assert blobs.remove([digest]) == [], "someone is about to commit a row that names it"
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
    assert synced_by(monkeypatch, above, lambda: put(b"abc")) == [
        ("sync", "blobs"),
        ("sync", folder),
    ]


def test_an_update_that_was_accepted_is_on_the_disk(
    own: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blobs_are_files: None
) -> None:
    _, (a, _), (task, _) = open_first_phase(own)
    body = update_body({"context": torch.ones(4, 8)}, task)
    place = own.registry.blobs.path(blobs.digest_of(body)).relative_to(tmp_path)
    done = synced_by(monkeypatch, tmp_path / "data", lambda: a.send(task, body))
    renamed = done.index(("rename", str(place)))
    assert done[renamed - 1][0] == "sync"
    assert done[renamed - 1][1].startswith("data/incoming/")
    assert done[renamed + 1 : renamed + 3] == [("sync", str(place.parents[1])), ("sync", str(place.parent))]


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


def test_whether_the_disk_has_room_is_tried_with_bytes(own: InProcess) -> None:
    most, unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    probe = Writable(own.registry.database, own.registry.blobs)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, unlimited))
    try:
        with pytest.raises(OSError, match="File too large"):
            probe._write_a_file()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, unlimited))
    assert list(own.registry.blobs.incoming.iterdir()) == []
    assert probe.why_not() is None


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


def test_one_lock_per_folder(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    with pytest.raises(FolderInUse, match="another coordinator"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_the_data_folder_is_for_its_owner_alone_also_where_it_was_there_before(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(mode)
    open_store(Settings(data_dir=folder)).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    new = tmp_path / "new"
    open_store(Settings(data_dir=new)).close()
    assert stat.S_IMODE(new.stat().st_mode) == 0o700


# The tables' form: new stores have the newest one, later migrations run on stores of 0.4.0, older ones are refused.


LATER = '''"""A later form"""
from alembic import op
revision = "0029"
down_revision = "0028"
def upgrade() -> None:
    op.execute("CREATE TABLE made_by_0029 (id INTEGER)")
'''


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database without tables."""
    if request.param == "sqlite":
        made = Database(SQLite(tmp_path / "db.sqlite3"))
    else:
        made = Database(PostgreSQL(request.getfixturevalue("postgres").database()))
    yield made
    made.close()


@pytest.fixture
def add_0029(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the product what it will be with one migration more."""

    def add() -> None:
        folder = tmp_path / "migrations"
        shutil.copytree(module.MIGRATIONS, folder)
        (folder / "versions" / "0029_later.py").write_text(LATER)
        monkeypatch.setattr(module, "MIGRATIONS", folder)

    return add


def form(database: Database) -> object:
    with database.read() as session:
        return session.execute(text("SELECT version_num FROM alembic_version")).scalar()


def differences(database: Database) -> list[object]:
    with database.read() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))


def has_table_of_0029(database: Database) -> bool:
    with database.read() as session:
        return inspect(session.connection()).has_table("made_by_0029")


def uncompressed_columns(database: Database) -> list[str]:
    query = "SELECT attname FROM pg_attribute WHERE attrelid = 'blobs'::regclass AND attstorage = 'e' AND attnum > 0"
    with database.read() as session:
        return list(session.execute(text(query)).scalars())


def test_a_new_store_has_the_newest_form(empty: Database) -> None:
    empty.migrate()
    assert form(empty) == "0028"
    assert differences(empty) == []
    if isinstance(empty.backend, PostgreSQL):
        assert uncompressed_columns(empty) == ["content"]
    empty.migrate()
    empty.expect_this_version()


@pytest.mark.parametrize("old", ["0001", "0017", "0025"])
def test_an_older_store_is_refused_and_told_what_reads_it(empty: Database, old: str) -> None:
    empty.migrate()
    with empty.write() as session:
        session.execute(text(f"UPDATE alembic_version SET version_num = '{old}'"))
    for refuse in (empty.migrate, empty.expect_this_version):
        with pytest.raises(CannotOpen) as refused:
            refuse()
        told = str(refused.value)
        assert f"have the form {old} of promptfed before 0.4.0" in told
        assert "start commit 7368013d on them, export each result, and continue from the exports" in told
        assert "\n" not in told
    assert form(empty) == old


def test_a_later_migration_runs_on_stores_of_before(empty: Database, add_0029: Callable[[], None]) -> None:
    empty.migrate()
    add_0029()
    with pytest.raises(CannotOpen, match="have the form 0028 instead of 0029"):
        empty.expect_this_version()
    empty.migrate()
    assert (form(empty), has_table_of_0029(empty)) == ("0029", True)


def test_a_later_migration_does_not_run_on_a_new_store(empty: Database, add_0029: Callable[[], None]) -> None:
    add_0029()
    empty.migrate()
    assert (form(empty), has_table_of_0029(empty)) == ("0029", False)


def test_tables_of_another_program_are_left_alone(empty: Database) -> None:
    with empty.write() as session:
        session.execute(text("CREATE TABLE clients (id INTEGER)"))
    with pytest.raises(CannotOpen, match="the tables cannot be made"):
        empty.migrate()
    with empty.read() as session:
        assert inspect(session.connection()).get_table_names() == ["clients"]
