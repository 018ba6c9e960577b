"""A cache of rows of images on the client's disk: the frozen tower, or a part of it, processes each image once.

The bits of a row do not depend on which images are already cached (`slots`), nor on whether the row is computed or
read: rows are rounded to the stored type before their first use.
"""

import hashlib
import math
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from promptfed.shared import machine
from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.caches.slots import ImageSplit, batch_size, folder_name, kept_slots
from promptfed.shared.data.image_files import READERS
from promptfed.shared.data.readers import Request, readers
from promptfed.shared.files import write_whole
from promptfed.shared.tensors.transfer import host_memory, read_later

SHARD_SUFFIX = ".safetensors"
BLOCK = 1024  # rows that are held in one tensor
FILE_ROWS = 4096  # rows of a file, at most
FILE_BYTES = 1 << 26  # and its bytes, about
FILE_SECONDS = 30.0  # after which what is computed is written in any case
CHUNK = 8  # images that another process reads at a time
THREAD_CHUNK = 4  # and a thread: each time it ends it waits for the others
PART = 1 << 14  # rows that are tensors of their own at the same time, each of which takes more than its numbers

MOST_THREADED = 3  # processors that threads of one process keep busy

Done = Callable[[int], object]


def nothing(images: int) -> None:
    return None


@dataclass(frozen=True)
class CacheCost:
    """The cost of the missing rows: number of images, bytes on disk, and free bytes there."""

    images: int
    bytes: int
    free: int
    folder: Path

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.bytes <= self.free


class _Held:
    """Rows in memory by image digest, many in one tensor."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._blocks: list[Tensor] = []

    def __contains__(self, digest: object) -> bool:
        return digest in self._places

    def __getitem__(self, digest: str) -> Tensor:
        block, row = divmod(self._places[digest], BLOCK)
        return self._blocks[block][row]

    def add(self, digest: str, row: Tensor) -> None:
        """Hold a row that is not held yet."""
        block, place = divmod(len(self._places), BLOCK)
        if block == len(self._blocks):
            self._blocks.append(row.new_empty(BLOCK, *row.shape))
        self._blocks[block][place] = row
        self._places[digest] = BLOCK * block + place


@dataclass
class _Folder:
    """The rows of one backbone that this process knows."""

    path: Path
    files: dict[str, str] = field(default_factory=dict)  # image digest -> name of the file with its row
    seen: set[str] = field(default_factory=set)  # names of files
    held: _Held = field(default_factory=_Held)
    slots: list[int] | None = None

    def see_new_files(self) -> None:
        """Index the rows that other processes have written. A file that does not match its name is deleted."""
        for path in sorted(self.path.glob(f"*{SHARD_SUFFIX}")):
            if path.name in self.seen:
                continue
            try:
                with path.open("rb") as file:
                    whole = hashlib.file_digest(file, "sha256").hexdigest() + SHARD_SUFFIX == path.name
                if not whole:
                    path.unlink(missing_ok=True)
                    continue
                with safe_open(path, framework="pt") as tensors:
                    digests = list(tensors.keys())
            except (OSError, SafetensorError):  # deleted by another process in the meantime
                continue
            self._note(path.name, digests)

    def read(self, digests: Iterable[str]) -> dict[str, Tensor]:
        """The cached rows of ``digests``. Rows whose file is gone are left out and removed from the index."""
        by_file: dict[str, list[str]] = {}
        for digest in digests:
            if digest in self.files:
                by_file.setdefault(self.files[digest], []).append(digest)
        rows: dict[str, Tensor] = {}
        for name, wanted in by_file.items():
            try:
                with safe_open(self.path / name, framework="pt") as tensors:
                    rows.update({digest: tensors.get_tensor(digest) for digest in wanted})
            except (OSError, SafetensorError):
                self.files = {digest: file for digest, file in self.files.items() if file != name}
                self.seen.discard(name)
        return rows

    def write(self, rows: dict[str, Tensor]) -> str:
        """Write one file and return its name."""
        data = save_tensors({digest: row.contiguous() for digest, row in rows.items()})
        name = hashlib.sha256(data).hexdigest() + SHARD_SUFFIX
        write_whole(self.path / name, data, mode=0o600)
        self._note(name, rows)
        return name

    def touch(self, digests: Iterable[str]) -> None:
        """Set the time of use of the files of ``digests`` to now."""
        for name in {self.files[digest] for digest in digests if digest in self.files}:
            try:
                os.utime(self.path / name)
            except OSError:  # deleted by another process
                continue

    def _note(self, name: str, digests: Iterable[str]) -> None:
        self.seen.add(name)
        self.files.update(dict.fromkeys(digests, name))


class RowCache(ABC):
    """One kind of row under ``root``, keyed by backbone, transform and image.

    A file holds many batches, is named by the digest of its bytes and appears by rename, so that several processes can
    share the folder. A file that does not match its name is deleted and its images are computed again. With
    ``max_bytes`` the least recently used files are deleted; the newest file stays. Without ``keep`` nothing is written
    and the tower runs on every request. `images_computed` counts the images that the tower has processed.
    """

    dtype = torch.float16
    """The type in which rows are kept."""
    in_memory = False
    """Whether rows stay in memory once they were asked for."""

    def __init__(self, root: Path, *, keep: bool = True, max_bytes: int | None = None) -> None:
        self._root = Path(root)
        self._keep = keep
        self._max_bytes = max_bytes
        self._folders: dict[str, _Folder] = {}
        self._lock = threading.Lock()
        self.images_computed = 0

    @abstractmethod
    def about(self) -> dict[str, str]:
        """The kind of row; together with the backbone it identifies the folder."""

    @abstractmethod
    def shape(self, backbone: Backbone) -> tuple[int, ...]:
        """The shape of one row."""

    @abstractmethod
    def encode(self, backbone: Backbone, images: Tensor) -> Tensor:
        """Compute a row for each of the images `(B, 3, H, W)`."""

    def rows(self, backbone: Backbone, split: ImageSplit, indices: Sequence[int], done: Done = nothing) -> Tensor:
        """Rows `(B, *shape)` float32 on the CPU of the images at ``indices``, in that order.

        ``done`` is told how many images a batch had once it is computed. If it raises, what is computed is kept.
        """
        if not len(indices):
            return torch.zeros(0, *self.shape(backbone))
        whole = torch.empty(len(indices), *self.shape(backbone))
        with self._lock:
            folder = self._folder(backbone)
            for start in range(0, len(indices), PART):
                part = indices[start : start + PART]
                wanted = _by_digest(split, part)
                rows = {digest: folder.held[digest] for digest in wanted if digest in folder.held}
                rows |= self._compute(backbone, folder, split, self._missing(folder, _without(wanted, rows)), done)
                rows |= folder.read(_without(wanted, rows))
                rows |= self._compute(backbone, folder, split, _without(wanted, rows), done)  # deleted meanwhile
                if self.in_memory:
                    for digest in _without(wanted, folder.held):
                        folder.held.add(digest, rows[digest])
                if self._max_bytes is not None:
                    folder.touch(wanted)
                whole[start : start + PART] = torch.stack([rows[split.digest(index)] for index in part])
        return whole

    def fill(self, backbone: Backbone, split: ImageSplit, indices: Sequence[int], done: Done = nothing) -> None:
        """Compute the missing rows of the images at ``indices``, as `rows`. Does nothing if rows are not kept."""
        if self._keep:
            with self._lock:
                folder = self._folder(backbone)
                missing = self._missing(folder, _by_digest(split, indices))
                self._compute(backbone, folder, split, missing, done, hold=False)

    def cost(self, backbone: Backbone, splits: Iterable[ImageSplit]) -> CacheCost:
        """The cost of the missing rows of all images of ``splits``."""
        with self._lock:
            folder = self._folder(backbone)
            missing = {
                digest for split in splits for digest in self._missing(folder, _by_digest(split, range(len(split))))
            }
        count = len(missing) if self._keep else 0
        each = math.prod(self.shape(backbone)) * self.dtype.itemsize
        return CacheCost(count, count * each, shutil.disk_usage(folder.path).free, self._root)

    def _missing(self, folder: _Folder, wanted: dict[str, int]) -> dict[str, int]:
        """The images of ``wanted`` that are not cached yet."""
        if not self._keep:
            return wanted
        if _without(wanted, folder.files):
            folder.see_new_files()
        return _without(wanted, folder.files)

    def _compute(
        self,
        backbone: Backbone,
        folder: _Folder,
        split: ImageSplit,
        missing: dict[str, int],
        done: Done,
        hold: bool = True,
    ) -> dict[str, Tensor]:
        """Compute the missing rows and write them; returns them if they are to be held in memory."""
        held: dict[str, Tensor] = {}
        unwritten: dict[str, Tensor] = {}
        written, most = time.monotonic(), self._rows_of_a_file(backbone)

        def write() -> None:
            batch = dict(unwritten)
            unwritten.clear()
            if batch and self._keep:
                self._shrink(folder.path / folder.write(batch))

        try:
            for batch in self._batches(backbone, folder, split, missing):
                self.images_computed += len(batch)
                unwritten |= batch
                if len(unwritten) >= most or time.monotonic() - written > FILE_SECONDS:
                    write()
                    written = time.monotonic()
                if hold:
                    held |= batch
                done(len(batch))
        finally:
            write()
        return held

    def _batches(
        self, backbone: Backbone, folder: _Folder, split: ImageSplit, missing: dict[str, int]
    ) -> Iterator[dict[str, Tensor]]:
        """The missing rows. While the device has a batch, the one before is read back and the next ones are read."""
        if not missing:
            return
        encode = partial(self.encode, backbone)
        if folder.slots is None:
            folder.slots = kept_slots(folder.path, backbone, encode)
        slots, todo = folder.slots, list(missing)
        parts = [todo[start : start + len(slots)] for start in range(0, len(todo), len(slots))]
        before: list[tuple[list[str], Callable[[], Tensor]]] = []
        for part, pixels in zip(parts, _read_ahead(backbone, split, missing, parts, slots), strict=True):
            before.append((part, read_later(encode(pixels).float().to(self.dtype))))
            if len(before) > 1:
                yield _in_slots(*before.pop(0), slots)
        yield _in_slots(*before.pop(), slots)

    def _rows_of_a_file(self, backbone: Backbone) -> int:
        room = FILE_BYTES if self._max_bytes is None else min(FILE_BYTES, self._max_bytes // 4)
        return min(FILE_ROWS, room // (math.prod(self.shape(backbone)) * self.dtype.itemsize))

    def _folder(self, backbone: Backbone) -> _Folder:
        name = folder_name(backbone, **self.about())
        if name not in self._folders:
            path = self._root / name
            path.mkdir(parents=True, exist_ok=True)
            self._folders[name] = _Folder(path)
        return self._folders[name]

    def _shrink(self, newest: Path) -> None:
        """Delete the least recently used files until the rest, including ``newest``, fits ``max_bytes``."""
        if self._max_bytes is None:
            return
        total, files = 0, []
        for path in self._root.glob(f"*/*{SHARD_SUFFIX}"):
            try:
                about = path.stat()
            except OSError:  # deleted by another process in the meantime
                continue
            total += about.st_size
            files.append((about.st_mtime_ns, about.st_size, path))
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                break
            if path != newest:
                path.unlink(missing_ok=True)
                total -= size


def _in_slots(digests: list[str], read: Callable[[], Tensor], slots: list[int]) -> dict[str, Tensor]:
    return dict(zip(digests, read()[slots[: len(digests)]], strict=True))


def _read_ahead(
    backbone: Backbone, split: ImageSplit, places: dict[str, int], parts: Sequence[Sequence[str]], slots: list[int]
) -> Iterator[Tensor]:
    """Pixels `(batch_size, 3, H, W)` of each part in its slots; those of the next two are read meanwhile.

    Threads read them. If only the towers' device is busy, other processes read images from their files, where the
    threads of one would wait for each other.
    """
    expect = getattr(split, "expect", None)  # of images that other processes decode
    path, cut = getattr(split, "path", None), backbone.cut
    apart = apart_on(backbone.device) and cut is not None and path is not None
    shape = (batch_size(backbone.device), 3, *backbone.image_size)

    def read(batch: Tensor, images: Sequence[tuple[int, int]]) -> None:
        """Read ``images``, each a slot and its index."""
        files = [path(index) for _, index in images] if apart and path is not None else [None]
        if None not in files and cut is not None:
            settings = {"cut": asdict(cut), "paths": [str(file) for file in files]}
            body = readers().submit(Request("cut", settings=settings)).result().body
            if body:  # else an error, which reading it here tells
                pixels = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(-1, *shape[1:])
                batch[[slot for slot, _ in images]] = pixels
                return
        for slot, index in images:
            batch[slot] = backbone.pixels(split.image(index))

    with ThreadPoolExecutor(READERS, "images") as pool:

        def begin(number: int) -> tuple[Tensor, list[Future[None]]]:
            if expect is not None:
                expect([places[digest] for part in parts[number : number + 2] for digest in part])
            batch = host_memory(shape, torch.float32 if cut is None else torch.uint8, backbone.device).zero_()
            images = [(slot, places[digest]) for slot, digest in zip(slots, parts[number], strict=False)]
            size = CHUNK if apart else THREAD_CHUNK
            chunks = [images[start : start + size] for start in range(0, len(images), size)]
            return batch, [pool.submit(read, batch, chunk) for chunk in chunks]

        ahead = [begin(number) for number in range(min(2, len(parts)))]
        try:
            for number in range(len(parts)):
                batch, reading = ahead[0]
                for chunk in reading:
                    chunk.result()
                del ahead[0]
                if number + 2 < len(parts):
                    ahead.append(begin(number + 2))
                yield batch
        finally:
            for _, reading in ahead:
                for chunk in reading:
                    chunk.cancel()


def apart_on(device: torch.device) -> bool:
    """Whether other processes read images for a tower on ``device``: a CPU's tower needs the processors itself."""
    return device.type != "cpu" and machine.processors() > MOST_THREADED


def _by_digest(split: ImageSplit, indices: Sequence[int]) -> dict[str, int]:
    return {split.digest(index): index for index in indices}


def _without(wanted: dict[str, int], known: Container[str]) -> dict[str, int]:
    return {digest: index for digest, index in wanted.items() if digest not in known}
