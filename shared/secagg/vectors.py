"""Changes of tensors as integers modulo 2^64, and back from their sum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from promptfed.shared.secagg import SecureError
from promptfed.shared.secagg.masks import Words, words
from promptfed.shared.tensors import Array, Arrays

SCALE = 2.0**32
LARGEST_CHANGE = 16.0
LARGEST_SUM = 1 << 62
Whole = NDArray[np.int64]


def flat_change(update: Mapping[str, Array], payload: Mapping[str, Array]) -> NDArray[np.float64]:
    """``(d,)`` float64: update - payload over all tensors in name order; tensors missing in the payload count as zero.

    Raises:
        SecureError: ``out-of-range`` if a number is not finite or has changed by more than 16.
    """
    parts = []
    for name, tensor in sorted(update.items()):
        before = payload.get(name)
        change = np.asarray(tensor).astype(np.float64)
        if before is not None and before.shape == tensor.shape:
            change -= np.asarray(before).astype(np.float64)
        flat = change.reshape(-1)
        if flat.size and not bool(np.all(np.abs(flat) <= LARGEST_CHANGE)):
            text = f"the change of {name!r} is beyond {LARGEST_CHANGE:g} or not finite: training has diverged"
            raise SecureError("out-of-range", f"{text}; lower training.learning_rate")
        parts.append(flat)
    return np.concatenate(parts) if parts else np.zeros(0)


def blurred(change: NDArray[np.float64], update: Mapping[str, Array]) -> NDArray[np.float64]:
    """``change`` plus uniform noise of up to half the spacing of float32 at the numbers of ``update``.

    Float32 numbers lie on a grid. If one client's grid were finer than all others', because of its weight or its small
    numbers, the low digits of the sum would be that client's. The noise is derived from the update's bytes, so the same
    training gives the same numbers. Without the update, nobody knows the noise.
    """
    flat = np.concatenate([np.asarray(tensor).astype(np.float32).reshape(-1) for _, tensor in sorted(update.items())])
    step = np.abs(flat - np.nextafter(flat, np.float32(0))).astype(np.float64)
    key = hashlib.sha256(b"promptfed/blur/1\0" + flat.tobytes()).digest()
    draws: NDArray[np.float64] = (words(key, len(flat)) >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5
    moved: NDArray[np.float64] = change + draws * step
    return moved


def encoded(change: NDArray[np.float64], weight: float = 1.0) -> Whole:
    """x = rint(Δ·a·2³²)."""
    return np.rint(change * (weight * SCALE)).astype(np.int64)


def signed_sum(total: Words) -> Whole:
    """The sum as signed numbers.

    Raises:
        SecureError: ``sum-invalid`` if a number exceeds the largest sum of honest clients.
    """
    signed = total.view(np.int64)
    if signed.size and (int(signed.max()) > LARGEST_SUM or int(signed.min()) < -LARGEST_SUM):
        raise SecureError("sum-invalid", "the sum is beyond 2^62: a client's masked vector or share was wrong")
    return signed


def mean_change(total: Whole, weight: float) -> NDArray[np.float64]:
    """Σ x/(2³²·Σ a) in float64; ``weight``: Σ a.

    Raises:
        SecureError: ``sum-invalid`` if a number of the mean exceeds the bound for every client's change.
    """
    mean: NDArray[np.float64] = total.astype(np.float64) / (SCALE * weight)
    if mean.size and float(np.abs(mean).max()) > LARGEST_CHANGE:
        text = f"the mean has changed by more than {LARGEST_CHANGE:g}: a client's part was wrong"
        raise SecureError("sum-invalid", text)
    return mean


def as_tensors(
    mean: NDArray[np.float64], payload: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]
) -> Arrays:
    """The payload plus the mean change, float32, with the names and ``shapes`` of an update."""
    result, begin = {}, 0
    for name, shape in sorted(shapes.items()):
        size = int(np.prod(shape, dtype=np.int64))
        change = mean[begin : begin + size].reshape(shape)
        before = payload.get(name)
        if before is not None and tuple(before.shape) == tuple(shape):
            change = change + before.astype(np.float64)
        result[name] = change.astype(np.float32)
        begin += size
    if begin != len(mean):
        raise ValueError(f"a vector of {len(mean)} numbers does not fill tensors of {begin}")
    return result
