"""Tensors of small networks."""

from __future__ import annotations

from promptfed.shared.tensors import TensorSpec


def layer(name: str, *shape: str, join: str = ".") -> tuple[TensorSpec, TensorSpec]:
    """Weight ``(o, i)`` and bias ``(o,)`` of a linear layer, or ``(d,)`` both of a layer norm, by symbols."""
    return TensorSpec(f"{name}{join}weight", shape), TensorSpec(f"{name}{join}bias", shape[:1])
