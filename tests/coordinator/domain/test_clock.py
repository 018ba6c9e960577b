"""Times as text: in UTC, by milliseconds, and the seconds between two of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from promptfed.coordinator.domain import clock


def test_times_are_rfc_3339_in_utc_by_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = datetime(2026, 2, 3, 4, 5, 6, 789_999, UTC)
    monkeypatch.setattr(clock, "utc", lambda: moment)
    assert (clock.now(), clock.later(-6.5)) == ("2026-02-03T04:05:06.789Z", "2026-02-03T04:05:00.289Z")
    assert clock.text(1.5) == "1970-01-01T00:00:01.500Z"
    assert clock.parse(clock.now()) == moment.replace(microsecond=789_000)


@pytest.mark.parametrize(
    ("start", "end", "seconds"), [(0.0, 61.25, 61.25), (2.0, 0.5, -1.5), (None, 1.0, None), (1.0, None, None)]
)
def test_seconds_are_those_from_one_to_the_other(start: Any, end: Any, seconds: Any) -> None:
    begun, ended = (None if one is None else clock.text(one) for one in (start, end))
    assert clock.seconds_between(begun, ended) == seconds
    assert clock.seconds_between("2026-01-01T00:00:00Z", "2026-01-01T00:00:00.123456Z") == 0.123
