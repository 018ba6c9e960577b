"""Ports for servers that have to be told theirs before they start."""

from __future__ import annotations

import os
import socket
from itertools import count

# Below what systems give to whoever asks for any port: nobody else is given one between the look and the start.
FIRST, PORTS, EACH = 10_000, 6_000, 16
_numbers = count()


def free_port() -> int:
    """A port of loopback that nobody listens on; each of the tests' processes has some for itself."""
    for _ in range(PORTS):
        port = FIRST + (os.getpid() * EACH + next(_numbers)) % PORTS
        with socket.socket() as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
