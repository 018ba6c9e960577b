"""Preprocessed images in memory, for methods that look at them again in every epoch, phase and evaluation."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from torch import Tensor

DEFAULT_BYTES = 1 << 30


class ImageCache:
    """Images by key, for all clients of a process, in at most ``max_bytes``; 224² pixels take 0.6 MB.

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
    """One client's images: made once by ``make``, then found in ``cache`` or here."""

    def __init__(self, cache: ImageCache = IMAGES):
        self._cache = cache
        self._held: dict[str, Tensor] = {}

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
