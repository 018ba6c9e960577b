"""Times of clients' last requests and bytes downloaded: collected in memory, written every few seconds.

These figures are for people. A crash loses the last seconds of them. How far a task is, is known in memory alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter

from sqlalchemy import bindparam, select, update
from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator.domain import clock
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import ClientRow, LeaseRow, TaskRow

SEEN = update(ClientRow).where(ClientRow.id == bindparam("key")).values(last_seen=bindparam("moment"))
PROGRESS_SECONDS = 60.0  # after which a client has said nothing of its task, though it does so every ten
MORE = TaskRow.bytes_down + bindparam("size")
SERVED = update(TaskRow).where(TaskRow.id == bindparam("key")).values(bytes_down=MORE)


class LastSeen:
    """Clients' last requests, and bytes served by task."""

    def __init__(self, database: Database, holder: str | None = None):
        """holder: this one of several coordinators, which writes only about clients of its own federations."""
        self._database = database
        self._seen_statement = SEEN
        if holder is not None:
            mine = select(LeaseRow.federation_id).where(LeaseRow.holder == holder)
            self._seen_statement = SEEN.where(ClientRow.federation_id.in_(mine))
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}  # seconds of the epoch
        self._bytes: Counter[str] = Counter()
        self._progress: dict[str, tuple[float, float]] = {}  # by task: when it was told, and the part that is done

    def is_at(self, task_id: str, done: float) -> None:
        """Note what a client says of its open task."""
        with self._lock:
            self._progress[task_id] = clock.monotonic(), done

    def progress(self, task_id: str) -> float | None:
        """The part of the task that is done, if its client has told it lately."""
        told = self._progress.get(task_id)
        return told[1] if told is not None and clock.monotonic() - told[0] < PROGRESS_SECONDS else None

    def seen(self, client_id: str) -> None:
        """Note a client's request."""
        with self._lock:
            self._seen[client_id] = time.time()

    def served(self, task_id: str, size: int) -> None:
        """Note ``size`` served bytes of a task's payload."""
        with self._lock:
            self._bytes[task_id] += size

    def flush(self) -> None:
        """Write the collected figures, and forget what was told long ago."""
        with self._lock:
            lately = clock.monotonic() - PROGRESS_SECONDS
            self._progress = {task_id: told for task_id, told in self._progress.items() if told[0] > lately}
            seen, served = self._seen, self._bytes
            self._seen, self._bytes = {}, Counter()
        if not seen and not served:
            return
        try:
            with self._database.write() as session:
                connection = session.connection()
                if seen:
                    connection.execute(
                        self._seen_statement, [{"key": key, "moment": clock.text(at)} for key, at in seen.items()]
                    )
                if served:
                    connection.execute(SERVED, [{"key": key, "size": size} for key, size in served.items()])
        except SQLAlchemyError:
            with self._lock:
                # A full disk costs nothing of it. What has come since is newer.
                self._seen = seen | self._seen
                self._bytes.update(served)
            raise

    def flush_if_possible(self) -> None:
        """As ``flush``, ignoring a database that cannot be written, for callers that only read."""
        with contextlib.suppress(SQLAlchemyError):
            self.flush()
