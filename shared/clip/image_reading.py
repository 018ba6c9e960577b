"""Images of a split as pixels, read by threads or other processes while the towers' device computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from promptfed.shared import machine
from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.slots import batch_size
from promptfed.shared.data.image_files import READERS
from promptfed.shared.data.readers import Answer, Request, readers
from promptfed.shared.tensors.transfer import host_memory

log = logging.getLogger("promptfed.features")
CHUNK = 8  # images that another process reads at a time
THREAD_CHUNK = 4  # and a thread: each time it ends it waits for the others
MOST_THREADED = 3  # processors that threads of one process keep busy
Done = Callable[[int], object]
Reading = tuple[Future[Any], Callable[[Any], object]]  # of some images, and what is done with the result
_told: set[str] = set()


class ImageSplit(Protocol):
    """The interface of a data split for the cache."""

    def __len__(self) -> int: ...

    def image(self, index: int, /) -> Any:
        """The PIL image."""

    def digest(self, index: int, /) -> str:
        """A digest of the image's content, as text."""


def nothing(result: object) -> None:
    return None


def read_ahead(
    backbone: Backbone, split: ImageSplit, places: dict[str, int], parts: Sequence[Sequence[str]], slots: list[int]
) -> Iterator[Tensor]:
    """Pixels `(batch_size, 3, H, W)` of each part in its slots; those of the next two are read meanwhile.

    Threads read them. If only the towers' device is busy, other processes read images from their files, where the
    threads of one would wait for each other.
    """
    path, scale, cut = getattr(split, "path", None), getattr(split, "scale", None), backbone.cut
    shape = (batch_size(backbone.device), 3, *backbone.image_size)

    def read(batch: Tensor, images: Sequence[tuple[int, int]]) -> None:
        """Read ``images``, each a slot and its index."""
        for slot, index in images:
            batch[slot] = backbone.pixels(split.image(index))

    def begin_apart(batch: Tensor, images: Sequence[tuple[int, int]], files: Sequence[Path]) -> Reading:
        """Have another process read them into ``batch``."""
        assert cut is not None
        digests = [split.digest(index) for _, index in images]
        greys = [scale(index) if scale is not None else None for _, index in images]
        settings = {"cut": asdict(cut), "paths": list(map(str, files)), "digests": digests, "greys": greys}
        slots = [slot for slot, _ in images]
        place = batch[slots[0] : slots[0] + len(slots)] if slots[-1] - slots[0] < len(slots) else None
        pixels = batch.new_empty(len(slots), *shape[1:]) if place is None else place

        def end(answer: Answer) -> None:
            if answer.error is not None:
                read(batch, images)  # tells which file it is
                if answer.error not in _told:  # it was not the file: this process reads all of them
                    _told.add(answer.error)
                    log.warning("another process could not read images, which takes longer here: %s", answer.error)
            elif place is None:
                batch[slots] = pixels

        return readers().submit(Request("cut", settings=settings), pixels.numpy().data.cast("B")), end

    def begin(number: int) -> tuple[Tensor, list[Reading]]:
        batch = host_memory(shape, torch.float32 if cut is None else torch.uint8, backbone.device)
        images = [(slot, places[digest]) for slot, digest in zip(slots, parts[number], strict=False)]
        if len(images) < len(batch):
            batch.zero_()
        apart = apart_on(backbone.device) and cut is not None and path is not None
        size = CHUNK if apart else THREAD_CHUNK
        reading: list[Reading] = []
        for start in range(0, len(images), size):
            chunk = images[start : start + size]
            files = [file for _, index in chunk if (file := path(index))] if apart and path is not None else []
            if len(files) == len(chunk):
                reading.append(begin_apart(batch, chunk, files))
            else:
                reading.append((pool.submit(read, batch, chunk), nothing))
        return batch, reading

    with ThreadPoolExecutor(READERS, "images") as pool:
        ahead = [begin(number) for number in range(min(2, len(parts)))]
        try:
            for number in range(len(parts)):
                batch, reading = ahead[0]
                for chunk, end in reading:
                    end(chunk.result())
                del ahead[0]
                if number + 2 < len(parts):
                    ahead.append(begin(number + 2))
                yield batch
        finally:
            for _, reading in ahead:
                for chunk, _ in reading:
                    chunk.cancel()


def apart_on(device: torch.device) -> bool:
    """Whether other processes read images for a tower on ``device``: a CPU's tower needs the processors itself."""
    return device.type != "cpu" and machine.processors() > MOST_THREADED
