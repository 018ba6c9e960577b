"""The versions of the release and of the protocol, and a peer of another one."""

from __future__ import annotations

import platform
import re

from promptfed.shared import __version__

RELEASE = __version__

SYSTEM = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"

VERSION = 4

PROTOCOL = "Promptfed-Protocol"


class OtherVersion(Exception):
    """A peer speaks another version of the protocol. The message says which side to update."""


def expect_ours(told: str | None, peer: str, own: str) -> None:
    """Raise OtherVersion where ``peer`` tells another version than that of ``own``; who tells none is not judged.

    Releases before 0.4.0 tell a range, as ``1-3``.
    """
    if told is None or told == str(VERSION):
        return
    found = re.fullmatch(r"(?:\d{1,6}-)?(\d{1,6})", told)
    version = int(found[1]) if found else 0
    text = f"{peer} speaks version {version} of the protocol, {own} version {VERSION}"
    raise OtherVersion(f"{text}: update {own if version > VERSION else peer}")
