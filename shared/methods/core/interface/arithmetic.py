"""Whether the functions of a method's server half are computed with numpy or with torch.

The server half of promptfed's methods works on numpy arrays. Functions that need torch say so with `needs_torch`; the
coordinator then imports it for them. So it does for all server functions of other packages' methods, unless a class
declares ``server = "numpy"`` for those that it defines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from promptfed.shared.methods.core.interface.base import Method

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
    names = ("initial_state", "adopt", "join", "forget", "payload", "aggregate", "aggregate_measured", "measure")
    return any(computed(method, name) == "torch" for name in names)
