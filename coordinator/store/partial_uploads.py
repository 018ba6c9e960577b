"""Bodies that come in several requests: what has arrived of each lies in a file until it is whole or not wanted.

A file is named after its federation and task, the digest and the length that were announced, so that a restart goes on
with it and nothing else has to be remembered. A task has one at most: the bytes of another digest take the place of
the earlier ones. What is on the disk is believed to be a beginning only; the digest is compared over the whole.
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

from promptfed.shared.files import sync_folder

ABANDONED_SECONDS = 24 * 3600.0
"""After which a body is given up whose task is not known here: of several coordinators, another may have it."""


class TakenOver(Exception):
    """A newer request goes on with the same body."""


@dataclass
class _Task:
    """The requests under way for one task's body: one at a time has the ``turn``, the ``newest`` is to have it next."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the file
    newest: PartialUpload | None = None
    requests: int = 0


class PartialUpload:
    """One request's turn with a body. All but ``interrupt`` belongs into a thread."""

    def __init__(self, task: _Task, path: Path, length: int):
        self.path = path
        self.length = length
        self.limit: asyncio.Timeout | None = None  # of the request, while it reads its body
        self._task = task

    def interrupt(self) -> None:
        """End the request's reading at once, from the event loop."""
        if self.limit is not None:
            self.limit.reschedule(asyncio.get_running_loop().time())

    @property
    def is_newest(self) -> bool:
        """Whether no newer request has come."""
        return self._task.newest is self

    def size(self) -> int:
        """How many bytes have arrived, once nothing is being written."""
        with self._task.lock:
            return self._size()

    def append(self, position: int, parts: list[bytes]) -> None:
        """Write what begins at ``position``. Raises TakenOver where something else has been written meanwhile."""
        with self._task.lock:
            if self._size() != position:
                raise TakenOver
            with self.path.open("ab" if position else "wb", buffering=0) as file:
                for part in parts:
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) :]

    def sync(self) -> None:
        """What has arrived outlives the machine's end."""
        with self._task.lock:
            if self.path.exists():
                with self.path.open("rb+") as file:
                    os.fsync(file.fileno())
                sync_folder(self.path.parent)

    def remove(self) -> None:
        """Forget it."""
        with self._task.lock:
            self.path.unlink(missing_ok=True)

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


class PartialUploads:
    """Those of a data folder."""

    def __init__(self, folder: Path):
        self.folder = folder / "partial"
        self._tasks: dict[tuple[str, str], _Task] = {}  # those with requests under way, by client and task

    def open(self) -> None:
        """Make the folder; what lies in it stays."""
        self.folder.mkdir(parents=True, exist_ok=True)

    @asynccontextmanager
    async def held(
        self, federation: str, client: str, task_id: str, digest: str, length: int
    ) -> AsyncIterator[PartialUpload]:
        """The body of a client's task. An older request that is still reading ends first; what it has read is written.

        ``federation`` and ``client`` are ids, ``task_id`` as well before anything is done with the body; ``digest`` is
        ``sha256:<hex>``. On the event loop.
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
        """Other bodies of the same task."""
        federation, task_id, *_ = mine.path.name.split(".")
        return [path for path in self.folder.glob(f"{federation}.{task_id}.*") if path != mine.path]

    def sweep(self, is_open: Callable[[str, str], bool | None]) -> None:
        """Remove those of tasks that are over.

        ``is_open`` says it by federation and task, or None where nobody here knows: then by their age.
        """
        for path in self.folder.glob("*.*.*.*"):
            federation, task_id, *_ = path.name.split(".")
            with contextlib.suppress(OSError):  # It is gone already, or the disk is away: the next sweep sees.
                known = is_open(federation, task_id)
                if known is None:
                    known = time.time() - path.stat().st_mtime < ABANDONED_SECONDS
                if not known:
                    path.unlink()
