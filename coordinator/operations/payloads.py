"""Payloads of tasks, as their clients fetch them."""

from __future__ import annotations

from pathlib import Path

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.operations.submissions import asked_task


def served_payload(
    registry: Registry, federation: Federation, client: Client, task_id: str, begin: int = 0
) -> tuple[str, bytes | Path]:
    """Digest of a task's payload, and its bytes or its file. It counts as served from byte ``begin`` on.

    Raises:
        NotFound, PayloadGone: it is not there.
    """
    task = asked_task(registry.database, federation, client, task_id)
    if task.payload_sha256 is None:
        raise problems.NotFound("the payload of this task is not made yet: ask for the task first")
    if not task.payload_stored:
        raise problems.PayloadGone(f"round {task.round} is over, and the spec keeps only the last round")
    place = registry.blobs.place(task.payload_sha256)
    # Small payloads are not files, and are always sent whole.
    size = task.payload_bytes - (begin if isinstance(place, Path) and begin < task.payload_bytes else 0)
    registry.last_seen.served(task.id, size)
    registry.metrics.bytes_down.inc(size)
    return task.payload_sha256, place
