"""Tasks as clients get them, with their payloads."""

from __future__ import annotations

from base64 import b64encode
from functools import lru_cache
from pathlib import Path

from promptfed.coordinator import problems
from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Client, Federation, OpenTask
from promptfed.coordinator.engine.answers import asked_task
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.engine.selection import selected_round
from promptfed.coordinator.http.deps import CallingClient
from promptfed.shared.messages import INLINE_BYTES, PayloadRef, SecurePart, Task, TaskConfig
from promptfed.shared.spec.sections import FINAL


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
    note_served(registry, task.id, size)
    return task.payload_sha256, place


def note_served(registry: Registry, task_id: str, size: int) -> None:
    """Count bytes of a task's payload as served."""
    registry.last_seen.served(task_id, size)
    registry.metrics.bytes_down.inc(size)


def config_of(federation: Federation) -> TaskConfig:
    """The part of a task that is the same for all clients."""
    # Most methods do not need it, and a thousand descriptions would make every task long.
    peers = federation.peers() if federation.method.needs.domain_descriptions else []
    return TaskConfig(**dict(federation.training_terms()), peers=peers)


def message(registry: Registry, federation: Federation, task: OpenTask, inline: bool) -> Task:
    """An open task; ``inline``: with its payload, if that is small and in memory."""
    assert federation.run.stage is not None
    assert task.payload_sha256 is not None
    selected, phase, secure, data = None, task.phase, None, None
    if phase == FINAL:
        with registry.database.read() as session:
            selected = selected_round(session, federation)
    plan = federation.rules.plan(task.round, task.step) if task.kind != "evaluate" else None
    if plan is not None and plan.secure is not None:
        phase, secure = plan.secure.phase, SecurePart(phase=plan.secure.phase, attempt=plan.secure.attempt)
    if inline and task.payload_bytes <= INLINE_BYTES:
        content = registry.blobs.remembered(task.payload_sha256)
        if content is not None:
            data = _base64(content)
            note_served(registry, task.id, task.payload_bytes)
    return Task(
        task_id=task.id,
        kind=task.kind,
        round=task.round,
        phase=phase,
        deadline=clock.parse(federation.deadline or clock.now()),
        seconds_left=round(max(0.0, federation.run.stage.deadline - clock.monotonic()), 3),
        payload=PayloadRef(
            url=f"/v1/federations/{federation.id}/tasks/{task.id}/payload",
            bytes=task.payload_bytes,
            sha256=task.payload_sha256,
            data=data,
        ),
        config=_config(registry, federation),
        epoch=registry.epoch,
        secure=secure,
        selected=selected,
    )


@lru_cache(maxsize=8)
def _base64(content: bytes) -> str:
    return b64encode(content).decode()


def _config(registry: Registry, federation: Federation) -> TaskConfig:
    """The part of a task that is the same for all clients: made again only when the clients have changed."""
    kept = registry.configs.get(federation.id)
    if kept is not None and kept[0] is federation.run.members and kept[1] is federation.clients:
        return kept[2]
    config = config_of(federation)
    registry.configs[federation.id] = (federation.run.members, federation.clients, config)
    return config


def is_at_hand(registry: Registry, caller: CallingClient, task_id: str) -> bool:
    """Whether the payload is kept without asking the database or the disk."""
    task = caller.federation.tasks.get(caller.client.name)
    if task is None or task.id != task_id or task.payload_sha256 is None:
        return False
    return registry.blobs.remembered(task.payload_sha256) is not None
