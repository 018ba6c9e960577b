"""Clients are called by their id or their name."""

from __future__ import annotations

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Federation


def client_name(federation: Federation, id_or_name: str) -> str:
    """The name of the client with this id or name. Raises NotFound."""
    for client in federation.clients.values():
        if id_or_name in (client.id, client.name):
            return client.name
    raise problems.NotFound(f"{federation.name} has no client {id_or_name[:100]!r}")
