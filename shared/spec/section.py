"""What the sections of the federation spec have in common, and the versions of the release and the protocol."""

from __future__ import annotations

import platform
import re
from decimal import ROUND_CEILING, Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from promptfed.shared import __version__

RELEASE = __version__
SYSTEM = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
VERSION = 4
PROTOCOL = "Promptfed-Protocol"


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


class OtherVersion(Exception):
    """A peer speaks another version of the protocol. The message says which side to update."""


def expect_ours(told: str | None, peer: str, own: str) -> None:
    """Raise OtherVersion where ``peer`` tells another version than that of ``own``; who tells none is not judged.

    Releases before 0.4.0 tell a range, as ``1-3``.
    """
    if told is None or told == str(VERSION):
        return
    found = re.fullmatch(r"(?:\d{1,6}-)?(\d{1,6})", told)
    version = int(found[1]) if found else 0
    text = f"{peer} speaks version {version} of the protocol, {own} version {VERSION}"
    raise OtherVersion(f"{text}: update {own if version > VERSION else peer}")
