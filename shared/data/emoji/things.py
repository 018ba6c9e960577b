"""The code points that count as things, their names, and whether tests may use them."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

KINDS: dict[str, str] = json.loads(Path(__file__).with_name("kinds.json").read_text(encoding="utf-8"))
"""Words for the kinds of things that take part in tests; every other subgroup's words are its name's own."""

_THING_GROUPS = frozenset({"animals-nature", "food-drink", "travel-places", "activities", "objects"})
_LEFT_OUT_GROUPS = frozenset({"component"})
_LEFT_OUT_KINDS = frozenset({"keycap", "alphanum", "country-flag", "subdivision-flag", "skin-tone", "hair-style"})
# Signs on coloured squares, and drawings that differ only in a colour, a phase or a direction.
_NO_TEST = re.compile(
    r"\bmoon\b|globe|mailbox|(blue|green|orange) book|suit\b|^(new|full|first|last) |o.clock|thirty|button|"
    r"mahjong|(inbox|outbox) tray|(increasing|decreasing)|banknote|^(sun|star)$|card index|paw prints|place medal|"
    r"(open|closed) (book|umbrella)|locked with|face$|cloud with|^sun behind"
)
_GENDERED = re.compile(r"200D-264[02]")
_PEOPLE = re.compile(
    r"^(man|woman|men|women|boy|girl)\b|^(family|kiss|couple with heart): |facing right$", re.IGNORECASE
)


@dataclass(frozen=True)
class Thing:
    """One code point or sequence of code points, with its name and its kind in words.

    ``testable``: it is a thing, not a sign, and its drawing is not nearly equal to another one.
    """

    code: str
    name: str
    group: str
    kind: str
    testable: bool

    @property
    def text(self) -> str:
        """The characters themselves."""
        return "".join(chr(int(part, 16)) for part in self.code.split("-"))


def read_things(package: Path) -> list[Thing]:
    """The things in the unpacked package of names, by code point; names are unique."""
    entries = json.loads((package / "en" / "data.json").read_text(encoding="utf-8"))
    meta = json.loads((package / "meta" / "groups.json").read_text(encoding="utf-8"))
    things: dict[str, Thing] = {}
    for entry in entries:
        if "group" not in entry:
            continue
        group, subgroup = meta["groups"][str(entry["group"])], meta["subgroups"][str(entry["subgroup"])]
        code, name = str(entry["hexcode"]), _plain(str(entry["label"]))
        if group in _LEFT_OUT_GROUPS or subgroup in _LEFT_OUT_KINDS:
            continue
        if _GENDERED.search(code) or (group == "people-body" and _PEOPLE.match(name)):
            continue
        testable = group in _THING_GROUPS and subgroup in KINDS and not _NO_TEST.search(name)
        things.setdefault(name, Thing(code, name, group, KINDS.get(subgroup, subgroup.replace("-", " ")), testable))
    return sorted(things.values(), key=lambda thing: thing.code)


def spellings(thing: Thing, shortcodes: dict[str, list[str]]) -> list[str]:
    """The names that packages may use for it, reduced to letters and digits: its name, Unicode's name, shortcodes."""
    first = thing.text[0] if len(thing.text.replace("\ufe0f", "")) == 1 else ""
    words = [thing.name, unicodedata.name(first, "") if first else "", *shortcodes.get(thing.code, [])]
    return list(dict.fromkeys(squeezed(word) for word in words if word))


def squeezed(text: str) -> str:
    """Only the letters and digits, in lower case: ``Round-Pushpin`` -> ``roundpushpin``."""
    return "".join(c for c in _plain(text).lower() if c.isalnum())


def share_of(name: str, purpose: str) -> float:
    """A number in [0, 1) that depends only on the name and the purpose, so that lists stay stable under additions."""
    return int.from_bytes(hashlib.sha256(f"emoji|{purpose}|{name}".encode()).digest()[:6], "big") / 2**48


def _plain(text: str) -> str:
    """The text without accents and typographic quotes, which tokenizers and file names represent differently."""
    flat = unicodedata.normalize("NFKD", text.replace("’", "'").replace("“", "").replace("”", ""))
    return "".join(c for c in flat if not unicodedata.combining(c)).strip()
