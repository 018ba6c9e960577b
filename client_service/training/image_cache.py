"""Images cut for a backbone in memory, for methods that look at them again in every epoch, phase and evaluation."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Generic, TypeVar

from torch import Tensor

from promptfed.shared.data.image_files import READERS

DEFAULT_BYTES = 1 << 30
Read = TypeVar("Read")


class ImageCache:
    """Images by key, for all clients of a process, in at most ``max_bytes``; 224² pixels take 0.15 or 0.6 MB.

    What is kept stays until its last holder is gone, and what no longer fits is made anew each time: epochs go through
    all images in turn, where putting out the one unused for longest would put out what is asked for next.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES):
        self._max_bytes = max_bytes
        self._bytes = 0
        self._images: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        self._turn = threading.Lock()
        self._released: deque[int] = deque()  # sizes of images that are gone: the collector may come at any moment

    @property
    def bytes(self) -> int:
        """What is kept."""
        with self._turn:
            self._settle()
            return self._bytes

    def find(self, key: str) -> Tensor | None:
        """The image, if somebody holds it."""
        return self._images.get(key)

    def keep(self, key: str, image: Tensor) -> Tensor | None:
        """The image to hold: ``image``, or the equal one that is there; None where it does not fit."""
        size = image.numel() * image.element_size()
        with self._turn:
            self._settle()
            known = self._images.get(key)
            if known is not None or self._bytes + size > self._max_bytes:
                return known
            self._images[key] = image
            self._bytes += size
        weakref.finalize(image, self._released.append, size).atexit = False
        return image

    def _settle(self) -> None:
        while self._released:
            self._bytes -= self._released.popleft()


IMAGES = ImageCache()
"""The process's own."""


class HeldImages:
    """One client's images: made once by ``make``, then found in ``cache`` or here. Threads may share it."""

    def __init__(self, cache: ImageCache = IMAGES):
        self._cache = cache
        self._held: dict[str, Tensor] = {}

    def find(self, key: str) -> Tensor | None:
        """The image under ``key``, if this client holds it."""
        return self._held.get(key)

    def get(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """The image ``(3, H, W)`` under ``key``, which nobody may change."""
        if key in self._held:
            return self._held[key]
        image = self._cache.find(key)
        if image is None:
            image = make()
            kept = self._cache.keep(key, image)
            if kept is None:
                return image
            image = kept
        self._held[key] = image
        return image


@cache
def readers() -> ThreadPoolExecutor:
    """The process's threads that decode and preprocess images."""
    return ThreadPoolExecutor(READERS, "images")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=readers.cache_clear)  # a fork has none of its parent's threads


class ReadAhead(Generic[Read]):
    """Images that ``read`` makes of a split's indices, in threads beside the training step before."""

    def __init__(self, read: Callable[[int], Read], held: Callable[[int], object] = lambda row: None):
        """``held``: an image that is in memory already, or None."""
        self._read, self._held = read, held
        self._ahead: dict[int, Future[Read]] = {}
        self._used = False  # whether this task looks at images at all

    def begin(self, rows: Sequence[int]) -> None:
        """Make the next batch's images meanwhile, if this task looks at images."""
        if self._used:
            self._drop()
            self._ahead = self._begun(rows)

    def take(self, rows: Sequence[int]) -> list[Read]:
        """The images at ``rows``."""
        self._used = True
        ahead, self._ahead = self._ahead, {}
        ahead |= self._begun([row for row in rows if row not in ahead])
        return [ahead[row].result() if row in ahead else self._read(row) for row in rows]

    def _begun(self, rows: Sequence[int]) -> dict[int, Future[Read]]:
        return {row: readers().submit(self._read, row) for row in rows if self._held(row) is None}

    def _drop(self) -> None:
        for image in self._ahead.values():
            image.cancel()
        self._ahead = {}
