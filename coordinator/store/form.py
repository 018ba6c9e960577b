"""The form of the tables: the newest is made, an earlier one upgraded, one that this version does not read refused."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, insert, inspect, select
from sqlalchemy.exc import DBAPIError

from promptfed.coordinator.store.backend import CannotOpen, one_line
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import Base

MIGRATIONS = Path(__file__).parent / "migrations"
READS_OLDER = "7368013d"  # the last commit that reads the tables of releases before 0.4.0
FORM = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""The table in which alembic stores the revision of the others."""


def migrate(database: Database) -> None:
    """Create the tables, or upgrade those of an earlier version. Raises CannotOpen."""
    place = database.backend.place
    try:
        with database.connection() as connection:
            revision = _revision(connection)
            if revision is None:
                # In their newest form at once: migrations are for tables that are there already.
                Base.metadata.create_all(connection, checkfirst=False)
                FORM.create(connection)
                connection.execute(insert(FORM).values(version_num=_revisions()[-1]))
            elif revision != _revisions()[-1]:
                _expect_not_before(revision, place)
                _upgrade(connection, place)
    except DBAPIError as error:
        if database.is_damaged(error):
            raise CannotOpen(database.cannot_be_read(error)) from None
        text = f"the tables cannot be made in the database at {place}"
        raise CannotOpen(f"{text}: {str(error.orig).splitlines()[0]}") from None


def expect_this_version(database: Database, or_none: bool = False) -> None:
    """Refuse tables of another version's form, or ``or_none`` at all. Raises CannotOpen, DatabaseAway."""
    try:
        with database.read() as session:
            revision = _revision(session.connection())
    except DBAPIError as error:
        raise CannotOpen(database.cannot_be_read(error)) from None
    place, newest = database.backend.place, _revisions()[-1]
    _expect_not_before(revision, place)
    if revision != newest and not (or_none and revision is None):
        text = f"the tables at {place} have the form {revision} instead of {newest}"
        raise CannotOpen(f"{text}: start this version of the coordinator on them once")


def _upgrade(connection: Connection, place: str) -> None:
    # Imported here, since a store is seldom upgraded, and each start of the coordinator would wait for it.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        text = f"the database at {place} was made by another version: {one_line(error)}"
        raise CannotOpen(f"{text}: install the version that made it, or a later one") from None


def _expect_not_before(revision: str | None, place: str) -> None:
    if revision is not None and revision < _revisions()[0]:
        raise CannotOpen(
            f"the tables at {place} have the form {revision} of promptfed before 0.4.0, which this "
            f"version does not read: start commit {READS_OLDER} on them, export each result, and continue from the "
            "exports in a new store (docs/guides/upgrade.md)"
        )


def _revisions() -> list[str]:
    """The revisions that there are migrations for, from the oldest on: their files begin with them."""
    return sorted(file.name.partition("_")[0] for file in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def _revision(connection: Connection) -> str | None:
    """The revision of the tables; None where there are none."""
    if not inspect(connection).has_table(FORM.name):
        return None
    return connection.execute(select(FORM.c.version_num)).scalar()
