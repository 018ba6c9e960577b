"""Caches of frozen features, and the fixed batches that make their bits independent of what is cached."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared import __version__, machine
from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.fingerprint import config_digest
from promptfed.shared.data.errors import DataError
from promptfed.shared.data.image_files import READERS
from promptfed.shared.data.readers import Answer, Request, readers
from promptfed.shared.data.schemes import all_drawn
from promptfed.shared.files import write_whole
from promptfed.shared.service.reasons import why
from promptfed.shared.tensors.transfer import host_memory, read_later

log = logging.getLogger("promptfed.features")

BATCH = 32  # images of a batch on a CPU
DEVICE_BATCH = 256  # and elsewhere
SLOTS_FILE = "slots.json"
PROBE_SEED = 20_240_301

Encode = Callable[[Tensor], Tensor]
"""What a cache keeps of a batch of images `(batch_size, 3, H, W)` or their pixels: a tensor with a row for each."""

SHARD_SUFFIX = ".safetensors"
DIGEST_NAME = "[0-9a-f]" * 64  # of our folders and files, as a pattern: others are left alone
BLOCK = 1024  # rows that are held in one tensor
FILE_ROWS = 4096  # rows of a file, at most
FILE_BYTES = 1 << 26  # and its bytes, about
FILE_SECONDS = 30.0  # after which what is computed is written in any case
CHUNK = 8  # images that another process reads at a time
THREAD_CHUNK = 4  # and a thread: each time it ends it waits for the others
PART = 1 << 14  # rows that are tensors of their own at the same time, each of which takes more than its numbers
MOST_THREADED = 3  # processors that threads of one process keep busy
Done = Callable[[int], object]
Reading = tuple[Future[Any], Callable[[Any], object]]  # of some images, and what is done with the result
_told: set[str] = set()
PATCHES = "patches"  # the folder beside that of the pooled features
OWN_BYTES = 64 << 20


class ImageSplit(Protocol):
    """The interface of a data split for the cache."""

    def __len__(self) -> int: ...

    def image(self, index: int, /) -> Any:
        """The PIL image."""

    def digest(self, index: int, /) -> str:
        """A digest of the image's content, as text."""


def batch_size(device: torch.device) -> int:
    """How many images go through a tower together. Bits depend on it, so that it is the same for every batch."""
    return BATCH if device.type == "cpu" else DEVICE_BATCH


def folder_name(backbone: Backbone, **more: str) -> str:
    """The folder for the rows of one backbone on one kind of machine; ``more`` names the kind of row."""
    identity = more | {
        "fingerprint": backbone.fingerprint,
        "transform": backbone.transform_id,
        "compute": _compute_identity(backbone.device),
    }
    return config_digest(identity).removeprefix("sha256:")


def kept_slots(folder: Path, backbone: Backbone, encode: Encode) -> list[int]:
    """The largest set of places in a batch that agree bit for bit, measured once and stored in ``folder``."""
    file = folder / SLOTS_FILE
    try:
        return [int(slot) for slot in json.loads(file.read_text())]
    except (OSError, ValueError):
        slots = agreeing_slots(backbone, encode)
        write_whole(file, json.dumps(slots).encode(), mode=0o600)
        return slots


def agreeing_slots(backbone: Backbone, encode: Encode | None = None) -> list[int]:
    """The largest set of places in a batch at which the same image gives the same bits.

    encode: by default the image tower.
    """
    encode = encode or backbone.encode_images
    generator = torch.Generator().manual_seed(PROBE_SEED)
    image = torch.randn(1, 3, *backbone.image_size, generator=generator)
    rows = encode(image.expand(batch_size(backbone.device), -1, -1, -1)).cpu()
    kinds = [hashlib.sha256(row.numpy().tobytes()).digest() for row in rows]
    most_common = Counter(kinds).most_common(1)[0][0]
    return [slot for slot, kind in enumerate(kinds) if kind == most_common]


def _compute_identity(device: torch.device) -> dict[str, Any]:
    """Everything besides weights and image that may change the bits of a feature."""
    identity: dict[str, Any] = {
        "torch": torch.__version__,
        "device": device.type,
        "matmul": torch.get_float32_matmul_precision(),
        "batch": batch_size(device),
    }
    if device.type == "cpu":
        return identity | {"threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}
    if device.type != "cuda":
        return identity
    return identity | {"name": torch.cuda.get_device_name(device), "tf32": torch.backends.cudnn.allow_tf32}


def nothing(result: object) -> None:
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
        for path in sorted(self.path.glob(DIGEST_NAME + SHARD_SUFFIX)):
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
        encode = partial(self._in_memory, partial(self.encode, backbone))
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

    def _in_memory(self, encode: Encode, images: Tensor) -> Tensor:
        """``encode(images)``, in parts if the device has no room for all: rows are then the same but for rounding."""
        while True:
            at_once = min(self._at_once, len(images))
            with suppress(torch.OutOfMemoryError):
                rows = [encode(part) for part in torch.split(images, at_once)]
                return rows[0] if len(rows) == 1 else torch.cat(rows)
            # Behind the block, so that nothing keeps the failed attempt's tensors.
            if at_once == 1:
                raise torch.OutOfMemoryError(
                    "the device has no room for the features of one image: take a smaller backbone, or let fewer "
                    "clients share the GPU"
                )
            self._at_once = at_once // 2
            log.warning("the device ran out of memory: %d images pass its tower at once now", self._at_once)

    def _rows_of_a_file(self, backbone: Backbone) -> int:
        room = FILE_BYTES if self._max_bytes is None else min(FILE_BYTES, self._max_bytes // 4)
        return min(FILE_ROWS, room // (math.prod(self.shape(backbone)) * self.dtype.itemsize))

    def _folder(self, backbone: Backbone) -> _Folder:
        name = folder_name(backbone, **self.about())
        if name not in self._folders:
            try:
                self._folders[name] = _Folder(machine.own_folder(self._root / name))
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


def _read_ahead(
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
            own = machine.own_folder(machine.user_cache("features") / __version__)
            if os.access(own, os.W_OK) and shutil.disk_usage(own).free > OWN_BYTES:
                return FeatureCache(own, max_bytes=OWN_BYTES)
    return FeatureCache(given or usual)
