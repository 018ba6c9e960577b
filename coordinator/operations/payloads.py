"""Payloads of tasks, as their clients fetch them."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.operations.submissions import AskedTask, asked_task
from promptfed.coordinator.store.tables import TaskRow


def served_payload(
    registry: Registry, federation: Federation, client: Client, task_id: str, begin: int = 0, base: str | None = None
) -> tuple[str, bytes | Path]:
    """Digest of a task's payload, and its bytes or its file. It counts as served from byte ``begin`` on.

    With ``base`` the digest of a payload that this client got before, from which the bytes are a difference; the digest
    is the payload's own where they are none. Raises NotFound, PayloadGone.
    """
    task = asked_task(registry.database, federation, client, task_id)
    if task.payload_sha256 is None:
        raise problems.NotFound("the payload of this task is not made yet: ask for the task first")
    if not task.payload_stored:
        raise problems.PayloadGone(f"round {task.round} is over, and the spec keeps only the last round")
    delta = _delta(registry, federation, client, task, base) if base is not None else None
    if delta is not None:
        size = len(delta) if isinstance(delta, bytes) else delta.stat().st_size
        registry.last_seen.served(task.id, size)
        registry.metrics.bytes_down.inc(size)
        return str(base), delta
    place = registry.blobs.place(task.payload_sha256)
    # Small payloads are not files, and are always sent whole.
    size = task.payload_bytes - (begin if isinstance(place, Path) and begin < task.payload_bytes else 0)
    registry.last_seen.served(task.id, size)
    registry.metrics.bytes_down.inc(size)
    return task.payload_sha256, place


def _delta(
    registry: Registry, federation: Federation, client: Client, task: AskedTask, base: str
) -> bytes | Path | None:
    """The difference to the payload ``base``, if the client was given it: of another one it would tell something."""
    if federation.spec.compression.down != "delta" or task.payload_sha256 is None:
        return None
    own = (TaskRow.federation_id == federation.id, TaskRow.client == client.name, TaskRow.payload_sha256 == base)
    with registry.database.read() as session:
        known = session.scalar(select(TaskRow.id).where(*own).limit(1))
    return registry.deltas.between(base, task.payload_sha256) if known is not None else None
