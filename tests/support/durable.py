"""What a piece of code asks of the disk, and whether it waits for another that is inside."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Synced = list[tuple[str, str]]


def synced_by(monkeypatch: pytest.MonkeyPatch, folder: Path, change: Callable[[], object]) -> Synced:
    """What ``change`` does in order: files and folders that it syncs, and names that come in by renaming."""
    found: Synced = []
    sizes: dict[int, int] = {}
    sync, renamed, replaced = os.fsync, os.rename, os.replace

    def name(path: Any) -> str:
        return str(Path(path).relative_to(folder.parent))

    def fsync(handle: int) -> None:
        found.append(("sync", name(os.readlink(f"/proc/self/fd/{handle}"))))
        sync(handle)
        sizes[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def rename(source: Any, target: Any) -> None:
        found.append(("rename", name(target)))
        renamed(source, target)

    def replace(source: Any, target: Any) -> None:
        found.append(("rename", name(target)))
        replaced(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", rename)
        patch.setattr(os, "replace", replace)
        change()
    for path in folder.parent.rglob("*"):
        there = path.lstat()
        assert not path.is_file() or sizes.get(there.st_ino, there.st_size) == there.st_size, f"{path} grew after that"
    return found


class Second:
    """A second thread, which ``act`` begins while the first is inside of a lock. ``waited``: it came in only after it.

    ``inside`` is for the first thread to call where it holds the lock; ``end`` waits for the second.
    """

    def __init__(self, act: Callable[[], object]):
        self._act, self._thread, self.waited = act, None, False
        self._over = threading.Event()

    def inside(self, *_: object, **__: object) -> None:
        """Begin the second thread, once, and see whether it ends although the first is still here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run)
            self._thread.start()
            self.waited = not self._over.wait(0.3)

    def _run(self) -> None:
        self._act()
        self._over.set()

    def end(self) -> bool:
        """Whether it had to wait, and then came through."""
        assert self._thread is not None, "the first never was inside"
        return self.waited and self._over.wait(30)
