"""Payloads as differences to earlier ones (``compression.down: delta``)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from promptfed.coordinator.store.blobs import Blobs, DamagedBlob
from promptfed.shared.tensors.deltas import difference

MOST = 8  # differences that are kept: clients of a round mostly have the same payload, and the same one before


class Deltas:
    """The differences that were made last: small ones in memory, those between files in temporary files."""

    def __init__(self, blobs: Blobs):
        self._blobs = blobs
        self._made: OrderedDict[tuple[str, str], bytes | Path | None] = OrderedDict()
        self._lock = threading.Lock()

    def between(self, base: str, digest: str) -> bytes | Path | None:
        """The difference of the payload ``digest`` to ``base``; None if there is none, or none that is smaller."""
        with self._lock:  # the first of many clients makes it, the others wait
            if (base, digest) not in self._made:
                self._made[base, digest] = self._make(base, digest)
                while len(self._made) > MOST:
                    _, old = self._made.popitem(last=False)
                    if isinstance(old, Path):
                        old.unlink(missing_ok=True)  # who is just served it has it mapped
            self._made.move_to_end((base, digest))
            return self._made[base, digest]

    def _make(self, base: str, digest: str) -> bytes | Path | None:
        try:
            before, now = self._blobs.place(base), self._blobs.place(digest)
            parts = difference(now, before)
            if isinstance(now, bytes):
                small = b"".join(parts)
                return small if len(small) < len(now) else None
            path = self._blobs.temporary()
            with path.open("wb") as file:
                file.writelines(parts)
        except (DamagedBlob, ValueError):
            return None
        if path.stat().st_size < now.stat().st_size:
            return path
        path.unlink()
        return None
