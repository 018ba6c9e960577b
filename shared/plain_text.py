"""Makes text of others harmless: no control of the terminal, no HTML, no Markdown, no formula."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from difflib import get_close_matches

# Cc: ESC and other controls. Cf: what turns the direction of writing, or shows as nothing. Cs, Cn, Co: what terminals
# draw as they like. Zl, Zp: further ends of lines.
UNSEEN = {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}
JOINERS = "\u200c\u200d"  # that some scripts, and emoji, are written with; they neither hide nor move anything
OBEYED = {"Cc", "Cs", "Zl", "Zp"}  # of these, what a terminal obeys or no text in UTF-8 has
TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # the direction of writing
FORMULA = ("=", "+", "-", "@", "\t", "\r")
MARKDOWN = "\\`*_[]|#!~"
MOST_TOLD = 20  # names of a list in a message
CELL = "\\`[]|!"  # of those, what makes code, a link, an image or a further column in the middle of a line

# Small letters, Cyrillic and Greek, that are drawn like Latin ones, also as capitals.
DRAWN_ALIKE = str.maketrans("авекмнорстухѕіјһԁԛԝαβεικνορτυχ", "abekmhopctyxsijhdqwabeikvoptux")


def plain(text: object, keep: str = "") -> str:
    """``text`` with every character that a terminal obeys or does not show as its code, ``\\x1b`` or ``\\u202e``.

    ``keep``: characters that are left as they are, such as the line ends of a traceback.
    """
    return "".join(letter if _shows(letter) or letter in keep else _code(letter) for letter in str(text))


def expect_visible(text: str) -> str:
    """``text``. Raises ValueError if a letter of it moves a cursor, ends a line or turns the direction of writing."""
    if not text.isprintable():
        for letter in text:
            if (kind := unicodedata.category(letter)) in OBEYED or letter in TURNING:
                fault = "is not UTF-8" if kind == "Cs" else f"has {_code(letter)}, which would control a display"
                raise ValueError(f"{text[:100]!a} {fault}")
    return text


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


def moment(at: datetime) -> str:
    """A time that a narrow table breaks between its parts: ``2026-11-29 06:58:27 UTC``."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def shortened(texts: Iterable[str], most: int = 5, between: str = ", ") -> str:
    """The first ``most`` of ``texts``, and how many more there are."""
    shown = list(texts)
    return between.join(shown[:most]) + (f"{between}and {len(shown) - most} more" if len(shown) > most else "")


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


def quoted(names: Iterable[str], beside: Iterable[str] = ()) -> list[str]:
    """``names`` in quotes, for a message; of those that look like another of them or of ``beside`` with their codes."""
    shown = list(names)
    alike = {name for group in look_alikes({*shown, *beside}) for name in group}
    return [_spelt(name) if name in alike else repr(name) for name in shown]


def likeness(names: Iterable[str], beside: Iterable[str]) -> str:
    """Which of ``names`` look like others of them or of ``beside``, as a remark behind a refusal; empty if none do."""
    named = dict.fromkeys(names)
    alike = look_alikes([*named, *beside])
    groups = [" and ".join(map(_spelt, group)) for group in alike if not named.keys().isdisjoint(group)]
    return f" (these look alike: {'; '.join(groups[:5])})" if groups else ""


def beside_known(names: Iterable[str], known: Iterable[str]) -> str:
    """A remark behind the refusal of unknown ``names``: look-alikes, the nearest ``known`` ones, and all of these."""
    unknown, there = list(names), list(known)
    by_sight = {seen(name): name for name in there}
    matches = [(name, get_close_matches(seen(name), by_sight, n=1, cutoff=0.5)) for name in unknown[:5]]
    nearest = [f"{by_sight[found[0]]!r} to {name!r}" for name, found in matches if found]
    nearest_text = f"; nearest: {', '.join(nearest)}" if nearest else ""
    return f"{likeness(unknown, there)}{nearest_text}; known: {shortened(map(repr, there), MOST_TOLD)}"


def merged(names: Iterable[str], into: Callable[[str], str]) -> list[str]:
    """A clause for each text that ``into`` makes of several ``names``: nobody has said that they are one."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(into(name), []).append(name)
    return [
        f"{' and '.join(quoted(group))} would become one, {text!r}; rename all but one, or merge what is one"
        for text, group in groups.items()
        if len(group) > 1
    ]


def listed(text: str) -> list[str]:
    """The names in ``a, b, c``. Raises ValueError for an empty one: what was meant there would be dropped."""
    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise ValueError(f"{text!r} has an empty name; write names separated by one comma")
    return names


def _spelt(name: str) -> str:
    return repr(name) if name.isascii() else f"{name!r} (spelt {name!a})"


def seen(text: str) -> str:
    """``text`` as it is seen: in one form of Unicode (NFKC), without capitals and without letters that do not show."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(letter for letter in folded if unicodedata.category(letter) not in UNSEEN)


def _drawn(name: str) -> str:
    letters = seen(name).translate(DRAWN_ALIKE)
    return "".join(one for one in letters if not one.isspace() and unicodedata.category(one) not in {"Pd", "Pc"})


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


def percent(value: float | None) -> str:
    """An accuracy in per cent."""
    return "-" if value is None else f"{100 * value:.1f} %"


def with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    """An accuracy in per cent and its interval, as 81.2 % [76.0, 85.5]."""
    if interval is None:
        return percent(value)
    low, high = interval
    return f"{percent(value)} [{100 * low:.1f}, {100 * high:.1f}]"


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def scale_text(scale: tuple[float, float]) -> str:
    """A scale in words, as in ``12 bits`` or ``-1000 to 3000``."""
    black, white = scale
    bits = int(white).bit_length() if white > 1 else 0
    return f"{bits} bits" if black == 0 and bits and white == (1 << bits) - 1 else f"{black:g} to {white:g}"
