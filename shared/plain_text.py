"""Makes text of others harmless: no control of the terminal, no HTML, no Markdown, no formula."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable

# Cc: ESC and other controls. Cf: what turns the direction of writing, or shows as nothing. Cs, Cn, Co: what terminals
# draw as they like. Zl, Zp: further ends of lines.
UNSEEN = {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}
JOINERS = "\u200c\u200d"  # that some scripts, and emoji, are written with; they neither hide nor move anything
FORMULA = ("=", "+", "-", "@", "\t", "\r")
MARKDOWN = "\\`*_[]|#!~"
CELL = "\\`[]|!"  # of those, what makes code, a link, an image or a further column in the middle of a line

# Small letters, Cyrillic and Greek, that are drawn like Latin ones, also as capitals.
DRAWN_ALIKE = str.maketrans("авекмнорстухѕіјһԁԛԝαβεικνορτυχ", "abekmhopctyxsijhdqwabeikvoptux")


def plain(text: object, keep: str = "") -> str:
    """``text`` with every character that a terminal obeys or does not show as its code, ``\\x1b`` or ``\\u202e``.

    ``keep``: characters that are left as they are, such as the line ends of a traceback.
    """
    return "".join(letter if _shows(letter) or letter in keep else _code(letter) for letter in str(text))


def _shows(letter: str) -> bool:
    return letter in JOINERS or unicodedata.category(letter) not in UNSEEN


def _code(letter: str) -> str:
    number = ord(letter)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """``number`` with its noun, as in ``1 trainer`` or ``2 trainers``; ``plural``: default: the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def look_alikes(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of different ``names`` that people or text towers take for one.

    Such names differ only in case, spaces, hyphens, underscores, unseen characters, or letters that are drawn alike.
    """
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(_drawn(name), set()).add(name)
    return [tuple(sorted(group)) for group in groups.values() if len(group) > 1]


def alike_text(names: Iterable[str]) -> str:
    """Which names look alike, with the codes of letters beyond ASCII; empty if none do."""
    return "; ".join(" and ".join(map(_spelt, group)) for group in look_alikes(names))


def _spelt(name: str) -> str:
    return repr(name) if name.isascii() else f"{name!r} (spelt {name!a})"


def _drawn(name: str) -> str:
    folded = unicodedata.normalize("NFKC", name).casefold().translate(DRAWN_ALIKE)
    dropped = UNSEEN | {"Pd", "Pc"}
    return "".join(letter for letter in folded if not letter.isspace() and unicodedata.category(letter) not in dropped)


def csv_cell(text: str) -> str:
    """``text`` as a cell that no spreadsheet reads as a formula: a quote stands before what would begin one."""
    shown = plain(text, keep="\n\t")
    return f"'{shown}" if shown.startswith(FORMULA) else shown


def markdown_cell(text: str) -> str:
    """``text`` as a cell of a Markdown table: no HTML, link or further column. Names with underscores stay readable."""
    return _escaped(text, CELL)


def markdown_code(text: str) -> str:
    """``text`` as code in a line of Markdown, which only more backticks than it has end."""
    one_line = plain(" ".join(text.split()))
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", one_line)), default=0))
    return f"{fence}{one_line}{fence}" if len(fence) == 1 else f"{fence} {one_line} {fence}"


def markdown(text: str) -> str:
    """``text`` in one line of Markdown that reads as it stands: neither markup nor HTML."""
    return _escaped(text, MARKDOWN)


def _escaped(text: str, letters: str) -> str:
    one_line = plain(" ".join(text.split()))
    escaped = "".join(f"\\{letter}" if letter in letters else letter for letter in one_line)
    return html.escape(escaped, quote=False)
