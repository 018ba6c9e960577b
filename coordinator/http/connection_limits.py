"""Connections: as many as there are open files for; none that never asks for anything (`shared.http_connection`).

Where a process has no open file left, asyncio fills the log with thousands of lines a second and answers nobody, and
neither the database nor an update can be opened: whoever can reach the port could bring that about.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource

from promptfed.coordinator.http.certificates import WithCertificate, names_shown
from promptfed.shared.service.http_connection import StrictHttpProtocol

ACCEPTED_AT_ONCE = 32  # several times as many may have been accepted before the first of them is looked at
QUEUE = 2048  # connections that the system keeps until they are accepted
ENOUGH_FILES = 65_536  # where the system names no limit
KEPT_FILES = 400  # for these, the database's connections, blobs and uploads


def raise_open_files() -> None:
    """Allow this process as many open files as the system lets it have: the usual 1,024 do not do for 1,000 clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Where nothing is the limit (macOS says so), the kernel still has one, and refuses to be asked for more.
    wanted = max(soft, ENOUGH_FILES) if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """How many connections leave enough open files for everything else."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return ENOUGH_FILES
    return max(files - KEPT_FILES, files // 2)


class LimitedConnection(StrictHttpProtocol):
    """Hangs up on whoever is one too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or end it at once where there are too many."""
        super().connection_made(transport)
        shown = names_shown(transport)
        if shown:
            self.app = WithCertificate(self.app, shown)
        if len(self.connections) > most_connections():
            transport.abort()
