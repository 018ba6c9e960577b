"""Versions of the protocol: what a peer of another release knows.

Each side tells the versions that it speaks in the header `PROTOCOL`, as ``1-2``; release 0.1.0 tells none. A field
that a later version has added is declared with `left_out(since=...)`. It is not sent to a peer that does not know it.
"""

from __future__ import annotations

import copy
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from promptfed.shared import __version__

RELEASE = __version__
SYSTEM = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
RELEASES = {1: "0.1.0", 2: "0.2.0", 3: "0.3.0"}
"""The release that brought each version of the protocol; the last one is this release's."""
OLDEST, NEWEST = min(RELEASES), max(RELEASES)
PROTOCOL = "Promptfed-Protocol"

_known_to_peer: ContextVar[int] = ContextVar("known_to_peer", default=NEWEST)
_heard_from: ContextVar[Versions] = ContextVar("heard_from")
Valid = TypeVar("Valid")

_RANGE = re.compile(r"(\d{1,6})-(\d{1,6})")


class NoCommonVersion(Exception):
    """A peer with which there is no common version. The message says which side to update."""


@dataclass(frozen=True)
class Versions:
    """The oldest and the newest version of the protocol that a release speaks."""

    oldest: int = OLDEST
    newest: int = NEWEST

    def __str__(self) -> str:
        return f"{self.oldest}-{self.newest}"

    @property
    def is_newer(self) -> bool:
        """Whether messages of this peer may have keys that this release does not know."""
        return self.newest > NEWEST

    def expect_common(self, peer: str, own: str) -> None:
        """Raise NoCommonVersion where ``peer``, of these versions, and ``own``, of this release, share none."""
        if self.oldest <= NEWEST and self.newest >= OLDEST:
            return
        text = f"{peer} speaks versions {self} of the protocol, {own} {OURS}"
        if self.newest < OLDEST:
            raise NoCommonVersion(f"{text}: update {peer} to promptfed {RELEASES[OLDEST]} or later")
        raise NoCommonVersion(f"{text}: update {own} to a release that speaks version {self.oldest}")

    @contextmanager
    def addressed(self) -> Iterator[None]:
        """Leave out of messages, for the length of a block, what this peer does not know."""
        before = _known_to_peer.set(min(self.newest, NEWEST))
        try:
            yield
        finally:
            _known_to_peer.reset(before)


OURS = Versions()


def versions_of(header: str | None) -> Versions:
    """What a peer tells in its header `PROTOCOL`. One without it is of the first release."""
    told = _RANGE.fullmatch(header or "")
    return Versions(int(told[1]), int(told[2])) if told else Versions(1, 1)


def hear(header: str | None) -> None:
    """Validate what this request says as of a client with this header."""
    _heard_from.set(versions_of(header))


def heard() -> Versions:
    """The versions of the client whose request is being answered."""
    return _heard_from.get(OURS)


def is_sent(since: int) -> bool:
    """Whether the peer to which a message goes knows fields of version ``since``."""
    return _known_to_peer.get() >= since


def tolerant(given: Any, validate: Callable[[Any], Valid], peer: Versions) -> Valid:
    """``validate(given)``, without keys that only a newer ``peer`` knows. Raises ValidationError."""
    try:
        return validate(given)
    except ValidationError as error:
        unknown = [found["loc"] for found in error.errors() if found["type"] == "extra_forbidden"]
        if not peer.is_newer or not unknown:
            raise
    given = copy.deepcopy(given)
    for *parents, key in unknown:
        place = given
        for parent in parents:
            place = place[parent]
        del place[key]
    return validate(given)
