"""Files that are on the disk when a call returns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from promptfed.shared import machine


class Disk:
    """Writes files. If ``synced``, they are on the disk when a call returns."""

    def __init__(self, synced: bool):
        self._synced = synced
        self._sync = os.fsync if synced else _leave

    def write(self, path: Path, content: bytes) -> None:
        """A file with this content, which only its owner reads."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | machine.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            self._sync(file.fileno())

    def move(self, source: Path, target: Path) -> None:
        """Rename a file over another one."""
        # A file system writes a file's content to the disk before the file replaces another one, which takes
        # milliseconds. Files that are not synced need no such care.
        if not self._synced:
            target.unlink(missing_ok=True)
        os.replace(source, target)

    def adopt(self, source: Path, path: Path) -> None:
        """A second name for a file, or a copy if the file system has no hard links."""
        path.unlink(missing_ok=True)
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)
        self.sync_folder(path.parent)

    def sync_folder(self, folder: Path) -> None:
        """A folder's entries."""
        if self._synced:
            machine.sync_folder(folder)


def _leave(handle: int) -> None:
    """Leave writing to the operating system."""
