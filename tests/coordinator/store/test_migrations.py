"""The tables' form: new stores have the newest one, later migrations run on stores of 0.4.0, older ones are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from promptfed.coordinator.store import database as module
from promptfed.coordinator.store.database import Backend, CannotOpen, Database, PostgreSQL, SQLite
from promptfed.coordinator.store.tables import Base
from tests.support.postgres import PostgresServer

LATER = '''"""A later form"""
from alembic import op
revision = "0027"
down_revision = "0026"
def upgrade() -> None:
    op.execute("CREATE TABLE made_by_0027 (id INTEGER)")
'''
Make = Callable[[], Backend]


@pytest.fixture(params=["sqlite", "postgresql"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes an empty database."""

    def of_postgresql() -> Backend:
        server: PostgresServer = request.getfixturevalue("postgres")
        return PostgreSQL(server.database())

    return (lambda: SQLite(tmp_path / "db.sqlite3")) if request.param == "sqlite" else of_postgresql


@pytest.fixture
def add_0027(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the product what it will be with one migration more."""

    def add() -> None:
        folder = tmp_path / "migrations"
        shutil.copytree(module.MIGRATIONS, folder)
        (folder / "versions" / "0027_later.py").write_text(LATER)
        monkeypatch.setattr(module, "MIGRATIONS", folder)

    return add


def form(database: Database) -> object:
    with database.read() as session:
        return session.execute(text("SELECT version_num FROM alembic_version")).scalar()


def differences(database: Database) -> list[object]:
    with database.read() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))


def has_table_of_0027(database: Database) -> bool:
    with database.read() as session:
        return inspect(session.connection()).has_table("made_by_0027")


def uncompressed_columns(database: Database) -> list[str]:
    query = "SELECT attname FROM pg_attribute WHERE attrelid = 'blobs'::regclass AND attstorage = 'e' AND attnum > 0"
    with database.read() as session:
        return list(session.execute(text(query)).scalars())


def test_a_new_store_has_the_newest_form(make: Make) -> None:
    database = Database(make())
    database.migrate()
    assert form(database) == "0026"
    assert differences(database) == []
    if isinstance(database.backend, PostgreSQL):
        assert uncompressed_columns(database) == ["content"]
    database.migrate()
    database.expect_this_version()
    database.close()


@pytest.mark.parametrize("old", ["0001", "0017", "0025"])
def test_an_older_store_is_refused_and_told_what_reads_it(make: Make, old: str) -> None:
    database = Database(make())
    database.migrate()
    with database.write() as session:
        session.execute(text(f"UPDATE alembic_version SET version_num = '{old}'"))
    for refuse in (database.migrate, database.expect_this_version):
        with pytest.raises(CannotOpen) as refused:
            refuse()
        told = str(refused.value)
        assert f"have the form {old} of promptfed before 0.4.0" in told
        assert "start commit 7368013d on them, export each result, and continue from the exports" in told
        assert "\n" not in told
    assert form(database) == old
    database.close()


def test_a_later_migration_runs_on_stores_of_before(make: Make, add_0027: Callable[[], None]) -> None:
    database = Database(make())
    database.migrate()
    add_0027()
    with pytest.raises(CannotOpen, match="have the form 0026 instead of 0027"):
        database.expect_this_version()
    database.migrate()
    assert (form(database), has_table_of_0027(database)) == ("0027", True)
    database.close()


def test_a_later_migration_does_not_run_on_a_new_store(make: Make, add_0027: Callable[[], None]) -> None:
    add_0027()
    database = Database(make())
    database.migrate()
    assert (form(database), has_table_of_0027(database)) == ("0027", False)
    database.close()


def test_tables_of_another_program_are_left_alone(make: Make) -> None:
    database = Database(make())
    with database.write() as session:
        session.execute(text("CREATE TABLE clients (id INTEGER)"))
    with pytest.raises(CannotOpen, match="the tables cannot be made"):
        database.migrate()
    with database.read() as session:
        assert inspect(session.connection()).get_table_names() == ["clients"]
    database.close()
