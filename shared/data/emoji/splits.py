"""Which emoji a backbone has read in pre-training, and which may be tested."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from promptfed.shared.data.emoji.pictures import STYLES, Thing

COMMON = ("flat", "three", "noto", "notov1")
"""Of which the backbone read many pictures in pre-training."""
RARE = ("contrast", "notomono")
"""Of which it read few, and none at all of a third of the things."""
POOLS: dict[str, tuple[str, ...]] = {"first": ("microsoft", "google"), "second": ("twitter", "joypixels")}
"""Designers whose drawings of a thing were withheld together."""
PURPOSES = ("test", "validation")


FILE = Path(__file__).parent / "splits.json"


@dataclass(frozen=True)
class Splits:
    """Names of things by purpose and pool."""

    names: dict[str, dict[str, frozenset[str]]]
    near_copies: frozenset[str]

    def purpose_of(self, name: str) -> str | None:
        """``test`` or ``validation`` for a thing in these lists, None for a training thing."""
        return next((p for p in PURPOSES if any(name in names for names in self.names[p].values())), None)

    def withheld(self, name: str) -> tuple[str, ...]:
        """The designers whose drawings of a thing were withheld from pre-training."""
        return next(
            (POOLS[pool] for by_pool in self.names.values() for pool, names in by_pool.items() if name in names), ()
        )

    def was_read(self, name: str, style: str) -> bool:
        """Whether the backbone pre-trained on emoji saw this thing in this style."""
        if style in RARE:
            return self.purpose_of(name) is None
        return style in COMMON and STYLES[style].family not in self.withheld(name)

    def family_was_read(self, name: str, style: str) -> bool:
        """Whether that backbone saw this thing in any style of the designer's family."""
        family = STYLES[style].family
        return any(self.was_read(name, other.name) for other in STYLES.values() if other.family == family)

    def testable(self, thing: Thing, style: str, purpose: str) -> bool:
        """Whether tests for this purpose may use the thing's picture in this style."""
        if not thing.testable or thing.name in self.near_copies or self.family_was_read(thing.name, style):
            return False
        own = self.purpose_of(thing.name)
        return own == purpose or (purpose == "test" and own is None)


@lru_cache(maxsize=1)
def splits() -> Splits:
    """The lists in ``splits.json``."""
    told = json.loads(FILE.read_text(encoding="utf-8"))
    names = {p: {pool: frozenset(told[p][pool]["names"]) for pool in POOLS} for p in PURPOSES}
    return Splits(names, frozenset(told["near_copies"]["names"]))
