"""Layers behind the frozen towers: where they start, and the rate of their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec

Start = Literal["zero_shot", "random"]
START: Start = pf.option(
    "zero_shot", "zeros in the second layer, which is zero-shot, or random numbers as in the first"
)


def relative_rate(context: pf.ClientContext, width: int) -> float:
    """η/√width: a step of Adam is then about η times a typical coordinate of a normalised vector ``(width,)``."""
    return context.training.learning_rate / math.sqrt(width)


def started(specs: Sequence[TensorSpec], dims: dict[str, int], draws: Draws, start: Start) -> Tensors:
    """Layers uniform in ±1/√(inputs), drawn in order; zeros in the second half of ``specs`` but for a random start."""
    shapes = {spec.name: spec.resolve(dims) for spec in specs}
    drawn = {name: (draws.uniform(*shape) * 2 - 1) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    zero = () if start == "random" else list(drawn)[len(drawn) // 2 :]
    return drawn | {name: draws.xp.zeros_like(drawn[name]) for name in zero}
