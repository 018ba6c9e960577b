"""What the sections of the federation spec have in common, and the versions of the release and the protocol."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all spec sections: unknown keys and non-finite numbers are refused, values are not coerced."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


def option(default: Any, description: str, **bounds: Any) -> Any:
    """A setting: its default, its meaning in words, and pydantic's bounds, such as ``ge`` and ``le``."""
    return Field(default=default, description=description, **bounds)


def left_out(at: Any = None, description: str | None = None, **given: Any) -> Any:
    """A field that JSON leaves out at its default ``at``, so that older readers and signatures stay valid."""
    return Field(**{"default": at, "description": description} | given, exclude_if=lambda value: value == at)


def ceil_fraction(fraction: float, count: int) -> int:
    """⌈fraction·count⌉ with the fraction as it was written: 0.7 of 10 is 7, not the 8 of binary arithmetic."""
    return int((Decimal(repr(fraction)) * count).to_integral_value(ROUND_CEILING))
