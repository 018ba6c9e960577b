"""torch, imported when it is first used: a coordinator reads what methods say about themselves without it.

Modules that a coordinator imports take ``torch``, ``F`` and ``Tensor`` from here, and import other types under
``TYPE_CHECKING``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

__all__ = ["F", "Tensor", "checkpointing", "into_graph", "no_grad", "torch"]

P = ParamSpec("P")
R = TypeVar("R")


class _Lazy:
    """A module that is imported when an attribute of it is first read."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional as F
    from torch.utils import checkpoint as checkpointing
else:
    Tensor = Any  # annotations name it; nothing asks at run time whether something is one
    torch = _Lazy("torch")
    F = _Lazy("torch.nn.functional")
    checkpointing = _Lazy("torch.utils.checkpoint")


def into_graph() -> bool:
    """Whether what is computed becomes a graph (ONNX), which has the same steps for all images."""
    return bool(torch._C._get_tracing_state())


def no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """As the decorator ``torch.no_grad()``, which would import torch where a function is defined."""

    @wraps(function)
    def without_gradients(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            return function(*args, **kwargs)

    return without_gradients
