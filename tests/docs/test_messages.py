"""The messages of the troubleshooting page are those of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator

from promptfed.coordinator.problems import Refusal
from tests import ROOT

PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
FOLDERS = ("client_service", "coordinator", "promptfed/cli", "promptfed/runtime", "promptfed/sdk", "promptfed/export")
SHORTEST = 8  # letters of a piece between two "..."; shorter ones prove nothing


def quoted(text: str) -> set[str]:
    """What stands in code quotes in the first column of the tables."""
    return {part for row in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE) for part in re.findall(r"`([^`]+)`", row)}


def strings() -> str:
    """All source text, with strings that are written in several parts joined."""
    texts = [
        path.read_text(encoding="utf-8")
        for folder in (*FOLDERS, "shared", "promptfed/experiments")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join([*texts, *kinds(Refusal)]))


def kinds(parent: type[Refusal]) -> Iterator[str]:
    """The kinds of all refusals, which their classes name."""
    for each in parent.__subclasses__():
        yield each.kind
        yield from kinds(each)


def pieces(message: str) -> list[str]:
    return [piece.strip() for piece in message.split("...") if len(piece.strip()) >= SHORTEST]


def missing(page: str, source: str) -> list[str]:
    return sorted(message for message in quoted(page) if not all(piece in source for piece in pieces(message)))


def test_every_message_is_one_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert sum(len(pieces(message)) for message in quoted(page)) > 50
    assert missing(page, strings()) == []


def test_a_message_that_nobody_writes_is_found() -> None:
    assert missing(
        "| `the moon is not full: ... wait` | |\n| `the coordinator is here` |", "the coordinator is here"
    ) == ["the moon is not full: ... wait"]
