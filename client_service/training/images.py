"""Preprocessed images in memory, for methods that look at them again; random crops and flips (`crop_flip`)."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Generic, TypeVar

import torch
from PIL import Image
from torch import Generator, Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.data import Split
from promptfed.shared.data.image_files import READERS
from promptfed.shared.seeds import generator

DEFAULT_BYTES = 1 << 30
Read = TypeVar("Read")
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)  # width over height
TRIES = 10


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
            kept = self._images.get(key)
            if kept is not None or self._bytes + size > self._max_bytes:
                return kept
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


def crop_box(width: int, height: int, draws: Generator) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge of a random crop; of the largest central one if ten tries do not fit."""
    for _ in range(TRIES):
        share, stretch, across, down = torch.rand(4, generator=draws).tolist()
        area = width * height * (AREA[0] + (AREA[1] - AREA[0]) * share)
        aspect = math.exp(math.log(ASPECT[0]) + (math.log(ASPECT[1]) - math.log(ASPECT[0])) * stretch)
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, upper = int(across * (width - wide + 1)), int(down * (height - high + 1))
            return left, upper, left + wide, upper + high
    wide = min(width, round(height * ASPECT[1]))
    high = min(height, round(width / ASPECT[0]))
    left, upper = (width - wide) // 2, (height - high) // 2
    return left, upper, left + wide, upper + high


def crop_flip(image: Image.Image, size: tuple[int, int], draws: Generator) -> Image.Image:
    """A random crop of ``image`` at ``size`` (height, width), mirrored or not."""
    box = crop_box(image.width, image.height, draws)
    cut = image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box)
    mirrored = float(torch.rand((), generator=draws)) < 0.5
    return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else cut


class Views:
    """One view of each image of ``split``, drawn for ``purpose``: a split that the feature cache can read.

    View k of an image is the same in every task and process, since it is drawn for the image's digest and k alone.
    """

    def __init__(self, split: Split, backbone: Backbone, views: int, purpose: str):
        self._split = split
        self._backbone = backbone
        self._chosen = torch.randint(views, (len(split),), generator=generator(0, purpose, "views")).tolist()
        self._anew = generator(0, purpose, "crops")
        self.ahead = ReadAhead(split.image)

    def __len__(self) -> int:
        return len(self._split)

    def image(self, index: int) -> Image.Image:
        """The chosen view of an image."""
        draws = generator(0, self._split.digest(index), "view", self._chosen[index])
        return crop_flip(self._split.image(index), self._backbone.image_size, draws)

    def digest(self, index: int) -> str:
        """Of the image and the view."""
        return f"{self._split.digest(index)}-crop_flip-{self._chosen[index]}"

    def pixels(self, rows: Tensor) -> list[Tensor]:
        """The pixels of the images at ``rows (B,)``, cropped and flipped anew in every call."""
        images = self.ahead.take(rows.tolist())
        cut = [crop_flip(image, self._backbone.image_size, self._anew) for image in images]
        return [self._backbone.pixels(image) for image in cut]
