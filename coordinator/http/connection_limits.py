"""Connections: as many as there are open files for; none that never asks for anything (`shared.http_connection`).

Where a process has no open file left, asyncio fills the log with thousands of lines a second and answers nobody, and
neither the database nor an update can be opened: whoever can reach the port could bring that about.
"""

from __future__ import annotations

import asyncio

from promptfed.coordinator.http.callers import WithCertificate, names_shown
from promptfed.shared.service.http_connection import LimitedHttpProtocol
from promptfed.shared.service.net import most_connections

ACCEPTED_AT_ONCE = 32  # several times as many may have been accepted before the first of them is looked at
QUEUE = 2048  # connections that the system keeps until they are accepted


class LimitedConnection(LimitedHttpProtocol):
    """Hangs up on whoever is one too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or end it at once where there are too many."""
        super().connection_made(transport)
        shown = names_shown(transport)
        if shown:
            self.app = WithCertificate(self.app, shown)
        if len(self.connections) > most_connections():
            transport.abort()
