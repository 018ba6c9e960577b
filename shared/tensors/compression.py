"""Compressed changes: bfloat16, or int8 with scales; as tensors of the same safetensors body.

A change ``x`` is a float32 tensor. ``x`` itself names its bfloat16 or int8 entries. ``x#scale`` has one float32 for
each ``BLOCK`` entries. Other tensors are sent as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from promptfed.shared.tensors import CHANGE, Array, Arrays, Shape, TensorError, check

BLOCK = 1024
LEVELS = 127
SCALE = "#scale"
Expected = Mapping[str, tuple[Shape, str]]


def compressed(changes: Mapping[str, Array], up: str, rng: np.random.Generator) -> Arrays:
    """The encoded ``changes``. bfloat16 and int8 are rounded at random, so that their mean is exact."""
    encoded: Arrays = {}
    for name, change in changes.items():
        if change.dtype != np.float32:
            encoded[name] = change
        elif up == "bf16":
            encoded[name] = _to_bfloat16(change, rng)
        else:
            encoded[name], encoded[name + SCALE] = _to_int8(change, rng)
    return encoded


def decompressed(encoded: Mapping[str, Array], expected: Expected, up: str) -> Arrays:
    """The changes that ``encoded`` stands for, in the shapes of ``expected``.

    Raises:
        TensorError: the tensors are not those of such changes, or hold NaN or infinity.
    """
    check(encoded, _wanted(expected, up))
    for name, array in encoded.items():
        if name.endswith(SCALE) and array.size and array.min() < 0:
            raise TensorError("not-finite", f"tensor {name!r} holds a negative scale")
    changes: Arrays = {}
    for name, (_, dtype) in expected.items():
        if dtype != "float32":
            changes[name] = encoded[name]
        elif up == "bf16":
            changes[name] = encoded[name].astype(np.float32)
        else:
            changes[name] = _from_int8(encoded[name], encoded[name + SCALE])
    return changes


def added(changes: Mapping[str, Array], payload: Mapping[str, Array]) -> Arrays:
    """The update that ``changes`` of a ``payload`` give; tensors that are not in it count from zero."""
    return {
        name: payload[name].astype(np.float32, copy=False) + change if _moves(name, change, payload) else change
        for name, change in changes.items()
    }


def subtracted(update: Mapping[str, Array], payload: Mapping[str, Array]) -> Arrays:
    """The changes of which `added` makes ``update``."""
    return {name: array - payload[name] if _moves(name, array, payload) else array for name, array in update.items()}


def _moves(name: str, array: Array, payload: Mapping[str, Array]) -> bool:
    before = payload.get(name)
    if before is None or before.shape != array.shape or name.startswith(CHANGE):
        return False
    return array.dtype == np.float32 and before.dtype.name in ("float32", "bfloat16")


def _to_bfloat16(change: Array, rng: np.random.Generator) -> Array:
    """Random numbers are added to the 16 bits that are cut off: their carry rounds up with the right probability."""
    bits = np.ascontiguousarray(change).reshape(-1).view(np.uint32).astype(np.uint64)
    rounded = (bits + rng.integers(0, 1 << 16, bits.size, dtype=np.uint64)) >> 16
    magnitude = np.minimum(rounded & np.uint64(0x7FFF), np.uint64(0x7F7F))  # the largest finite number
    entries: Array = ((rounded & np.uint64(0x8000)) | magnitude).astype(np.uint16).view(ml_dtypes.bfloat16)
    return entries.reshape(change.shape)


def _to_int8(change: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    blocks = _blocks(change)
    scales = np.abs(blocks).max(axis=1, initial=0.0) / np.float32(LEVELS)
    steps = blocks / np.where(scales > 0, scales, 1)[:, None]
    low = np.floor(steps)
    low += rng.random(steps.shape, dtype=np.float32) < steps - low
    entries = np.clip(low, -LEVELS, LEVELS).astype(np.int8).reshape(-1)[: change.size]
    return entries.reshape(change.shape), scales.astype(np.float32)


def _from_int8(entries: Array, scales: Array) -> Array:
    with np.errstate(over="ignore"):  # What is infinite is refused as in other updates.
        values: Array = _blocks(entries.astype(np.float32)) * scales[:, None]
    return values.reshape(-1)[: entries.size].reshape(entries.shape)


def _blocks(array: Array) -> Array:
    flat = array.reshape(-1)
    return np.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


def _wanted(expected: Expected, up: str) -> dict[str, tuple[Shape, str]]:
    """Shape and dtype of each encoded tensor."""
    wanted: dict[str, tuple[Shape, str]] = {}
    for name, (shape, dtype) in expected.items():
        size = math.prod(shape)
        if dtype != "float32":
            wanted[name] = (shape, dtype)
        elif up == "bf16":
            wanted[name] = (shape, "bfloat16")
        else:
            wanted |= {name: (shape, "int8"), name + SCALE: ((-(-size // BLOCK),), "float32")}
    return wanted
