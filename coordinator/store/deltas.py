"""Payloads as differences to earlier ones (``compression.down: delta``)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
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
        """The difference of the payload ``digest`` to ``base``.

        None if there is none, none that is smaller, or no room for it.
        """
        with self._lock:  # the first of many clients makes it, the others wait
            if (base, digest) not in self._made:
                try:
                    self._made[base, digest] = self._make(base, digest)
                except OSError:
                    return None
                while len(self._made) > MOST:
                    self._drop(next(iter(self._made)))
            self._made.move_to_end((base, digest))
            return self._made[base, digest]

    def forget(self, digests: Iterable[str]) -> None:
        """Drop the differences of removed payloads: with one of the two, a difference tells the other."""
        gone = set(digests)
        with self._lock:
            for pair in [pair for pair in self._made if not gone.isdisjoint(pair)]:
                self._drop(pair)

    def _drop(self, pair: tuple[str, str]) -> None:
        old = self._made.pop(pair)
        if isinstance(old, Path):
            old.unlink(missing_ok=True)  # who is just served it has it mapped

    def _make(self, base: str, digest: str) -> bytes | Path | None:
        try:
            before, now = self._blobs.place(base), self._blobs.place(digest)
            parts = difference(now, before)
            if isinstance(now, bytes):
                small = b"".join(parts)
                return small if len(small) < len(now) else None
            return self._written(parts, now.stat().st_size)
        except (DamagedBlob, ValueError):
            return None

    def _written(self, parts: Iterator[bytes], most: int) -> Path | None:
        """A file of ``parts``, if it has fewer than ``most`` bytes."""
        path, is_smaller = self._blobs.temporary(), False
        try:
            with path.open("wb") as file:
                file.writelines(parts)
            is_smaller = path.stat().st_size < most
        finally:
            if not is_smaller:
                path.unlink(missing_ok=True)
        return path if is_smaller else None
