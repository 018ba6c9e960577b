"""A folder with copies of the objects that were read last."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

MOST_BYTES = 4 << 30
IN_USE_SECONDS = 60.0  # after which nobody to whom a path was given is about to open it: what is mapped stays


class ObjectCache:
    """Copies of objects under their hexadecimal digest, at most ``most`` bytes; copies in use are kept beyond that."""

    def __init__(self, folder: Path, most: int = MOST_BYTES):
        self._folder = folder
        self._most = most
        self._bytes = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the folder, empty."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.iterdir():
            left.unlink()

    def path(self, name: str) -> Path:
        """The path of the copy with that name, which may not exist."""
        return self._folder / name

    def touch(self, name: str) -> None:
        """Note that the copy was used."""
        os.utime(self.path(name))

    def adopt(self, temporary: Path, name: str) -> Path:
        """Move a file into the folder; returns its path there."""
        path, size = self.path(name), temporary.stat().st_size
        with self._lock:
            self._bytes += size - (path.stat().st_size if path.exists() else 0)
            temporary.rename(path)
            if self._bytes > self._most:
                self._shrink()
        return path

    def forget(self, names: Iterable[str]) -> None:
        """Remove the copies of these names."""
        with self._lock:
            for name in names:
                self._remove(self.path(name))

    def _shrink(self) -> None:
        now = time.time()
        known = sorted((copy.stat().st_mtime, copy) for copy in self._folder.iterdir())
        for used, copy in known:
            if self._bytes <= self._most or now - used < IN_USE_SECONDS:
                return
            self._remove(copy)

    def _remove(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return
        self._bytes -= size


def write_hashed(parts: Iterator[bytes], path: Path) -> str:
    """Write ``parts`` to a file; their SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    return digest.hexdigest()
