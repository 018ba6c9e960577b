"""Transactions."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.form import migrate
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.coordinator.store.tables import StateRow, TokenRow


@pytest.fixture
def database(tmp_path: Path) -> Database:
    found = Database(SQLite(tmp_path / "db.sqlite3"))
    migrate(found)
    return found


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
