"""Image features on the client's disk: the frozen tower sees each image once.

Promise 4 of the protocol asks for the same bits whichever images are already kept. Two things are done for it: every
batch has the same size (missing rows are zero), since the kernels of a matrix product depend on its shape; and only
those places of the batch are used at which the same image gives the same feature bit for bit (measured once per
backbone), since a row's bits may depend on its place too. What else may change bits (device, torch version, threads)
is part of the folder's name.
"""

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.fingerprint import config_digest
from promptfed.shared.files import write_whole

BATCH = 32
SHARD_SUFFIX = ".safetensors"
SLOTS_FILE = "slots.json"
PROBE_SEED = 20_240_301


class ImageSplit(Protocol):
    """What the cache needs of a data split."""

    def __len__(self) -> int: ...

    def image(self, index: int, /) -> Any:
        """The PIL image."""

    def digest(self, index: int, /) -> str:
        """A digest of the image's content, as text."""


@dataclass
class _Folder:
    """What this process knows of one folder of files."""

    path: Path
    rows: dict[str, tuple[Tensor, str]] = field(default_factory=dict)  # image digest -> feature, file name
    seen: set[str] = field(default_factory=set)
    slots: list[int] | None = None


class FeatureCache:
    """Float32 image features under `root`, normalised with their lengths, keyed by backbone, transform and image.

    A file holds one batch, is named by the digest of its bytes and appears by rename, so that several processes can
    share the folder; a file that does not match its name is dropped and its images are computed again. With
    `max_bytes` the files that were not used for longest are deleted first. `images_computed` counts the images that
    went through the tower.
    """

    def __init__(self, root: Path, *, max_bytes: int | None = None) -> None:
        self._root = Path(root)
        self._max_bytes = max_bytes
        self._folders: dict[str, _Folder] = {}
        self._lock = threading.Lock()
        self.images_computed = 0

    def features(self, backbone: Backbone, split: ImageSplit, *, indices: Sequence[int] | None = None) -> Tensor:
        """`(N, d_e)` normalised, on the CPU, of all images of the split or of those at `indices`, in that order."""
        return self._rows(backbone, split, indices)[:, :-1].contiguous()

    def raw_features(self, backbone: Backbone, split: ImageSplit, *, indices: Sequence[int] | None = None) -> Tensor:
        """The same features as the tower gives them, not normalised."""
        rows = self._rows(backbone, split, indices)
        return rows[:, :-1] * rows[:, -1:]

    def _rows(self, backbone: Backbone, split: ImageSplit, indices: Sequence[int] | None) -> Tensor:
        """`(N, d_e + 1)`: normalised features, each with the length that it had before."""
        wanted = range(len(split)) if indices is None else indices
        digests = [split.digest(index) for index in wanted]
        with self._lock:
            folder = self._folder(backbone)
            if any(digest not in folder.rows for digest in digests):
                _read_new_files(folder)
            place = {digest: index for digest, index in zip(digests, wanted, strict=True) if digest not in folder.rows}
            missing = list(place)
            while missing:
                slots = self._slots(backbone, folder)
                part, missing = missing[: len(slots)], missing[len(slots) :]
                images = torch.stack([backbone.preprocess(split.image(place[digest])) for digest in part])
                rows = _encode(backbone, images, slots)
                self.images_computed += len(part)
                _write_file(folder, dict(zip(part, rows, strict=True)))
            located = [folder.rows[digest] for digest in digests]
            if self._max_bytes is not None:
                self._shrink(folder, {name for _, name in located})
        return torch.stack([row for row, _ in located]) if located else torch.zeros(0, backbone.d_e + 1)

    def _folder(self, backbone: Backbone) -> _Folder:
        identity = {
            "fingerprint": backbone.fingerprint,
            "transform": backbone.transform_id,
            "compute": _compute_identity(backbone.device),
            "row": "normalised, length",
        }
        name = config_digest(identity).removeprefix("sha256:")
        if name not in self._folders:
            path = self._root / name
            path.mkdir(parents=True, exist_ok=True)
            self._folders[name] = _Folder(path)
        return self._folders[name]

    def _slots(self, backbone: Backbone, folder: _Folder) -> list[int]:
        """The largest set of places in a batch that agree bit for bit, measured once and kept beside the features."""
        if folder.slots is None:
            file = folder.path / SLOTS_FILE
            try:
                folder.slots = [int(slot) for slot in json.loads(file.read_text())]
            except (OSError, ValueError):
                folder.slots = agreeing_slots(backbone)
                write_whole(file, json.dumps(folder.slots).encode(), mode=0o600)
        return folder.slots

    def _shrink(self, folder: _Folder, used: Iterable[str]) -> None:
        assert self._max_bytes is not None
        for name in used:
            try:
                os.utime(folder.path / name)
            except OSError:  # deleted by another process: its rows are still held here
                continue
        files = [(stat.st_mtime_ns, stat.st_size, path) for path, stat in _stats(self._root.glob(f"*/*{SHARD_SUFFIX}"))]
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def agreeing_slots(backbone: Backbone) -> list[int]:
    """Places of a batch of 32 at which the same image gives the same bits: the largest such set."""
    generator = torch.Generator().manual_seed(PROBE_SEED)
    image = torch.randn(1, 3, *backbone.image_size, generator=generator)
    rows = backbone.encode_images(image.expand(BATCH, -1, -1, -1)).cpu()
    kinds = [row.numpy().tobytes() for row in rows]
    most_common = Counter(kinds).most_common(1)[0][0]
    return [slot for slot, kind in enumerate(kinds) if kind == most_common]


def _encode(backbone: Backbone, images: Tensor, slots: list[int]) -> Tensor:
    """`(k, d_e + 1)` features and lengths of k images at the first k slots of a batch that is zero elsewhere."""
    batch = torch.zeros(BATCH, *images.shape[1:])
    places = slots[: len(images)]
    batch[places] = images
    raw = backbone.encode_images(batch, normalize=False)
    lengths = torch.linalg.vector_norm(raw, dim=-1, keepdim=True)
    return torch.cat([F.normalize(raw, dim=-1), lengths], dim=1)[places].float().cpu()


def _compute_identity(device: torch.device) -> dict[str, Any]:
    """What, besides weights and image, may change the bits of a feature."""
    identity: dict[str, Any] = {
        "torch": torch.__version__,
        "device": device.type,
        "matmul": torch.get_float32_matmul_precision(),
        "batch": BATCH,
    }
    if device.type == "cpu":
        return identity | {"threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}
    return identity | {"name": torch.cuda.get_device_name(device)} if device.type == "cuda" else identity


def _read_new_files(folder: _Folder) -> None:
    for path in sorted(folder.path.glob(f"*{SHARD_SUFFIX}")):
        if path.name in folder.seen:
            continue
        try:
            data = path.read_bytes()
        except OSError:  # deleted by another process in the meantime
            continue
        if hashlib.sha256(data).hexdigest() + SHARD_SUFFIX != path.name:
            path.unlink(missing_ok=True)
            continue
        folder.seen.add(path.name)
        folder.rows.update({digest: (row, path.name) for digest, row in load_tensors(data).items()})


def _write_file(folder: _Folder, rows: dict[str, Tensor]) -> None:
    data = save_tensors({digest: row.contiguous() for digest, row in rows.items()})
    name = hashlib.sha256(data).hexdigest() + SHARD_SUFFIX
    write_whole(folder.path / name, data, mode=0o600)
    folder.seen.add(name)
    folder.rows.update({digest: (row, name) for digest, row in rows.items()})


def _stats(paths: Iterable[Path]) -> Iterable[tuple[Path, os.stat_result]]:
    for path in paths:
        try:
            yield path, path.stat()
        except OSError:  # deleted by another process in the meantime
            continue
