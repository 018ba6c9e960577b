"""Connections, limited by the open files of the process.

Where a process has no open file left, asyncio fills the log with thousands of lines a second and answers nobody, and
neither the database nor an update can be opened: whoever can reach the port could bring that about.
"""

from __future__ import annotations

import asyncio

from promptfed.coordinator.http.certificates import names_shown, with_certificate
from promptfed.shared.service.http_connection import LimitedHttpProtocol
from promptfed.shared.service.open_files import most_connections

ACCEPTED_AT_ONCE = 32  # several times as many may have been accepted before the first of them is looked at
QUEUE = 2048  # connections that the system keeps until they are accepted


class LimitedConnection(LimitedHttpProtocol):
    """A connection that ends at once where the process has as many as it can keep open."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or end it at once where there are too many."""
        super().connection_made(transport)
        shown = names_shown(transport)
        if shown:
            self.app = with_certificate(self.app, shown)
        if len(self.connections) > most_connections():
            transport.abort()
