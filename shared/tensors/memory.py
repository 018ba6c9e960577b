"""What a device has no room for is computed in parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from promptfed.shared.tensors.lazy import torch

T = TypeVar("T")


def in_parts(compute: Callable[[int], T], at_once: int, smaller: Callable[[int], object], refusal: Exception) -> T:
    """``compute(at_once)``, with half as much at once each time the device lacks the memory, which ``smaller`` is told.

    Raises ``refusal`` where there is no room for one.
    """
    while True:
        with suppress(torch.OutOfMemoryError):
            return compute(at_once)
        # Behind the block, so that nothing keeps the failed attempt's tensors.
        if at_once == 1:
            raise refusal
        at_once //= 2
        smaller(at_once)
