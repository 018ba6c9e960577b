"""Tensors on the wire and on disk: safetensors, float32, never pickle; and the hash that names a state."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from promptfed.shared.canonical import canonical_json, each_key_once

Tensors = dict[str, Tensor]
Shape = tuple[int, ...]

METADATA_KEY = "promptfed"
MAX_HEADER_BYTES = 1_000_000
CHUNK = 1 << 14  # entries that are worked on together: what is made of them in float64 fits a processor's cache
UNREADABLE = (SafetensorError, KeyError, TypeError, ValueError, OverflowError, RuntimeError)
SERVER = "server."  # before the names of what a server optimizer keeps in a global state
DTYPES = {"float32": torch.float32, "int64": torch.int64, "bfloat16": torch.bfloat16}


class TensorError(ValueError):
    """Tensors that are not what was asked for. ``kind`` names the refusal (the last part of the problem type)."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a state or message: name, symbolic shape such as ``("m", "d_t")``, dtype.

    ``shared_with_clients`` says whether clients may see this tensor of the global state.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: str = "float32"
    shared_with_clients: bool = True

    def resolve(self, dims: Mapping[str, int]) -> Shape:
        """The shape in numbers, with symbols looked up in ``dims``. Raises KeyError for an unknown symbol."""
        return tuple(dims[size] if isinstance(size, str) else size for size in self.shape)


def method_part(state: Tensors) -> Tensors:
    """A global state without the moments of a server optimizer, which are nobody's to learn from."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(SERVER)}


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """``sha256:<hex>`` over name, dtype, shape and little-endian bytes of each tensor in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        header = f"{name}|{str(tensor.dtype).removeprefix('torch.')}|{','.join(map(str, tensor.shape))}|"
        digest.update(header.encode())
        array = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
        if sys.byteorder == "big" and tensor.numel():
            array = array.reshape(-1, tensor.element_size()).flip(1).contiguous()
        digest.update(array.numpy().data)  # as they lie in memory: no copy
    return "sha256:" + digest.hexdigest()


def encode(tensors: Mapping[str, Tensor], metadata: object | None = None) -> bytes:
    """Safetensors bytes; ``metadata`` becomes canonical JSON under the one key ``promptfed``."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    return safetensors.torch.save(ready, {METADATA_KEY: canonical_json(metadata)} if metadata is not None else None)


def encode_file(tensors: Mapping[str, Tensor], path: Path, metadata: object | None = None) -> None:
    """Writes the bytes of ``encode`` to a file; they never lie in memory as a whole."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    about = {METADATA_KEY: canonical_json(metadata)} if metadata is not None else None
    safetensors.torch.save_file(ready, path, about)


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all entries."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def decode(body: bytes) -> tuple[Tensors, object | None]:
    """Tensors and metadata of safetensors bytes.

    Raises:
        TensorError: ``not-safetensors`` for anything that is not a whole, well-formed safetensors file,
            ``header-too-large`` for a header over 1 MB, ``bad-metadata`` where the metadata is not JSON.
    """
    metadata = _metadata(body[: 8 + MAX_HEADER_BYTES], len(body))
    try:
        return safetensors.torch.load(body), metadata
    except UNREADABLE as error:
        raise TensorError("not-safetensors", f"the body is not a safetensors file: {error}") from None


def decode_file(path: Path) -> tuple[Tensors, object | None]:
    """As ``decode``, of a file. The tensors are mapped, not read: they take no memory that the system cannot have back.

    Raises:
        TensorError: as ``decode``.
    """
    with path.open("rb") as file:
        metadata = _metadata(file.read(8 + MAX_HEADER_BYTES), path.stat().st_size)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except UNREADABLE as error:
        raise TensorError("not-safetensors", f"the body is not a safetensors file: {error}") from None


def decode_place(place: bytes | Path) -> tuple[Tensors, object | None]:
    """As ``decode`` of bytes, or as ``decode_file``. Raises TensorError."""
    return decode(place) if isinstance(place, bytes) else decode_file(place)


def _metadata(body: bytes, size: int) -> object | None:
    """What a body of ``size`` bytes says about itself, in its first ones."""
    if size < 8:
        raise TensorError("not-safetensors", "the body is not a safetensors file: shorter than its length field")
    length = int.from_bytes(body[:8], "little")
    if length > size - 8:
        raise TensorError("not-safetensors", "the body is not a safetensors file: its header is cut off")
    if length > MAX_HEADER_BYTES:
        raise TensorError("header-too-large", f"the header has {length} bytes; {MAX_HEADER_BYTES} are allowed")
    try:
        header = json.loads(body[8 : 8 + length], object_pairs_hook=each_key_once)
        metadata = header.get("__metadata__") if isinstance(header, dict) else None
    except (ValueError, RecursionError) as error:
        raise TensorError("not-safetensors", f"the body is not a safetensors file: {error}") from None
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or set(metadata) != {METADATA_KEY} or not isinstance(metadata[METADATA_KEY], str):
        raise TensorError("bad-metadata", f"the metadata must have the one key {METADATA_KEY!r}, holding JSON")
    try:
        value: object = json.loads(metadata[METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise TensorError("bad-metadata", f"the metadata under {METADATA_KEY!r} is not JSON: {error}") from None
    return value


def check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[Shape, str]]) -> float:
    """Refuse tensors that differ from ``expected`` (name -> shape, dtype) or hold NaN or infinity; their ``norm``.

    Raises:
        TensorError: ``unknown-tensor``, ``missing-tensor``, ``wrong-shape``, ``wrong-dtype`` or ``not-finite``,
            in this order over all tensors.
    """
    _refuse("unknown-tensor", "was not asked for", sorted(set(tensors) - set(expected)), expected)
    _refuse("missing-tensor", "is missing", sorted(set(expected) - set(tensors)), expected)
    for name, (shape, _) in sorted(expected.items()):
        if tuple(tensors[name].shape) != shape:
            sent = tuple(tensors[name].shape)
            raise TensorError("wrong-shape", f"tensor {name!r} has shape {sent}; expected {shape}")
    for name, (_, dtype) in sorted(expected.items()):
        if tensors[name].dtype != DTYPES[dtype]:
            kind = str(tensors[name].dtype).removeprefix("torch.")
            raise TensorError("wrong-dtype", f"tensor {name!r} is {kind}; {dtype} was asked for")
    size = norm(tensors)
    if not math.isfinite(size):  # One look at each entry does: in float64 no square of a finite one overflows.
        name = next(name for name in sorted(expected) if not bool(torch.isfinite(tensors[name]).all()))
        raise TensorError("not-finite", f"tensor {name!r} holds NaN or infinity")
    return size


def _refuse(kind: str, fault: str, names: Iterable[str], expected: Mapping[str, object]) -> None:
    for name in names:
        wanted = ", ".join(sorted(expected)) or "none"
        raise TensorError(kind, f"tensor {name[:100]!r} {fault}; expected tensors: {wanted}")


def norm(tensors: Mapping[str, Tensor]) -> float:
    """L2 norm over all entries of all tensors, in float64."""
    parts = (part for tensor in tensors.values() for part in chunks(tensor))
    return float(sum(float(part.double().square().sum()) for part in parts) ** 0.5)


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The entries of ``tensor`` in order, as views of up to ``CHUNK`` of them where it is contiguous."""
    return iter(torch.split(tensor.reshape(-1), CHUNK))
