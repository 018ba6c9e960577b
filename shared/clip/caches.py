"""Caches of frozen features, and the fixed batches that make their bits independent of what is cached."""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared import __version__, machine
from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.feature_files import DIGEST_NAME, SHARD_SUFFIX, FeatureFolder
from promptfed.shared.clip.fingerprint import config_digest
from promptfed.shared.clip.image_reading import Done, ImageSplit, nothing, read_ahead
from promptfed.shared.clip.slots import DEVICE_BATCH, Encode, compute_identity, kept_slots
from promptfed.shared.data.errors import DataError
from promptfed.shared.data.schemes import all_drawn
from promptfed.shared.service.reasons import why
from promptfed.shared.tensors.memory import in_parts
from promptfed.shared.tensors.transfer import read_later

log = logging.getLogger("promptfed.features")
NO_ROOM = (
    "the device has no room for the features of one image: take a smaller backbone, or let fewer clients share the GPU"
)


FILE_ROWS = 4096  # rows of a file, at most
FILE_BYTES = 1 << 26  # and its bytes, about
FILE_SECONDS = 30.0  # after which what is computed is written in any case
PART = 1 << 14  # rows that are tensors of their own at the same time, each of which takes more than its numbers
PATCHES = "patches"  # the folder beside that of the pooled features
OWN_BYTES = 64 << 20


def folder_name(backbone: Backbone, **more: str) -> str:
    """The folder for the rows of one backbone on one kind of machine; ``more`` names the kind of row."""
    identity = more | {
        "fingerprint": backbone.fingerprint,
        "transform": backbone.transform_id,
        "compute": compute_identity(backbone.device),
    }
    return config_digest(identity).removeprefix("sha256:")


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
        self._folders: dict[str, FeatureFolder] = {}
        self._lock = threading.Lock()
        self._at_once = DEVICE_BATCH  # images that pass the tower together; fewer once a device had no room
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
                index_of = _by_digest(split, part)
                rows = {digest: folder.held[digest] for digest in index_of if digest in folder.held}
                rows |= self._compute(backbone, folder, split, self._missing(folder, _without(index_of, rows)), done)
                rows |= folder.read(_without(index_of, rows))
                rows |= self._compute(backbone, folder, split, _without(index_of, rows), done)  # deleted meanwhile
                if self.in_memory:
                    for digest in _without(index_of, folder.held):
                        folder.held.add(digest, rows[digest])
                if self._max_bytes is not None:
                    folder.touch(index_of)
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

    def _missing(self, folder: FeatureFolder, wanted: dict[str, int]) -> dict[str, int]:
        """The images of ``wanted`` that are not cached yet."""
        if not self._keep:
            return wanted
        if _without(wanted, folder.files):
            folder.see_new_files()
        return _without(wanted, folder.files)

    def _compute(
        self,
        backbone: Backbone,
        folder: FeatureFolder,
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
        self, backbone: Backbone, folder: FeatureFolder, split: ImageSplit, missing: dict[str, int]
    ) -> Iterator[dict[str, Tensor]]:
        """The missing rows. While the device has a batch, the one before is read back and the next ones are read."""
        if not missing:
            return
        encode = partial(self._in_memory, partial(self.encode, backbone))
        if folder.slots is None:
            folder.slots = kept_slots(folder.path, backbone, encode)
        slots, todo = folder.slots, list(missing)
        parts = [todo[start : start + len(slots)] for start in range(0, len(todo), len(slots))]
        before: list[tuple[list[str], Callable[[], Tensor]]] = []
        for part, pixels in zip(parts, read_ahead(backbone, split, missing, parts, slots), strict=True):
            before.append((part, read_later(encode(pixels).float().to(self.dtype))))
            if len(before) > 1:
                yield _in_slots(*before.pop(0), slots)
        yield _in_slots(*before.pop(), slots)

    def _in_memory(self, encode: Encode, images: Tensor) -> Tensor:
        """``encode(images)``, in parts if the device has no room for all: rows are then the same but for rounding."""

        def encoded(at_once: int) -> Tensor:
            rows = [encode(part) for part in torch.split(images, at_once)]
            return rows[0] if len(rows) == 1 else torch.cat(rows)

        def smaller(at_once: int) -> None:
            self._at_once = at_once
            log.warning("the device ran out of memory: %d images pass its tower at once now", at_once)

        return in_parts(encoded, min(self._at_once, len(images)), smaller, torch.OutOfMemoryError(NO_ROOM))

    def _rows_of_a_file(self, backbone: Backbone) -> int:
        room = FILE_BYTES if self._max_bytes is None else min(FILE_BYTES, self._max_bytes // 4)
        return min(FILE_ROWS, room // (math.prod(self.shape(backbone)) * self.dtype.itemsize))

    def _folder(self, backbone: Backbone) -> FeatureFolder:
        name = folder_name(backbone, **self.about())
        if name not in self._folders:
            try:
                self._folders[name] = FeatureFolder(machine.own_folder(self._root / name))
            except OSError as error:
                raise DataError(f"features cannot be kept in {self._root}: {why(error)}.") from None
        return self._folders[name]

    def _shrink(self, newest: Path) -> None:
        """Delete the least recently used files until the rest, including ``newest``, fits ``max_bytes``."""
        if self._max_bytes is None:
            return
        total, files = 0, []
        for path in self._root.glob(f"{DIGEST_NAME}/{DIGEST_NAME}{SHARD_SUFFIX}"):
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


def _by_digest(split: ImageSplit, indices: Sequence[int]) -> dict[str, int]:
    return {split.digest(index): index for index in indices}


def _without(wanted: dict[str, int], known: Container[str]) -> dict[str, int]:
    return {digest: index for digest, index in wanted.items() if digest not in known}


class PatchCache(RowCache):
    """Normalised patch features `(M, d_e)` in float16: 200 kB per image with ViT-B/16 (196 × 512 numbers)."""

    def about(self) -> dict[str, str]:
        return {}

    def shape(self, backbone: Backbone) -> tuple[int, ...]:
        return backbone.patch_tokens or 0, backbone.d_e

    def encode(self, backbone: Backbone, images: Tensor) -> Tensor:
        return backbone.encode_patches(images)


class FeatureCache(RowCache):
    """Pooled features in float32, normalised and followed by their length `(d_e + 1,)`, and the cache of ``patches``.

    ``max_bytes`` bounds the pooled features; ``patches`` have no bound.
    """

    dtype = torch.float32
    in_memory = True

    def __init__(self, root: Path, *, max_bytes: int | None = None) -> None:
        super().__init__(root, max_bytes=max_bytes)
        self.patches = PatchCache(self._root / PATCHES)

    def about(self) -> dict[str, str]:
        return {"row": "normalised, length"}

    def shape(self, backbone: Backbone) -> tuple[int, ...]:
        return (backbone.d_e + 1,)

    def encode(self, backbone: Backbone, images: Tensor) -> Tensor:
        raw = backbone.encode_images(images, normalize=False)
        lengths = torch.linalg.vector_norm(raw, dim=-1, keepdim=True)
        return torch.cat([F.normalize(raw, dim=-1), lengths], dim=1)

    def features(
        self, backbone: Backbone, split: ImageSplit, *, indices: Sequence[int] | None = None, done: Done = nothing
    ) -> Tensor:
        """Normalised features `(N, d_e)` on the CPU of all images, or of those at ``indices`` in that order.

        ``done``: see `rows`.
        """
        rows = self.rows(backbone, split, range(len(split)) if indices is None else indices, done)
        return rows[:, :-1].contiguous()

    def raw_features(
        self, backbone: Backbone, split: ImageSplit, *, indices: Sequence[int] | None = None, done: Done = nothing
    ) -> Tensor:
        """The same features without normalisation."""
        rows = self.rows(backbone, split, range(len(split)) if indices is None else indices, done)
        return rows[:, :-1] * rows[:, -1:]


def features_in(given: Path | None, usual: Path, uris: Iterable[str], patches: bool = False) -> FeatureCache:
    """The cache in the folder ``given``, or in the ``usual`` one.

    If all data are embedded pictures and no folder is given, it is one in the user's own cache, bounded by
    ``OWN_BYTES``: each run of a demo would encode them again. With ``patches``, which take far more, it is not used.
    """
    if given is None and not patches and all_drawn(uris):
        with suppress(OSError, RuntimeError):  # no home, or none that can be written to
            folder = machine.own_folder(machine.user_cache("features") / __version__)
            if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > OWN_BYTES:
                return FeatureCache(folder, max_bytes=OWN_BYTES)
    return FeatureCache(given or usual)
