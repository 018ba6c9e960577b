"""Copies between the CPU and the device that computes, without waiting for it. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGE = 1 << 20  # bytes from which on a copy has a stream of its own, beside the kernels
_streams: dict[torch.device, Any] = {}


def sent_to(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` on ``device``. While it is copied to a GPU the CPU goes on, which needs memory that cannot move."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device, dtype)
    held = tensor if tensor.is_pinned() else tensor.contiguous().pin_memory()  # what is expanded cannot be pinned
    there = _beside(held, device) if held.nbytes >= LARGE else held.to(device, non_blocking=True)
    return there if dtype is None else there.to(dtype)


def _beside(held: Tensor, device: torch.device) -> Tensor:
    """A copy that the kernels before it need not wait for, and those after it do."""
    if device.type != "cuda":
        return held.to(device, non_blocking=True)
    from torch import cuda

    if device not in _streams:
        _streams[device] = cuda.Stream(device)  # type: ignore[no-untyped-call]
    current = cuda.current_stream(device)
    with cuda.stream(_streams[device]):
        there = held.to(device, non_blocking=True)
    current.wait_stream(_streams[device])
    there.record_stream(current)
    return there


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on the CPU, not filled, that `sent_to` need not copy before it is sent to ``device``.

    Torch gives memory of one size again once the copies from it are made: batches in turn share two or three pieces.
    """
    import torch

    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def read_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy ``tensor`` to the CPU; what is returned waits for it and gives the copy."""
    if tensor.device.type != "cuda":
        return tensor.cpu
    from torch import cuda

    here, copied = tensor.to("cpu", non_blocking=True), cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(cuda.current_stream(tensor.device))

    def read() -> Tensor:
        copied.synchronize()
        return here

    return read
