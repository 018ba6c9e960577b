"""Blobs: bytes on disk under the name of their SHA-256, whole or not there at all."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from promptfed.coordinator.store.fault_points import point
from promptfed.shared.files import sync_folder

PREFIX = "sha256:"


def digest_of(content: bytes) -> str:
    """``sha256:<hex>`` of ``content``."""
    return PREFIX + hashlib.sha256(content).hexdigest()


class Blobs:
    """A folder of blobs, written within a ``hold``, which keeps them until the rows that name them are committed."""

    def __init__(self, folder: Path):
        self._folder = folder / "blobs"
        self.incoming = folder / "incoming"
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._unsynced: set[str] = set()  # there by name, but not yet for sure after a power cut

    def open(self) -> None:
        """Make the folders, and remove what uploads that were cut off have left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.incoming.mkdir(parents=True, exist_ok=True)
        for leftover in self.incoming.iterdir():
            leftover.unlink()
        sync_folder(self._folder.parent)

    def temporary(self) -> Path:
        """A fresh path for bytes on their way in."""
        return self.incoming / uuid4().hex

    def read(self, digest: str) -> bytes:
        """The bytes. Raises FileNotFoundError where there is no such blob."""
        return self.path(digest).read_bytes()

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """A block within which noted blobs are safe from ``remove``."""
        held = Held(self)
        try:
            yield held
        finally:
            with self._lock:
                self._held.subtract(held.digests)
                self._held += Counter()

    def remove(self, digest: str) -> bool:
        """Remove a blob that no row names, unless someone holds it; whether it is gone."""
        with self._lock:
            if self._held[digest] > 0:
                return False
            self.path(digest).unlink(missing_ok=True)
            return True

    def all(self) -> list[str]:
        """Digests of all blobs in the folder, whether a row names them or not."""
        return [PREFIX + path.name for path in self._folder.glob("??/*")]

    def path(self, digest: str) -> Path:
        """Where the blob with ``digest`` lies."""
        name = digest.removeprefix(PREFIX)
        return self._folder / name[:2] / name

    def _note(self, digest: str) -> None:
        with self._lock:
            self._held[digest] += 1

    def _has(self, digest: str) -> bool:
        """Whether the blob is there, durably."""
        if not self.path(digest).exists():
            return False
        if digest in self._unsynced:
            self._sync(digest, new_folder=True)
        return True

    def _keep(self, temporary: Path, digest: str) -> None:
        path = self.path(digest)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        point("blob-written")
        new_folder = not path.parent.exists()
        path.parent.mkdir(exist_ok=True)
        self._unsynced.add(digest)
        temporary.rename(path)
        self._sync(digest, new_folder)
        point("blob-renamed")

    def _sync(self, digest: str, new_folder: bool) -> None:
        folder = self.path(digest).parent
        if new_folder:
            sync_folder(folder.parent)
        sync_folder(folder)
        self._unsynced.discard(digest)


class Held:
    """The blobs that one block writes."""

    def __init__(self, blobs: Blobs):
        self._blobs = blobs
        self.digests: list[str] = []

    def put(self, content: bytes) -> str:
        """Store ``content`` durably; its digest."""
        digest = digest_of(content)
        self._hold(digest)
        if not self._blobs._has(digest):
            temporary = self._blobs.temporary()
            try:
                temporary.write_bytes(content)
                self._blobs._keep(temporary, digest)
            finally:
                # A full disk is not to be made fuller by each attempt.
                temporary.unlink(missing_ok=True)
        return digest

    def adopt(self, temporary: Path, digest: str) -> None:
        """Make the file at ``temporary``, whose content has ``digest``, a blob, durably."""
        self._hold(digest)
        if self._blobs._has(digest):
            temporary.unlink()
        else:
            self._blobs._keep(temporary, digest)

    def _hold(self, digest: str) -> None:
        # Before the look at the disk: from here on the blob is not removed, whether it is there or not.
        self._blobs._note(digest)
        self.digests.append(digest)
