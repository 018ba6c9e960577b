"""Two clocks: monotonic seconds for deadlines, UTC for people."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta


def monotonic() -> float:
    """Monotonic seconds."""
    return time.monotonic()


def utc() -> datetime:
    """The current time by the wall clock, which can be set forward or back."""
    return datetime.now(UTC)


def now() -> str:
    """The current time as RFC 3339 in UTC."""
    return later(0.0)


def later(seconds: float) -> str:
    """The time ``seconds`` from now as RFC 3339 in UTC."""
    return _text(utc() + timedelta(seconds=seconds))


def text(seconds: float) -> str:
    """``seconds`` since 1970, as of `time.time`, as RFC 3339 in UTC."""
    return _text(datetime.fromtimestamp(seconds, UTC))


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse(text: str) -> datetime:
    """The time that RFC 3339 text gives."""
    return datetime.fromisoformat(text)


def seconds_between(start: str | None, end: str | None) -> float | None:
    """Seconds from ``start`` to ``end``; None if either is None."""
    if start is None or end is None:
        return None
    return round((parse(end) - parse(start)).total_seconds(), 3)
