"""What "equal" means for numbers that were computed in two ways.

Bits are compared between two runs of one computation on one machine only. Kernels of a matrix product depend on its
shape, on the CPU and on the number of threads, so that other shapes, batches or orders agree up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from promptfed.shared.tensors import Tensors


def assert_values(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    """max|a − b| ≤ tolerance·max(1, max|b|), with 1e-5 in float32 and 1e-9 in float64 unless given."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if tolerance is None:
        tolerance = 1e-9 if wanted.dtype == torch.float64 else 1e-5
    found, wanted = found.detach(), wanted.detach()
    assert float((found - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))


def assert_gradients(found: Tensor, wanted: Tensor) -> None:
    """max|a − b| ≤ 1e-4·max|b| in float32, 1e-9·max|b| in float64, and there is one."""
    assert found.shape == wanted.shape
    tolerance, scale = (1e-9 if wanted.dtype == torch.float64 else 1e-4), float(wanted.abs().max())
    assert scale > 0
    assert float((found - wanted).abs().max()) <= tolerance * scale


def assert_moved_equally(found: Tensors, wanted: Tensors, start: Tensors, least: float = 1e-5) -> None:
    """What training did is compared, tensor by tensor, on its own scale: where it began is the larger part."""
    assert set(found) == set(wanted)
    for name, value in found.items():
        literally = wanted[name] - start[name]
        scale = float(literally.abs().max())
        assert scale > least, name
        assert float((value - start[name] - literally).abs().max()) <= 1e-4 * scale, name
