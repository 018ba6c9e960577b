"""What was used last, in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class Remembered(Generic[Kept]):
    """What was used last of some blobs, up to ``most`` bytes of content."""

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Kept, int]] = OrderedDict()
        self._bytes = 0

    def get(self, digest: str) -> Kept | None:
        """What is kept of the blob, if anything is."""
        with self._lock:
            if digest not in self._kept:
                return None
            self._kept.move_to_end(digest)
            return self._kept[digest][0]

    def add(self, digest: str, kept: Kept, size: int) -> None:
        """Keep it, whose content has ``size`` bytes, and drop what was not used for longest."""
        with self._lock:
            if digest in self._kept or size > self._most:
                return
            self._kept[digest] = kept, size
            self._bytes += size
            while self._bytes > self._most:
                self._bytes -= self._kept.popitem(last=False)[1][1]

    def forget(self, digests: Iterable[str]) -> None:
        """Forget what is kept of these blobs."""
        with self._lock:
            for digest in digests:
                if digest in self._kept:
                    self._bytes -= self._kept.pop(digest)[1]
