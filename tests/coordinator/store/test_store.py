"""The store: migrations, transactions, blobs."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.blobs import Blobs, DamagedBlob
from promptfed.coordinator.store.database import Database, SQLite
from promptfed.coordinator.store.opening import FolderInUse, FolderLock, open_store
from promptfed.coordinator.store.tables import Base, StateRow, TokenRow


@pytest.fixture
def database(tmp_path: Path) -> Database:
    found = Database(SQLite(tmp_path / "db.sqlite3"))
    found.migrate()
    return found


def test_the_migrations_make_the_tables_of_the_code(database: Database) -> None:
    with database.read() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    database.migrate()


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
    [unique] = [
        constraint for constraint in StateRow.__table__.constraints if type(constraint).__name__ == "UniqueConstraint"
    ]
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
