"""Whether the store can be written."""

from __future__ import annotations

import logging
import os
import threading
import time

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator.store.backend import DatabaseAway, one_line
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.store.bucket import ObjectStoreAway
from promptfed.coordinator.store.database import Database

log = logging.getLogger("promptfed.coordinator")
FRESH_SECONDS = 1.0  # for which an answer holds: whoever asks all the time is not to keep the disk busy
PROBE_BYTES = 64 << 10


class Writable:
    """Checks on demand, at most once in ``FRESH_SECONDS``."""

    def __init__(self, database: Database, blobs: Blobs):
        self._database = database
        self._blobs = blobs
        self._lock = threading.Lock()
        self._looked = -FRESH_SECONDS
        self._why: str | None = None
        self._cause = ""

    def why_not(self) -> str | None:
        """Why nothing can be written, without names of files and addresses; None if writing works."""
        with self._lock:
            if time.monotonic() - self._looked >= FRESH_SECONDS:
                before, self._why = self._why, self._look()
                self._looked = time.monotonic()
                if self._why not in (None, before):
                    log.error("%s: %s", self._why, self._cause)
            return self._why

    def _look(self) -> str | None:
        try:
            with self._database.write() as session:
                session.execute(text("UPDATE store SET id = id"))
            self._write_a_file()
            if self._blobs.bucket is not None:
                self._blobs.bucket.probe()
        except (SQLAlchemyError, OSError, DatabaseAway) as error:
            self._cause = one_line(getattr(error, "orig", None) or error)
            if self._database.is_full(error):
                return "nothing can be written: the disk is full, make room"
            what = (
                "the object store does not answer" if isinstance(error, ObjectStoreAway) else "nothing can be written"
            )
            return f"{what}: the coordinator's log says why"
        return None

    def _write_a_file(self) -> None:
        path = self._blobs.temporary()
        try:
            with path.open("wb") as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            path.unlink(missing_ok=True)
