"""Done once for the hundreds of coordinators and clients of one process.

Certificates are read, statements compiled, SQLite's tables made and the API described for the first one. The
environment is looked through for settings where it names any.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from functools import cache, partial
from ssl import SSLContext
from typing import Any

from httpx._transports import default as transports
from pydantic_settings import EnvSettingsSource
from sqlalchemy import create_engine
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from promptfed.coordinator.app import Application
from promptfed.coordinator.store import opening, sqlite
from promptfed.coordinator.store.database import Database

_context, _named, _migrate = transports.create_ssl_context, EnvSettingsSource.__call__, opening.migrate
_openapi, _descriptions = Application.openapi, list[dict[str, Any]]()
_of_all = cache(_context)
_tables, _turn = sqlite3.connect(":memory:", check_same_thread=False), threading.Lock()


def _read_once(verify: Any = True, cert: Any = None, trust_env: bool = True) -> SSLContext:
    return _of_all() if verify is True and cert is None else _context(verify, cert, trust_env)


def _where_any(source: EnvSettingsSource) -> dict[str, Any]:
    prefix = source.env_prefix.lower()
    return _named(source) if any(name.lower().startswith(prefix) for name in source.env_vars) else {}


def _copied(database: Database) -> None:
    """An empty file gets a copy of the first empty one's tables; whatever else there is, is looked at as usual.

    A store that is opened again is no source: its rows would be in every later one.
    """
    if type(database.backend) is not sqlite.SQLite:
        _migrate(database)
        return
    with _turn, contextlib.closing(database.backend.writer.raw_connection()) as connection:
        file: Any = connection.driver_connection
        is_new = False
        with contextlib.suppress(sqlite3.Error):
            is_new = _is_empty(file)
            if is_new:
                _tables.backup(file)
    _migrate(database)
    with _turn, contextlib.closing(database.backend.writer.raw_connection()) as connection:
        if is_new and _is_empty(_tables):
            connection.driver_connection.backup(_tables)


def _described(app: Application) -> dict[str, Any]:
    if not _descriptions:
        _descriptions.append(_openapi(app))
    return _descriptions[0]


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None


@cache
def share() -> None:
    """From now on; not while tests are collected, so that a fault that a campaign then puts in is in what is made."""
    transports.create_ssl_context = _read_once
    EnvSettingsSource.__call__ = _where_any
    opening.migrate = _copied
    Application.openapi = _described
    # Databases differ in the file alone, and so in nothing of what is compiled.
    sqlite.create_engine = partial(create_engine, execution_options={"compiled_cache": {}})
    SQLiteDialect_pysqlite.__hash__ = lambda self: hash(type(self))
    SQLiteDialect_pysqlite.__eq__ = lambda self, other: type(self) is type(other)
