"""The library that computes a method's server half: numpy, or torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from promptfed.shared.methods.core.interface import Method

Function = TypeVar("Function", bound=Callable[..., Any])
OF_THE_METHOD = "of the method"  # ``server`` of a class that only adds to another: the other decides


def needs_torch(function: Function) -> Function:
    """Mark a server function that is always computed with torch tensors."""
    function.computed = "torch"  # type: ignore[attr-defined]
    return function


def computed(method: Method, name: str) -> Literal["numpy", "torch"]:
    """Where the server function ``name`` of ``method`` is computed."""
    for kind in type(method).__mro__:
        if name in vars(kind) and vars(kind).get("server") != OF_THE_METHOD:
            if not kind.__module__.startswith("promptfed.") and vars(kind).get("server") != "numpy":
                return "torch"
            how: Literal["numpy", "torch"] = getattr(vars(kind)[name], "computed", "numpy")
            return how
    return "numpy"


def needs_torch_always(method: Method) -> bool:
    """Whether a federation of ``method`` cannot run without torch in the coordinator."""
    names = ("initial_state", "adopt", "join", "forget", "payload", "aggregate", "measure")
    return any(computed(method, name) == "torch" for name in names)
