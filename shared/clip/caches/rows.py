"""A cache of rows of images on the client's disk: the frozen tower, or a part of it, processes each image once.

The bits of a row do not depend on which images are already cached (`slots`), nor on whether the row is computed or
read: rows are rounded to the stored type before their first use.
"""

import hashlib
import math
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from promptfed.shared import machine
from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.caches.slots import ImageSplit, encode_in_slots, folder_name, kept_slots
from promptfed.shared.files import write_whole

READERS = min(8, machine.processors())  # threads that read images for a tower
SHARD_SUFFIX = ".safetensors"
BLOCK = 1024  # rows that are held in one tensor
PART = 1 << 14  # rows that are tensors of their own at the same time, each of which takes more than its numbers


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

    A file holds one batch, is named by the digest of its bytes and appears by rename, so that several processes can
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

    def rows(self, backbone: Backbone, split: ImageSplit, indices: Sequence[int]) -> Tensor:
        """Rows `(B, *shape)` float32 on the CPU of the images at ``indices``, in that order."""
        if not len(indices):
            return torch.zeros(0, *self.shape(backbone))
        whole = torch.empty(len(indices), *self.shape(backbone))
        with self._lock:
            folder = self._folder(backbone)
            missing = self._missing(folder, _without(_by_digest(split, indices), folder.held))
            computed = self._compute(backbone, folder, split, missing)
            for start in range(0, len(indices), PART):
                part = indices[start : start + PART]
                wanted = _by_digest(split, part)
                rows = {digest: folder.held[digest] for digest in wanted if digest in folder.held}
                rows |= {digest: computed[digest] for digest in _without(wanted, rows) if digest in computed}
                rows |= folder.read(_without(wanted, rows))
                rows |= self._compute(backbone, folder, split, _without(wanted, rows))  # deleted or damaged meanwhile
                if self.in_memory:
                    for digest in _without(wanted, folder.held):
                        folder.held.add(digest, rows[digest])
                if self._max_bytes is not None:
                    folder.touch(wanted)
                whole[start : start + PART] = torch.stack([rows[split.digest(index)] for index in part])
        return whole

    def fill(self, backbone: Backbone, split: ImageSplit, indices: Sequence[int]) -> None:
        """Compute the missing rows of the images at ``indices``. Does nothing if rows are not kept."""
        if self._keep:
            with self._lock:
                folder = self._folder(backbone)
                missing = self._missing(folder, _by_digest(split, indices))
                self._compute(backbone, folder, split, missing, hold=False)

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
        self, backbone: Backbone, folder: _Folder, split: ImageSplit, missing: dict[str, int], hold: bool = True
    ) -> dict[str, Tensor]:
        """Compute the missing rows and write them batch by batch; returns them if they are to be held in memory."""
        held: dict[str, Tensor] = {}
        encode = partial(self.encode, backbone)
        if not missing:
            return held
        if folder.slots is None:
            folder.slots = kept_slots(folder.path, backbone, encode)
        size, todo = len(folder.slots), list(missing)
        parts = [todo[start : start + size] for start in range(0, len(todo), size)]
        for part, images in zip(parts, _read_ahead(backbone, split, missing, parts), strict=True):
            computed = encode_in_slots(images, folder.slots, encode).to(self.dtype)
            self.images_computed += len(part)
            batch = dict(zip(part, computed, strict=True))
            if self._keep:
                self._shrink(folder.path / folder.write(batch))
            if hold:
                held |= batch
        return held

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


def _read_ahead(
    backbone: Backbone, split: ImageSplit, places: dict[str, int], parts: Sequence[Sequence[str]]
) -> Iterator[Tensor]:
    """Preprocessed images `(B, 3, H, W)` of each part; those of the next are made while the tower has this one."""
    expect = getattr(split, "expect", None)  # of images that other processes decode

    def read(digest: str) -> Tensor:
        return backbone.preprocess(split.image(places[digest]))

    with ThreadPoolExecutor(READERS, "images") as pool:

        def begin(number: int) -> list[Future[Tensor]]:
            if expect is not None:
                expect([places[digest] for part in parts[number : number + 2] for digest in part])
            return [pool.submit(read, digest) for part in parts[number : number + 1] for digest in part]

        ahead = begin(0)
        try:
            for number in range(len(parts)):
                images = torch.stack([image.result() for image in ahead])
                ahead = begin(number + 1)
                yield images
        finally:
            for image in ahead:
                image.cancel()


def _by_digest(split: ImageSplit, indices: Sequence[int]) -> dict[str, int]:
    return {split.digest(index): index for index in indices}


def _without(wanted: dict[str, int], known: Container[str]) -> dict[str, int]:
    return {digest: index for digest, index in wanted.items() if digest not in known}
