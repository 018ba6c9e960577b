"""The calls of a round, answered by the handlers in front of the framework or by the declared routes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from promptfed.coordinator.api import round_calls


class Switch:
    """Lets the handlers answer or not, and counts what they did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.on, self.answered = True, 0
        call = round_calls._call

        def counted(*arguments: Any) -> Any:
            found = call(*arguments) if self.on else None
            self.answered += found is not None
            return found

        monkeypatch.setattr(round_calls, "_call", counted)

    @contextmanager
    def off(self) -> Iterator[None]:
        """A block in which the declared routes answer everything."""
        self.on = False
        yield
        self.on = True


def seen(response: httpx.Response, *unequal: str) -> tuple[int, list[tuple[str, str]], str]:
    """All of an answer but the time, with the texts ``unequal`` made the same."""
    text = response.text
    headers = [(name, value) for name, value in response.headers.multi_items() if name != "date"]
    found = (response.status_code, headers, text)
    if unequal:
        pattern = "|".join(map(re.escape, unequal))
        lengthless = [(name, re.sub(pattern, "*", value)) for name, value in headers]
        return found[0], lengthless, re.sub(pattern, "*", text)
    return found
