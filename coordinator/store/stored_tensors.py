"""Tensors as blobs: stored from memory, and computed in temporary files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from promptfed.coordinator.store.blobs import PREFIX, Blobs, Held
from promptfed.shared.tensors import LARGE, Array, Arrays, Room, Shape, encode, encode_file, size_of


@dataclass(frozen=True)
class Stored:
    """A stored blob: its digest and its size in bytes."""

    digest: str
    size: int


def put_tensors(blobs: Blobs, held: Held, tensors: Arrays) -> Stored:
    """Store tensors durably as safetensors; small ones wait for ``Change.keep``."""
    if size_of(tensors) < LARGE:
        content = encode(tensors)
        return Stored(held.put(content), len(content))
    temporary = blobs.temporary()
    try:
        encode_file(tensors, temporary)
        with temporary.open("rb") as file:
            digest = PREFIX + hashlib.file_digest(file, "sha256").hexdigest()
        size = temporary.stat().st_size
        held.adopt(temporary, digest)
    finally:
        temporary.unlink(missing_ok=True)
    return Stored(digest, size)


@contextmanager
def room(blobs: Blobs) -> Iterator[Room]:
    """A block with tensors in temporary files, which are removed with the tensors."""
    made: list[Path] = []

    def allocate(shape: Shape, /, *, dtype: DTypeLike) -> Array:
        if not math.prod(shape):  # An empty file cannot be mapped.
            return np.empty(shape, dtype)
        path = blobs.temporary()
        made.append(path)
        return np.memmap(path, dtype, mode="w+", shape=shape).view(np.ndarray)

    try:
        yield allocate
    finally:
        for path in made:
            path.unlink(missing_ok=True)  # what is mapped stays for whoever has it
