"""Tensors as blobs, and tensors in temporary files; large ones are never in memory as a whole."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from promptfed.coordinator.store.blobs import PREFIX, Blobs, Held
from promptfed.shared.methods.core.sizes import LARGE
from promptfed.shared.tensors import Shape, Tensors, encode, encode_file, size_of

Room = Callable[..., Tensor]
"""Allocates a tensor of a shape, float32 unless ``dtype`` is given."""


@dataclass(frozen=True)
class Stored:
    """A stored blob: its digest and its size in bytes."""

    digest: str
    size: int


def put_tensors(blobs: Blobs, held: Held, tensors: Tensors) -> Stored:
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

    def allocate(shape: Shape, *, dtype: torch.dtype = torch.float32) -> Tensor:
        path = blobs.temporary()
        made.append(path)
        flat = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype)
        return flat.reshape(shape)

    try:
        yield allocate
    finally:
        for path in made:
            path.unlink(missing_ok=True)  # what is mapped stays for whoever has it
