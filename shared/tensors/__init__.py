"""Tensors on the wire and on disk: safetensors, float32, never pickle; and the hash that names a state.

They are numpy arrays here. `torch_tensors` has the same for torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from promptfed.shared.canonical import canonical_json, each_key_once
from promptfed.shared.tensors.arrays import double

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
Arrays = dict[str, Array]
Tensors = dict[str, "Tensor"]
Shape = tuple[int, ...]

BYTES_PER_SECOND = 1 << 20  # the slowest line that is reckoned with
LARGE = 16 << 20  # bytes from which tensors are worked on in files
METADATA_KEY = "promptfed"
MAX_HEADER_BYTES = 1_000_000
CHUNK = 1 << 14  # entries that are worked on together: what is made of them in float64 fits a processor's cache
UNREADABLE = (SafetensorError, KeyError, TypeError, ValueError, OverflowError, RuntimeError)
CHANGE = "change."  # prefix of tensors that clients send as changes, instead of new values
SERVER = "server."  # before the names of what a server optimizer keeps in a global state
DTYPES = {name: np.dtype(kind) for name, kind in (
    ("float32", np.float32), ("int64", np.int64), ("bfloat16", ml_dtypes.bfloat16), ("int8", np.int8),
)}  # fmt: skip
FILE_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16,
    "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
"""The dtypes of safetensors files that can be read, by the names in their headers."""


class TensorError(ValueError):
    """Tensors that are not what was asked for. ``kind`` names the refusal (the last part of the problem type)."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind

    def __reduce__(self) -> tuple[type[TensorError], tuple[str, str]]:
        return type(self), (self.kind, str(self))


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


class Room(Protocol):
    """Allocates an array of a shape, in memory (``np.empty``) or in a file."""

    def __call__(self, shape: Shape, /, *, dtype: Any) -> Array: ...


def method_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """A global state without the moments of a server optimizer, which are nobody's to learn from."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(SERVER)}


def state_hash(arrays: Mapping[str, Array]) -> str:
    """``sha256:<hex>`` over name, dtype, shape and little-endian bytes of each tensor in name order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}|{array.dtype.name}|{','.join(map(str, arrays[name].shape))}|".encode())
        if sys.byteorder == "big":
            array = array.byteswap()
        if array.size:
            digest.update(array.reshape(-1).view(np.uint8).data)  # as they lie in memory: no copy
    return "sha256:" + digest.hexdigest()


def encode(arrays: Mapping[str, Array], metadata: object | None = None) -> bytes:
    """Safetensors bytes; ``metadata`` becomes canonical JSON under the one key ``promptfed``."""
    return safetensors.numpy.save(_ready(arrays), _about(metadata))


def encode_file(arrays: Mapping[str, Array], path: Path, metadata: object | None = None) -> None:
    """Writes the bytes of ``encode`` to a file; they never lie in memory as a whole."""
    safetensors.numpy.save_file(_ready(arrays), path, _about(metadata))


def _ready(arrays: Mapping[str, Array]) -> Arrays:
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _about(metadata: object | None) -> dict[str, str] | None:
    return {METADATA_KEY: canonical_json(metadata)} if metadata is not None else None


def size_of(tensors: Mapping[str, Any]) -> int:
    """Bytes of all entries."""
    return sum(int(tensor.nbytes) for tensor in tensors.values())


def decode(body: bytes) -> tuple[Arrays, object | None]:
    """Tensors, in order of name, and metadata of safetensors bytes.

    Raises:
        TensorError: ``not-safetensors`` for anything that is not a whole, well-formed safetensors file,
            ``header-too-large`` for a header over 1 MB, ``bad-metadata`` where the metadata is not JSON.
    """
    _, metadata = _header(body[: 8 + MAX_HEADER_BYTES], len(body))
    try:
        # The library gives them in another order each time.
        parts = sorted(safetensors.deserialize(body), key=lambda part: part[0])  # type: ignore[no-untyped-call]
        arrays = {name: np.frombuffer(part["data"], _dtype(part["dtype"])) for name, part in parts}
        return {name: arrays[name].reshape(part["shape"]) for name, part in parts}, metadata
    except UNREADABLE as error:
        raise _unreadable(error) from None


def decode_file(path: Path) -> tuple[Arrays, object | None]:
    """As ``decode``, of a file. The tensors are mapped, not read: they take no memory that the system cannot have back.

    Raises:
        TensorError: as ``decode``.
    """
    with path.open("rb") as file:
        header, metadata = _header(file.read(8 + MAX_HEADER_BYTES), path.stat().st_size)
    try:
        with safe_open(path, framework="np") as checked:  # It checks that all offsets are sound.
            names = checked.keys()  # in order
        mapped = np.memmap(path, np.uint8, mode="c").view(np.ndarray)
        begin = path.stat().st_size - max((header[name]["data_offsets"][1] for name in names), default=0)
        return {name: _mapped(mapped, begin, header[name]) for name in names}, metadata
    except UNREADABLE as error:
        raise _unreadable(error) from None


def _mapped(mapped: NDArray[np.uint8], begin: int, about: Mapping[str, Any]) -> Array:
    first, last = about["data_offsets"]
    flat: Array = mapped[begin + first : begin + last].view(_dtype(about["dtype"]))
    return flat.reshape(about["shape"])


def _dtype(name: str) -> Any:
    if name not in FILE_DTYPES:
        raise ValueError(f"the dtype {name} is not supported")
    return FILE_DTYPES[name]


def _unreadable(error: Exception) -> TensorError:
    return TensorError("not-safetensors", f"the body is not a safetensors file: {error}")


def decode_place(place: bytes | Path) -> tuple[Arrays, object | None]:
    """As ``decode`` of bytes, or as ``decode_file``. Raises TensorError."""
    return decode(place) if isinstance(place, bytes) else decode_file(place)


def _header(body: bytes, size: int) -> tuple[dict[str, Any], object | None]:
    """The header of a body of ``size`` bytes, and the metadata in it."""
    if size < 8:
        raise TensorError("not-safetensors", "the body is not a safetensors file: shorter than its length field")
    length = int.from_bytes(body[:8], "little")
    if length > size - 8:
        raise TensorError("not-safetensors", "the body is not a safetensors file: its header is cut off")
    if length > MAX_HEADER_BYTES:
        raise TensorError("header-too-large", f"the header has {length} bytes; {MAX_HEADER_BYTES} are allowed")
    try:
        header = json.loads(body[8 : 8 + length], object_pairs_hook=each_key_once)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from None
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if metadata is None:
        return header, None
    if not isinstance(metadata, dict) or set(metadata) != {METADATA_KEY} or not isinstance(metadata[METADATA_KEY], str):
        raise TensorError("bad-metadata", f"the metadata must have the one key {METADATA_KEY!r}, holding JSON")
    try:
        value: object = json.loads(metadata[METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise TensorError("bad-metadata", f"the metadata under {METADATA_KEY!r} is not JSON: {error}") from None
    return header, value


def check(arrays: Mapping[str, Array], expected: Mapping[str, tuple[Shape, str]]) -> float:
    """Refuse tensors that differ from ``expected`` (name -> shape, dtype) or hold NaN or infinity; their ``norm``.

    Raises:
        TensorError: ``unknown-tensor``, ``missing-tensor``, ``wrong-shape``, ``wrong-dtype`` or ``not-finite``,
            in this order over all tensors.
    """
    _refuse("unknown-tensor", "was not asked for", sorted(set(arrays) - set(expected)), expected)
    _refuse("missing-tensor", "is missing", sorted(set(expected) - set(arrays)), expected)
    for name, (shape, _) in sorted(expected.items()):
        if tuple(arrays[name].shape) != shape:
            sent = tuple(arrays[name].shape)
            raise TensorError("wrong-shape", f"tensor {name!r} has shape {sent}; expected {shape}")
    for name, (_, dtype) in sorted(expected.items()):
        if arrays[name].dtype != DTYPES[dtype]:
            kind = arrays[name].dtype.name
            raise TensorError("wrong-dtype", f"tensor {name!r} is {kind}; {dtype} was asked for")
    size = norm(arrays)
    if not math.isfinite(size):  # One look at each entry does: in float64 no square of a finite one overflows.
        name = next(name for name in sorted(expected) if not np.isfinite(arrays[name]).all())
        raise TensorError("not-finite", f"tensor {name!r} holds NaN or infinity")
    return size


def _refuse(kind: str, fault: str, names: Iterable[str], expected: Mapping[str, object]) -> None:
    for name in names:
        names_expected = ", ".join(sorted(expected)) or "none"
        raise TensorError(kind, f"tensor {name[:100]!r} {fault}; expected tensors: {names_expected}")


def norm(tensors: Mapping[str, Any]) -> float:
    """L2 norm over all entries of all tensors, numpy's or torch's, in float64."""
    return math.sqrt(sum(sum_of_squares(tensor) for tensor in tensors.values()))


def sum_of_squares(tensor: Any) -> float:
    """Σ x² over all entries, in float64."""
    total = 0.0
    for part in chunks(tensor):
        wide = double(part)
        total += float((wide * wide).sum())
    return total


def chunks(tensor: Any) -> Iterator[Any]:
    """The entries of ``tensor`` in order, as views of up to ``CHUNK`` of them where it is contiguous."""
    flat = tensor.reshape(-1)
    for start in range(0, max(1, len(flat)), CHUNK):
        yield flat[start : start + CHUNK]
