"""Addresses of services: how they are written, which is loopback, and which of several is asked."""

from __future__ import annotations

import ipaddress
import socket
import time
from urllib.parse import SplitResult, urlsplit

QUIET_SECONDS = 3.0  # without a byte, after which a caller asks ``/readyz`` whether the coordinator is there
GONE_SECONDS = 5.0  # without a byte and without an answer to that: the caller moves on to the next address


def is_loopback(host: str) -> bool:
    """Whether nothing outside this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to ``host`` and ``port`` (0: any free one). Raises OSError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio switches Nagle's algorithm off; without, every answer would wait 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError:
        listening.close()
        raise
    return listening


def url_of(listening: socket.socket, host: str, scheme: str = "http") -> str:
    """The address of what listens on ``host``."""
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{listening.getsockname()[1]}"


def address_parts(address: str) -> SplitResult:
    """The parts of a service's address. Raises ValueError if it is none."""
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port beyond 65535, a bracket that is not closed
        is_address = False
    if not is_address or not address.isprintable() or " " in address:
        raise ValueError(f"{address!r} is not an address: write http://host:port or https://host")
    return parts


def addresses_of(text: str) -> list[str]:
    """The addresses that a setting names, separated by commas, each once and without a slash at its end."""
    return list(dict.fromkeys(part.strip().rstrip("/") for part in text.split(",") if part.strip()))


def check_addresses(text: str) -> str:
    """The addresses of ``text``, separated by commas. Raises ValueError unless each has a scheme and a host alone."""
    for address in addresses_of(text) or [text]:
        parts = address_parts(address)
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("must hold scheme, host, port and path only: credentials go into files")
    return ",".join(addresses_of(text))


class Addresses:
    """Which coordinator to ask next, of several that wait for each other: one of those ``given``, by commas."""

    def __init__(self, given: str):
        self.all = addresses_of(given)
        self.current = self.all[0]
        self.failed = given  # the address that did not answer last
        self._silent: dict[str, float] = {}

    @property
    def several(self) -> bool:
        """Whether there is another one to go to."""
        return len(self.all) > 1

    def note_silent(self, address: str) -> None:
        """This one does not answer: others come first for a while."""
        self._silent[address] = time.monotonic() + GONE_SECONDS

    def move_on(self) -> None:
        """Make the next address the current one, of those that have not been silent a moment ago if there are any."""
        at = self.all.index(self.current)
        following = [*self.all[at + 1 :], *self.all[: at + 1]]
        now = time.monotonic()
        self.current = next((one for one in following if self._silent.get(one, 0.0) <= now), following[0])
