"""The tables' form: new stores have the newest one, stores of release 0.1.0 are upgraded, older ones are refused."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from promptfed.coordinator.store import database as module
from promptfed.coordinator.store.backend import Backend, CannotOpen
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.postgres import PostgreSQL
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.coordinator.store.tables import Base
from tests.support.postgres import PostgresServer

HERE = Path(__file__).parent
LATER = '''"""A later form"""
from alembic import op
revision = "0026"
down_revision = "0025"
def upgrade() -> None:
    op.execute("CREATE TABLE made_by_0026 (id INTEGER)")
'''
Make = Callable[[str | None], Backend]


@pytest.fixture(params=["sqlite", "postgresql"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a database from a file of SQL statements, or an empty one."""

    def of_sqlite(file: str | None) -> Backend:
        if file is not None:
            with sqlite3.connect(tmp_path / "db.sqlite3") as connection:
                connection.executescript((HERE / f"{file}_sqlite.sql").read_text())
            connection.close()
        return SQLite(tmp_path / "db.sqlite3")

    def of_postgresql(file: str | None) -> Backend:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.database()
        if file is not None:
            server.execute((HERE / f"{file}_postgresql.sql").read_text(), url.rsplit("/", 1)[1])
        return PostgreSQL(url)

    return of_sqlite if request.param == "sqlite" else of_postgresql


@pytest.fixture
def with_0026(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product as it will be with one migration more."""
    folder = tmp_path / "migrations"
    shutil.copytree(module.MIGRATIONS, folder)
    (folder / "versions" / "0026_later.py").write_text(LATER)
    monkeypatch.setattr(module, "MIGRATIONS", folder)


def form(database: Database) -> object:
    with database.read() as session:
        return session.execute(text("SELECT version_num FROM alembic_version")).scalar()


def differences(database: Database) -> list[object]:
    with database.read() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))


def has_table_of_0026(database: Database) -> bool:
    with database.read() as session:
        return inspect(session.connection()).has_table("made_by_0026")


def uncompressed_columns(database: Database) -> list[str]:
    query = "SELECT attname FROM pg_attribute WHERE attrelid = 'blobs'::regclass AND attstorage = 'e' AND attnum > 0"
    with database.read() as session:
        return list(session.execute(text(query)).scalars())


def test_a_new_store_has_the_newest_form(make: Make) -> None:
    database = Database(make(None))
    database.migrate()
    assert form(database) == "0025"
    assert differences(database) == []
    if isinstance(database.backend, PostgreSQL):
        assert uncompressed_columns(database) == ["content"]
    database.migrate()
    database.expect_this_version()
    database.close()


def test_a_store_of_the_seventeen_migrations_is_upgraded(make: Make) -> None:
    database = Database(make("form_0017"))
    database.migrate()
    database.expect_this_version()
    assert form(database) == "0025"
    assert differences(database) == []
    if isinstance(database.backend, PostgreSQL):
        assert uncompressed_columns(database) == ["content"]
    database.close()


@pytest.mark.parametrize("old", ["0001", "0016"])
def test_an_older_store_is_refused_and_told_what_upgrades_it(make: Make, old: str) -> None:
    database = Database(make("form_0017"))
    with database.write() as session:
        session.execute(text(f"UPDATE alembic_version SET version_num = '{old}'"))
    for refuse in (database.migrate, database.expect_this_version):
        with pytest.raises(CannotOpen) as refused:
            refuse()
        told = str(refused.value)
        assert f"have the form {old} of a version before 0.1.0" in told
        assert "start promptfed of commit c15711a on them once" in told
        assert "\n" not in told
    assert form(database) == old
    database.close()


def test_a_later_migration_runs_on_stores_of_before(make: Make, with_0026: None) -> None:
    database = Database(make("form_0017"))
    with pytest.raises(CannotOpen, match="have the form 0017 instead of 0026"):
        database.expect_this_version()
    database.migrate()
    assert (form(database), has_table_of_0026(database)) == ("0026", True)
    database.close()


def test_a_later_migration_does_not_run_on_a_new_store(make: Make, with_0026: None) -> None:
    database = Database(make(None))
    database.migrate()
    assert (form(database), has_table_of_0026(database)) == ("0026", False)
    database.close()


def test_tables_of_another_program_are_left_alone(make: Make) -> None:
    database = Database(make(None))
    with database.write() as session:
        session.execute(text("CREATE TABLE clients (id INTEGER)"))
    with pytest.raises(CannotOpen, match="the tables cannot be made"):
        database.migrate()
    with database.read() as session:
        assert inspect(session.connection()).get_table_names() == ["clients"]
    database.close()
