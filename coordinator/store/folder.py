"""The data folder: its lock, and who may look into it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.backend import InUse
from promptfed.shared import machine

log = logging.getLogger("promptfed.coordinator")
ID_FILE = "store.id"
SQLITE_FILE = "coordinator.sqlite3"


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


def lock_folder(settings: Settings) -> FolderLock:
    """Make and lock the data folder. Raises FolderInUse, OSError."""
    folder = settings.data_dir
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _close_to_others(folder)
    lock = FolderLock(folder)
    lock.acquire()
    return lock


def _close_to_others(folder: Path) -> None:
    """Set mode 0700 also on an existing folder: it holds the database and the updates."""
    if folder.stat().st_mode & 0o077 == 0:
        return
    try:
        folder.chmod(0o700)
    except PermissionError:
        log.warning("%s belongs to another user, and others may read what is in it: give it to this one", folder)
