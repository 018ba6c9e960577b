"""Torch's settings for a task: threads, precision and deterministic kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from promptfed.shared.methods.core.interface import ClientContext


class _Deterministic:
    """Deterministic kernels, while a task that asks for them runs. Torch has one switch for all threads of a process.

    Other tasks that run meanwhile have them too: they are slower, and as right.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks = 0
        self._before = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Switch deterministic kernels on for the length of one task."""
        with self._lock:
            if not self._tasks:
                self._before = torch.are_deterministic_algorithms_enabled()
                torch.use_deterministic_algorithms(True)
            self._tasks += 1
        try:
            yield
        finally:
            with self._lock:
                self._tasks -= 1
                if not self._tasks:
                    torch.use_deterministic_algorithms(self._before)


_deterministic = _Deterministic()


@contextmanager
def torch_settings(context: ClientContext) -> Iterator[None]:
    """The spec's number of threads. On a GPU also the precision of products and the kernels that the spec asks for."""
    training = context.training
    torch.set_num_threads(training.threads)
    if context.backbone.device.type == "cpu":
        yield
        return
    with _deterministic.on() if training.deterministic else nullcontext():
        use_precision(context.backbone.device, training.tf32)
        yield


def use_precision(device: torch.device, tf32: bool) -> None:
    """On a GPU: multiply float32 numbers exactly, or in TF32. It holds for the process, and features depend on it."""
    if device.type != "cpu":
        # Torch's own defaults differ: products are exact, and convolutions are not.
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
