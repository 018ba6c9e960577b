"""Passes of a training step as compiled graphs (`torch.compile`): one launch in place of hundreds of small kernels."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

BACKEND = "inductor"
SHAPES = 64  # of a pass, such as label spaces and the last batch; torch stops to compile after eight

Result = TypeVar("Result")


class Graphs:
    """Compiled forms of functions, made at their first call; ``used`` says whether they are called."""

    def __init__(self) -> None:
        self.used = False
        self._made: dict[str, Callable[..., Any]] = {}

    def run(self, function: Callable[..., Result], *given: Any) -> Result:
        """``function(*given)``, equal but for rounding; one form for each shape."""
        if not self.used:
            return function(*given)
        name = function.__qualname__
        if name not in self._made:
            torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)
            self._made[name] = torch.compile(function, dynamic=False, backend=BACKEND)
        result: Result = self._made[name](*given)
        return result
