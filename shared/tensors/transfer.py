"""Sending tensors to the device that computes, without waiting for it. Importing this does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def sent_to(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` on ``device``. While it is copied to a GPU the CPU goes on, which needs memory that cannot move."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device, dtype)
    there = tensor.pin_memory().to(device, non_blocking=True)
    return there if dtype is None else there.to(dtype)
