"""The lines and the exit code of ``--verify``, whatever its checks find."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from promptfed.coordinator.resources.results import verification


class Flushed(io.StringIO):
    """What is printed; ``seen``: as far as others see it by now."""

    seen = ""

    def flush(self) -> None:
        self.seen = self.getvalue()


def broken(error: Exception) -> Iterator[str]:
    yield "the first"
    raise error


BAD = OperationalError("SELECT", {}, Exception("malformed\ndisk image"))


@pytest.mark.parametrize(
    ("found", "lines", "code"),
    [
        ({"a": lambda: iter(()), "b": lambda: iter(())}, ["all of /db and its blobs is what was stored"], 0),
        ({"a": lambda: iter("x"), "b": lambda: iter(())}, ["damaged: x", "1 damaged in /db"], 1),
        ({"a": lambda: iter(()), "b": lambda: iter("xy")}, ["damaged: x", "damaged: y", "2 damaged in /db"], 1),
        (
            {"specs": lambda: broken(BAD), "b": lambda: broken(ValueError("no\nJSON"))},
            [
                "damaged: the first",
                "damaged: specs cannot be read: malformed disk image",
                "damaged: the first",
                "damaged: b cannot be read: no JSON",
                "4 damaged in /db",
            ],
            1,
        ),
    ],
)
def test_each_damage_is_a_line_at_once_and_counts(
    found: dict[str, Callable[[], Iterator[str]]], lines: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, begun = Flushed(), []

    @contextmanager
    def read() -> Iterator[None]:
        assert printed.seen == printed.getvalue(), "a check may take an hour"
        begun.append(None)
        yield

    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(verification, "CHECKS", {name: lambda *_, of=of: of() for name, of in found.items()})
    store: Any = SimpleNamespace(blobs=None, database=SimpleNamespace(read=read, backend=SimpleNamespace(place="/db")))
    assert verification._look(store) == code
    assert printed.getvalue().splitlines() == lines
    assert printed.seen.splitlines()[: len(lines) - 1] == lines[:-1]
    assert len(begun) == 2, "each check reads in a transaction of its own"
