"""Done once for the hundreds of coordinators and clients of one process.

Certificates are read, statements compiled, SQLite's tables made and the API described for the first one. The
environment is looked through for settings where it names any.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import threading
from functools import cache
from pathlib import Path
from ssl import SSLContext
from typing import Any

from httpx._transports import default as transports
from pydantic_settings import EnvSettingsSource
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from promptfed.coordinator.app import Application
from promptfed.coordinator.store import opening, sqlite
from promptfed.coordinator.store.database import Database

_context, _named, _migrate = transports.create_ssl_context, EnvSettingsSource.__call__, opening.migrate
_compiled: dict[Any, Any] = {}
_openapi, _descriptions = Application.openapi, list[dict[str, Any]]()
_of_all = cache(_context)
_turn = threading.Lock()


def _read_once(verify: Any = True, cert: Any = None, trust_env: bool = True) -> SSLContext:
    return _of_all() if verify is True and cert is None else _context(verify, cert, trust_env)


def _where_any(source: EnvSettingsSource) -> dict[str, Any]:
    prefix = source.env_prefix.lower()
    return _named(source) if any(name.lower().startswith(prefix) for name in source.env_vars) else {}


def _copied(database: Database) -> None:
    """An empty file gets a copy of the tables; whatever else there is, is looked at as usual."""
    if type(database.backend) is sqlite.SQLite:
        with _turn, contextlib.closing(database.backend.writer.raw_connection()) as connection:
            file: Any = connection.driver_connection
            with contextlib.suppress(sqlite3.Error):
                if file.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                    _tables().backup(file)
    _migrate(database)


@cache
def _tables() -> sqlite3.Connection:
    """Those of a store that nobody has used: from one that was, its rows would be in every other."""
    made = sqlite3.connect(":memory:", check_same_thread=False)
    with tempfile.TemporaryDirectory() as folder:
        database = Database(sqlite.SQLite(Path(folder) / "tables.sqlite3"))
        _migrate(database)
        with contextlib.closing(database.backend.writer.raw_connection()) as connection:
            connection.driver_connection.backup(made)
        database.close()
    return made


def _described(app: Application) -> dict[str, Any]:
    if not _descriptions:
        _descriptions.append(_openapi(app))
    return _descriptions[0]


class OneDialect(SQLiteDialect_pysqlite):
    """Databases differ in the file alone, and so in nothing of what is compiled.

    A class of its own: what SQLAlchemy keeps by a dialect whose hash changed meanwhile it would look for without end.
    """

    supports_statement_cache = True

    def __hash__(self) -> int:
        return hash(OneDialect)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneDialect)


registry.register("sqlite.one", __name__, "OneDialect")


def _engine(url: str, **options: Any) -> Engine:
    return create_engine(
        make_url(url).set(drivername="sqlite+one"), execution_options={"compiled_cache": _compiled}, **options
    )


@cache
def share() -> None:
    """From now on; not while tests are collected, so that a fault that a campaign then puts in is in what is made."""
    transports.create_ssl_context = _read_once
    EnvSettingsSource.__call__ = _where_any
    opening.migrate = _copied
    Application.openapi = _described
    sqlite.create_engine = _engine
