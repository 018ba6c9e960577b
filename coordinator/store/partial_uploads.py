"""Bodies that arrive in several requests. The received part is a file until the body is complete or not needed.

The file's name has the federation, the task, and the announced digest and length, so that a restart continues without
further records. A task has at most one file: bytes with another digest replace it. The digest is checked over the
complete body.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from promptfed.shared.machine import sync_folder

ABANDONED_SECONDS = 24 * 3600.0
"""After which a body of an unknown task is removed: another coordinator may have the task."""


class TakenOver(Exception):
    """A newer request continues the same body."""


@dataclass
class _Task:
    """The current requests for one task's body: one has the ``turn``, the ``newest`` gets it next."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the file
    newest: PartialUpload | None = None
    requests: int = 0


class PartialUpload:
    """One request's turn with a body. Call all methods but ``interrupt`` in a thread."""

    def __init__(self, task: _Task, path: Path, length: int):
        self.path = path
        self.length = length
        self.limit: asyncio.Timeout | None = None  # of the request, while it reads its body
        self._task = task

    def interrupt(self) -> None:
        """Stop the request's reading at once. Call it on the event loop."""
        if self.limit is not None:
            self.limit.reschedule(asyncio.get_running_loop().time())

    @property
    def is_newest(self) -> bool:
        """Whether there is no newer request."""
        return self._task.newest is self

    def size(self) -> int:
        """How many bytes have arrived; waits for a write to end."""
        with self._task.lock:
            return self._size()

    def append(self, position: int, parts: list[bytes]) -> None:
        """Append bytes that begin at ``position``. Raises TakenOver if others were written meanwhile."""
        with self._task.lock:
            if self._size() != position:
                raise TakenOver
            with self.path.open("ab" if position else "wb", buffering=0) as file:
                for part in parts:
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) :]

    def sync(self) -> None:
        """Make the received bytes durable."""
        with self._task.lock:
            if self.path.exists():
                with self.path.open("rb+") as file:
                    os.fsync(file.fileno())
                sync_folder(self.path.parent)

    def remove(self) -> None:
        """Remove the file."""
        with self._task.lock:
            self.path.unlink(missing_ok=True)

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


class PartialUploads:
    """The partial uploads of a data folder."""

    def __init__(self, folder: Path):
        self.folder = folder / "partial"
        self._tasks: dict[tuple[str, str], _Task] = {}  # those with requests under way, by client and task

    def open(self) -> None:
        """Create the folder; existing files stay."""
        self.folder.mkdir(parents=True, exist_ok=True)

    @asynccontextmanager
    async def held(
        self, federation: str, client: str, task_id: str, digest: str, length: int
    ) -> AsyncIterator[PartialUpload]:
        """The body of a client's task. An older request that is still reading ends first, and its bytes are written.

        federation, client, task_id: ids. digest: ``sha256:<hex>``. Call it on the event loop.
        """
        task = self._tasks.setdefault((client, task_id), _Task())
        name = f"{federation}.{task_id}.{digest.partition(':')[2]}.{length}"
        mine, older = PartialUpload(task, self.folder / name, length), task.newest
        task.newest, task.requests = mine, task.requests + 1
        if older is not None:
            older.interrupt()
        try:
            async with task.turn:
                yield mine
        finally:
            task.requests -= 1
            if task.requests == 0:
                del self._tasks[client, task_id]

    def others(self, mine: PartialUpload) -> list[Path]:
        """Files with other bodies of the same task."""
        federation, task_id, *_ = mine.path.name.split(".")
        return [path for path in self.folder.glob(f"{federation}.{task_id}.*") if path != mine.path]

    def sweep(self, is_open: Callable[[str, str], bool | None]) -> None:
        """Remove files of tasks that are over.

        is_open: whether a task, by federation and id, is open; None if unknown here, which keeps recent files.
        """
        for path in self.folder.glob("*.*.*.*"):
            federation, task_id, *_ = path.name.split(".")
            with contextlib.suppress(OSError):  # It is gone already, or the disk is away: the next sweep sees.
                known = is_open(federation, task_id)
                if known is None:
                    known = time.time() - path.stat().st_mtime < ABANDONED_SECONDS
                if not known:
                    path.unlink()
