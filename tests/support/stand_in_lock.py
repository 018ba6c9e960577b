"""SQLite with the lock and the sign of life of several coordinators, as PostgreSQL has them, for tests without one.

It refuses what PostgreSQL refuses: a second session the lock, a sign of life of who has not got it, and every statement
of a session that was terminated.
"""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from promptfed.coordinator.store.backend import InUse
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.shared.machine import boot_time


@dataclass
class Server:
    """What a database server would know: whose writing session has the lock, and when it was seen."""

    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    holder: StandIn | None = None
    seen: float = 0.0


class StandIn(SQLite):
    """One coordinator's connections to ``server``."""

    in_folder = False

    def __init__(self, server: Server):
        super().__init__(server.path)
        self._server = server
        self._terminated = False
        event.listen(self.writer, "do_connect", self._lock)
        for engine in (self.writer,):
            event.listen(engine, "before_cursor_execute", self._expect_session)
        event.listen(self.writer, "close", self._unlock)

    def renew(self) -> bool:
        with self._server.lock:
            if self._server.holder is not self:
                return False
            self._server.seen = boot_time()
            return True

    def terminate_silent(self, seconds: float) -> None:
        with self._server.lock:
            holder = self._server.holder
            if holder is not None and boot_time() - self._server.seen > seconds:
                holder.hang_up()

    def hang_up(self) -> None:
        """End the writing session, as the server does: its lock is free, and its next statement fails."""
        self._terminated = True
        if self._server.holder is self:
            self._server.holder = None

    def why_away(self, error: DBAPIError) -> str | None:
        return "terminating connection" if "terminating connection" in str(error.orig) else None

    def _lock(self, *_: Any) -> None:
        with self._server.lock:
            if self._server.holder not in (None, self):
                raise InUse(f"another coordinator works on the database at {self.place}")
            self._server.holder, self._server.seen, self._terminated = self, boot_time(), False

    def _unlock(self, *_: Any) -> None:
        with self._server.lock:
            if self._server.holder is self:
                self._server.holder = None

    def _expect_session(self, *_: Any) -> None:
        if self._terminated:
            raise sqlite3.OperationalError("terminating connection due to administrator command")
