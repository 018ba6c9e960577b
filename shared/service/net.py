"""Addresses that a service listens on, and those to which a coordinator redirects its callers."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import SplitResult, urljoin, urlsplit

MOST_MOVES = 5  # that one request follows: coordinators may be handing federations to each other just then


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
        is_address = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
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


def moved_to(given: str, asked: str, location: str) -> str | None:
    """The origin that a request for the URL ``asked`` is to go to, of a coordinator's 307; None: it is not followed.

    It goes with the caller's token, so it must be the same path and query, at an origin that ``origin_for`` allows.
    """
    try:
        target = urljoin(asked, location)
        to, own = urlsplit(target), urlsplit(asked)
    except ValueError:
        return None
    return origin_for(given, target) if (to.path, to.query) == (own.path, own.query) else None


def origin_for(given: str, url: str) -> str | None:
    """The origin of a URL that a coordinator names; None unless it is as well protected as all ``given`` addresses.

    It must be over TLS if any of them is, and on this machine or over TLS if any of them is on this machine.
    """
    try:
        to, firsts = urlsplit(url), [urlsplit(address) for address in addresses_of(given)]
        port = to.port
    except ValueError:
        return None
    if to.scheme not in ("http", "https") or to.username is not None or not to.hostname:
        return None
    if to.scheme == "http" and not all(first.scheme == "http" for first in firsts):
        return None
    stays = any(is_loopback(first.hostname or "") for first in firsts)
    if to.scheme == "http" and stays and not is_loopback(to.hostname):
        return None
    shown = f"[{to.hostname}]" if ":" in to.hostname else to.hostname
    return f"{to.scheme}://{shown}" + (f":{port}" if port is not None else "")
