"""The classes of ``symbols``: pictographs of DejaVu Sans (U+2600-27BF) with plain English names, grouped in topics.

``symbols.json`` lists them by topic. Glyphs that differ only in orientation, weight or fill are excluded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_TOPICS = json.loads(Path(__file__).with_name("symbols.json").read_text(encoding="utf-8"))
TOPICS: tuple[str, ...] = tuple(_TOPICS)


@dataclass(frozen=True)
class Symbol:
    """One class: its name, its code point and its topic."""

    name: str
    codepoint: int
    topic: str


SYMBOLS: tuple[Symbol, ...] = tuple(
    Symbol(name, ord(character), topic)
    for topic, listed in _TOPICS.items()
    for name, character in listed["symbols"].items()
)
TOPIC_TEMPLATES: dict[str, str] = {topic: listed["template"] for topic, listed in _TOPICS.items()}
"""What a topic's captions say after the thing's name: a data set with a template of its own."""
