"""A federation whose first phase is open, and all that a refusal must not change."""

from __future__ import annotations

from typing import Any

import httpx

from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.tables import PhaseRow, TaskRow, UpdateRow
from promptfed.testing.clients import ScriptedClient
from tests.support.coordinators import InThread


def kind(response: httpx.Response) -> str:
    """A refusal's problem type, without the address before it."""
    return str(response.json()["type"]).rsplit("/", 1)[-1]


def open_first_phase(
    coordinator: InThread, *names: str, **changes: Any
) -> tuple[str, list[ScriptedClient], list[dict[str, Any]]]:
    """A federation in its first training phase."""
    federation = coordinator.create(**changes)
    clients = coordinator.enrol(federation, *(names or ("a", "b")))
    coordinator.post(f"{federation}/start")
    return federation, clients, coordinator.training(clients)


def stored_rows(registry: Registry, federation: str) -> tuple[Any, ...]:
    """All that a refusal must not change."""
    with registry.database.read() as session:
        rows = [
            [(row.id, row.status, row.payload_sha256, row.counted) for row in session.query(TaskRow)],
            [(row.task_id, row.sha256) for row in session.query(UpdateRow)],
            [(row.id, row.closed_at, row.completed_at) for row in session.query(PhaseRow)],
        ]
    return registry.federations[federation].run, rows, sorted(registry.blobs.all())


def paused_phase(coordinator: InThread, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    """A federation whose clients' first updates are accepted, and the phase not closed yet: it is paused."""
    federation, clients, tasks = open_first_phase(coordinator, **changes)
    coordinator.post(f"{federation}/pause")
    for client, task in zip(clients, tasks, strict=True):
        assert client.answer(task).status_code == 201
    return federation, clients
