"""Times of clients' last requests, and bytes downloaded: collected in memory, and written every few seconds.

They are for people: a crash loses the last seconds of them. How far a task is, is known in memory alone.
"""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time

from sqlalchemy import bindparam, update
from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator.domain import clock
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import ClientRow, TaskRow

SEEN = update(ClientRow).where(ClientRow.id == bindparam("key")).values(last_seen=bindparam("moment"))
PROGRESS_SECONDS = 60.0  # after which a client has said nothing of its task, though it does so every ten
MORE = TaskRow.bytes_down + bindparam("size")
SERVED = update(TaskRow).where(TaskRow.id == bindparam("key")).values(bytes_down=MORE)


class LastSeen:
    """Clients' last requests, and bytes served by task."""

    def __init__(self, database: Database):
        self._database = database
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}  # seconds of the epoch
        self._bytes: collections.Counter[str] = collections.Counter()
        # By task: when its client said so, and the part that is done.
        self._progress: dict[str, tuple[float, float]] = {}

    def is_at(self, task_id: str, done: float) -> None:
        """Note what a client says of its open task."""
        with self._lock:
            self._progress[task_id] = clock.monotonic(), done

    def progress(self, task_id: str) -> float | None:
        """The part of the task that is done, if its client has said so lately."""
        moment, done = self._progress.get(task_id, (-math.inf, None))
        return done if clock.monotonic() - moment < PROGRESS_SECONDS else None

    def seen(self, client_id: str) -> None:
        """Note a client's request."""
        with self._lock:
            self._seen[client_id] = time.time()

    def served(self, task_id: str, size: int) -> None:
        """Note ``size`` served bytes of a task's payload."""
        with self._lock:
            self._bytes[task_id] += size

    def flush(self) -> None:
        """Write the collected figures, and forget what was said long ago."""
        with self._lock:
            lately = clock.monotonic() - PROGRESS_SECONDS
            self._progress = {id: progress for id, progress in self._progress.items() if progress[0] > lately}
            seen, served = self._seen, self._bytes
            self._seen, self._bytes = {}, collections.Counter()
        if not seen and not served:
            return
        try:
            with self._database.write() as session:
                connection = session.connection()
                if seen:
                    connection.execute(SEEN, [{"key": key, "moment": clock.text(at)} for key, at in seen.items()])
                if served:
                    connection.execute(SERVED, [{"key": key, "size": size} for key, size in served.items()])
        except SQLAlchemyError:
            with self._lock:
                # A full disk costs nothing of it. What has come since is newer.
                self._seen = seen | self._seen
                self._bytes.update(served)
            raise

    def flush_if_possible(self) -> None:
        """Write the collected figures, ignoring a database that cannot be written, for callers that only read."""
        with contextlib.suppress(SQLAlchemyError):
            self.flush()
