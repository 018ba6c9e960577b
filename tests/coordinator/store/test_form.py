"""The tables' form: new stores have the newest one, later migrations run on stores of 0.4.0, older ones are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from promptfed.coordinator.store import form as form_module
from promptfed.coordinator.store.backend import CannotOpen
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.form import expect_this_version, migrate
from promptfed.coordinator.store.postgres import PostgreSQL
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.coordinator.store.tables import Base


@pytest.fixture
def database(tmp_path: Path) -> Database:
    found = Database(SQLite(tmp_path / "db.sqlite3"))
    migrate(found)
    return found


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
        shutil.copytree(form_module.MIGRATIONS, folder)
        (folder / "versions" / "0029_later.py").write_text(LATER)
        monkeypatch.setattr(form_module, "MIGRATIONS", folder)

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
    migrate(empty)
    assert form(empty) == "0028"
    assert differences(empty) == []
    if isinstance(empty.backend, PostgreSQL):
        assert uncompressed_columns(empty) == ["content"]
    migrate(empty)
    expect_this_version(empty)


@pytest.mark.parametrize("old", ["0001", "0017", "0025"])
def test_an_older_store_is_refused_and_told_what_reads_it(empty: Database, old: str) -> None:
    migrate(empty)
    with empty.write() as session:
        session.execute(text(f"UPDATE alembic_version SET version_num = '{old}'"))
    for refuse in (migrate, expect_this_version):
        with pytest.raises(CannotOpen) as refused:
            refuse(empty)
        told = str(refused.value)
        assert f"have the form {old} of promptfed before 0.4.0" in told
        assert "start commit 7368013d on them, export each result, and continue from the exports" in told
        assert "\n" not in told
    assert form(empty) == old


def test_a_later_migration_runs_on_stores_of_before(empty: Database, add_0029: Callable[[], None]) -> None:
    migrate(empty)
    add_0029()
    with pytest.raises(CannotOpen, match="have the form 0028 instead of 0029"):
        expect_this_version(empty)
    migrate(empty)
    assert (form(empty), has_table_of_0029(empty)) == ("0029", True)


def test_a_later_migration_does_not_run_on_a_new_store(empty: Database, add_0029: Callable[[], None]) -> None:
    add_0029()
    migrate(empty)
    assert (form(empty), has_table_of_0029(empty)) == ("0029", False)


def test_tables_of_another_program_are_left_alone(empty: Database) -> None:
    with empty.write() as session:
        session.execute(text("CREATE TABLE clients (id INTEGER)"))
    with pytest.raises(CannotOpen, match="the tables cannot be made"):
        migrate(empty)
    with empty.read() as session:
        assert inspect(session.connection()).get_table_names() == ["clients"]


def test_a_store_of_a_later_version_is_refused(empty: Database) -> None:
    migrate(empty)
    with empty.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '0999'"))
    with pytest.raises(CannotOpen, match=r"was made by another version: .*: install the version that made it"):
        migrate(empty)
    with pytest.raises(CannotOpen, match="have the form 0999 instead of 0028"):
        expect_this_version(empty)


def test_no_tables_are_waited_for_where_they_may_be_made_yet(empty: Database) -> None:
    with pytest.raises(CannotOpen, match="have the form None instead of 0028"):
        expect_this_version(empty)
    expect_this_version(empty, or_none=True)
    migrate(empty)
    expect_this_version(empty, or_none=True)
    with empty.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '0027'"))
    with pytest.raises(CannotOpen, match="have the form 0027 instead of 0028"):
        expect_this_version(empty, or_none=True)


def test_damaged_tables_are_said_to_be_damaged(database: Database, tmp_path: Path) -> None:
    database.close()
    path = tmp_path / "db.sqlite3"
    content = path.read_bytes()
    for damaged in (b"\xff" * len(content), content[:100] + b"\xff" * (len(content) - 100)):
        path.write_bytes(damaged)
        found = Database(SQLite(path))
        for refuse in (migrate, expect_this_version):
            with pytest.raises(CannotOpen, match="its file is damaged, put a backup back"):
                refuse(found)
        found.close()


def test_the_oldest_form_that_has_a_migration_is_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_module, "_revisions", lambda: ["0026", "0027"])
    for revision in (None, "0026", "0027", "0028"):
        form_module._expect_not_before(revision, "here")
    with pytest.raises(CannotOpen, match="the form 0025"):
        form_module._expect_not_before("0025", "here")


def test_migrations_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_module, "MIGRATIONS", tmp_path)
    (tmp_path / "versions").mkdir()
    names = [f"{number:04}" for number in (31, 28, 40, 26, 35, 27, 33, 29, 38, 30)]
    for name in names:
        (tmp_path / "versions" / f"{name}_x_y.py").touch()
    (tmp_path / "versions" / "__init__.py").touch()
    assert form_module._revisions() == sorted(names)
