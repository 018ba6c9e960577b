"""One coordinator at a time on one data folder."""

from __future__ import annotations

import os
from pathlib import Path

from promptfed.coordinator.store.backend import InUse
from promptfed.shared import machine


class FolderInUse(InUse):
    """Another coordinator uses the folder."""


class FolderLock:
    """A lock that the system releases when the process ends. Its file holds the process id."""

    def __init__(self, folder: Path):
        self._path = folder / "lock"
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises FolderInUse."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        if not machine.try_lock(handle):
            os.close(handle)
            text = f"another coordinator works on {self._path.parent}: stop it, or give another --data-dir"
            raise FolderInUse(text)
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._handle = handle

    def release(self) -> None:
        """Free the folder for another coordinator."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
