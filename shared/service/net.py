"""Addresses that a service listens on, and those to which a coordinator redirects its callers."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urljoin, urlsplit

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


def moved_to(base: str, asked: str, location: str) -> str | None:
    """The origin that a request for the URL ``asked`` is to go to, of a coordinator's 307; None: it is not followed.

    It goes with the caller's token, so it must be the same path and query, as well protected as ``base`` is: over TLS
    where that is, on this machine where that is.
    """
    try:
        to, own, first = urlsplit(urljoin(asked, location)), urlsplit(asked), urlsplit(base)
        port = to.port
    except ValueError:
        return None
    if (to.path, to.query) != (own.path, own.query) or to.username is not None or not to.hostname:
        return None
    if to.scheme not in (first.scheme, "https") or to.scheme not in ("http", "https"):
        return None
    if to.scheme == "http" and is_loopback(first.hostname or "") and not is_loopback(to.hostname):
        return None
    shown = f"[{to.hostname}]" if ":" in to.hostname else to.hostname
    return f"{to.scheme}://{shown}" + (f":{port}" if port is not None else "")
