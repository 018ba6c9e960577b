"""Files of features, by the digests of their images, and the rows of them that are in memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from promptfed.shared.files import write_whole

SHARD_SUFFIX = ".safetensors"
DIGEST_NAME = "[0-9a-f]" * 64  # of our folders and files, as a pattern: others are left alone
BLOCK = 1024  # rows that are held in one tensor


class Held:
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
class FeatureFolder:
    """The rows of one backbone that this process knows."""

    path: Path
    files: dict[str, str] = field(default_factory=dict)  # image digest -> name of the file with its row
    seen: set[str] = field(default_factory=set)  # names of files
    held: Held = field(default_factory=Held)
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
                    path.unlink()
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
