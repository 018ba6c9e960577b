"""A stand-in for CUDA graphs on the CPU: what is recorded has no effect until it is replayed, and reads no value.

Recorded operations are run and undone; a replay runs them again on the very same tensors, and nothing of Python.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from promptfed.shared.methods.core import training

WAITING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Graph(TorchDispatchMode):
    """In the place of ``torch.cuda.CUDAGraph``."""

    made: list[Graph] = []  # noqa: RUF012 (emptied by `recording`)

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        Graph.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITING:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
        for about, value in given:
            if about.alias_info is not None and about.alias_info.is_write:
                self._before += [(tensor, tensor.clone()) for tensor in tree_leaves(value)]
        made = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, made))
        return made

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        self.undo()

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, value in reversed(self._before):
            tensor.copy_(value)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, made in self._calls:
            again = func(*args, **kwargs)
            if all(one.alias_info is None for one in func._schema.returns):
                for kept, value in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(kept, Tensor) and kept.data_ptr() != value.data_ptr():
                        kept.copy_(value)


def recording(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Steps on the CPU are recorded and replayed from now on; the graphs that are made."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(training, "replays", lambda device: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    Graph.made.clear()
    return Graph.made
