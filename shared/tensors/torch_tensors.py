"""The torch view of `tensors`: the same functions for clients, which train with torch. No entry is copied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from promptfed.shared import tensors
from promptfed.shared.tensors import Array, Arrays, Shape, Tensors

BFLOAT16 = tensors.DTYPES["bfloat16"]
DTYPES = {"float32": torch.float32, "int64": torch.int64, "bfloat16": torch.bfloat16}


def tensor_of(array: Array) -> Tensor:
    """``array`` as a tensor that shares its memory; a copy if it cannot be written."""
    writable = np.require(array, requirements=["C", "W"])
    if array.dtype == BFLOAT16:  # which numpy does not know
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(writable)


def array_of(tensor: Tensor) -> Array:
    """``tensor`` as an array, which shares its memory on a CPU."""
    ready = tensor.detach().cpu().contiguous()
    if ready.dtype == torch.bfloat16:
        return ready.view(torch.int16).numpy().view(BFLOAT16)
    array: Array = ready.numpy()
    return array


def tensors_of(arrays: Mapping[str, Array]) -> Tensors:
    """Tensors of arrays by name."""
    return {name: tensor_of(array) for name, array in arrays.items()}


def arrays_of(given: Mapping[str, Tensor]) -> Arrays:
    """Arrays of tensors by name."""
    return {name: array_of(tensor) for name, tensor in given.items()}


def encode(given: Mapping[str, Tensor], metadata: object | None = None) -> bytes:
    """As `tensors.encode`."""
    return tensors.encode(arrays_of(given), metadata)


def decode(body: bytes) -> tuple[Tensors, object | None]:
    """As `tensors.decode`."""
    arrays, metadata = tensors.decode(body)
    return tensors_of(arrays), metadata


def decode_place(place: bytes | Path) -> tuple[Tensors, object | None]:
    """As `tensors.decode_place`."""
    arrays, metadata = tensors.decode_place(place)
    return tensors_of(arrays), metadata


def encode_file(given: Mapping[str, Tensor], path: Path, metadata: object | None = None) -> None:
    """As `tensors.encode_file`."""
    tensors.encode_file(arrays_of(given), path, metadata)


def check(given: Mapping[str, Tensor], expected: Mapping[str, tuple[Shape, str]]) -> float:
    """As `tensors.check`."""
    return tensors.check(arrays_of(given), expected)


def state_hash(given: Mapping[str, Tensor]) -> str:
    """As `tensors.state_hash`."""
    return tensors.state_hash(arrays_of(given))


class TorchDraws(torch.Generator):
    """The draws of clients and of what a coordinator computes with torch, as a ``torch.Generator``."""

    xp = torch

    def uniform(self, *shape: int) -> Tensor:
        """``shape`` float32, uniform in [0, 1)."""
        return torch.rand(shape, generator=self)

    def normal(self, *shape: int) -> Tensor:
        """``shape`` float32 from N(0, 1)."""
        return torch.randn(shape, generator=self)

    def permutation(self, size: int) -> list[int]:
        """The numbers below ``size`` in a random order."""
        order: list[int] = torch.randperm(size, generator=self).tolist()
        return order
