"""Changes as whole numbers modulo 2⁶⁴, so that sums are exact: x = rint(Δ·2³²), |Δ| ≤ 16, weights up to 65,535.

|Σ w·x| ≤ 2¹⁰·2¹⁶·2³⁶ = 2⁶² for up to 1,024 clients: the sum never wraps. Its mean is within 2⁻³³ of the mean of the Δ.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from promptfed.shared.secagg import SecureError
from promptfed.shared.secagg.masks import Words
from promptfed.shared.tensors import Tensors

SCALE = 2.0**32
LARGEST_CHANGE = 16.0
LARGEST_WEIGHT = 65_535
LARGEST_SUM = 1 << 62
MOST_CLIENTS = 1024
MASKED_ENTRIES = 64  # from so many on one can tell that there is no mask
SMALL_WORD = 1 << 60

Whole = NDArray[np.int64]


def flat_change(update: Mapping[str, Tensor], payload: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """``(d,)`` float64: update - payload over all tensors in order of name; what the payload lacks starts from zero.

    Raises:
        SecureError: ``out-of-range`` where a number is not finite or has changed by more than 16.
    """
    parts = []
    for name, tensor in sorted(update.items()):
        before = payload.get(name)
        change = tensor.detach().cpu().double()
        if before is not None and before.shape == tensor.shape:
            change = change - before.cpu().double()
        flat = change.reshape(-1).numpy()
        if flat.size and not bool(np.all(np.abs(flat) <= LARGEST_CHANGE)):
            text = f"the change of {name!r} is beyond {LARGEST_CHANGE:g} or not finite: training has diverged"
            raise SecureError("out-of-range", f"{text}; lower training.learning_rate")
        parts.append(flat)
    return np.concatenate(parts) if parts else np.zeros(0)


def encode_change(update: Mapping[str, Tensor], payload: Mapping[str, Tensor]) -> Whole:
    """``(d,)`` int64: `flat_change` in whole numbers. Raises as it does."""
    return encoded(flat_change(update, payload))


def encoded(change: NDArray[np.float64]) -> Whole:
    """x = rint(Δ·2³²)."""
    return np.rint(change * SCALE).astype(np.int64)


def weighted(change: Whole, weight: int) -> Words:
    """w·x modulo 2⁶⁴."""
    return change.view(np.uint64) * np.uint64(weight)


def signed_sum(total: Words) -> Whole:
    """The sum as signed numbers.

    Raises:
        SecureError: ``sum-invalid`` where one is beyond what honest clients can reach.
    """
    signed = total.view(np.int64)
    if signed.size and (int(signed.max()) > LARGEST_SUM or int(signed.min()) < -LARGEST_SUM):
        raise SecureError("sum-invalid", "the sum is beyond 2^62: a client's masked vector or share was wrong")
    return signed


def mean_change(total: Whole, weight: int, largest: float = LARGEST_CHANGE) -> NDArray[np.float64]:
    """Σ/(2³²·Σ w) in float64.

    Raises:
        SecureError: ``sum-invalid`` where a number of the mean is over ``largest``: none of the clients' is.
    """
    mean: NDArray[np.float64] = total.astype(np.float64) / (SCALE * weight)
    if mean.size and float(np.abs(mean).max()) > largest:
        raise SecureError("sum-invalid", f"the mean has changed by more than {largest:g}: a client's part was wrong")
    return mean


def as_tensors(
    mean: NDArray[np.float64], payload: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> Tensors:
    """What the payload becomes by the mean change, float32, with the names and ``shapes`` of an update."""
    result, begin = {}, 0
    for name, shape in sorted(shapes.items()):
        size = int(np.prod(shape, dtype=np.int64))
        change = torch.from_numpy(mean[begin : begin + size].copy()).reshape(shape)
        before = payload.get(name)
        if before is not None and tuple(before.shape) == tuple(shape):
            change = change + before.double()
        result[name] = change.float()
        begin += size
    if begin != len(mean):
        raise ValueError(f"a vector of {len(mean)} numbers does not fill tensors of {begin}")
    return result


def looks_unmasked(vector: Words) -> bool:
    """Whether more than half of the words are small, as no mask leaves them: a broken client's update in the clear."""
    if len(vector) < MASKED_ENTRIES:
        return False
    small = vector + np.uint64(SMALL_WORD) < np.uint64(2 * SMALL_WORD)
    return int(small.sum()) * 2 > len(vector)


def whole_weights(shares: Mapping[str, float]) -> dict[str, int]:
    """Weights of 1…65,535 in the ratio of ``shares``, the largest 65,535; equal ones are all 1."""
    largest = max(shares.values(), default=0.0)
    if largest <= 0 or min(shares.values()) == largest:
        return dict.fromkeys(shares, 1)
    return {name: max(1, round(LARGEST_WEIGHT * share / largest)) for name, share in shares.items()}
