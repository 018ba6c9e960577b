"""Repair of damaged blobs.

States and payloads are computed again to the same digest. An update can only come from its client: the federation
pauses with a reason, accepts the same bytes again, and continues by itself.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.domain import clock, events
from promptfed.coordinator.domain.federation import Federation, OpenTask
from promptfed.coordinator.domain.round_machine import WrongMoment
from promptfed.coordinator.engine import jobs, json_logs
from promptfed.coordinator.engine.recorder import open_task
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.operations import replay
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.blobs import DamagedBlob, digest_of
from promptfed.coordinator.store.tables import FederationRow, PhaseRow, StateRow, TaskRow, UpdateRow
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.methods.core.interface.base import MethodError
from promptfed.shared.tensors import TensorError, decode, encode

log = logging.getLogger("promptfed.coordinator")


@dataclass(frozen=True)
class _Use:
    """The use of a blob in its federation; ``needed``: the run cannot continue without it."""

    name: str
    needed: bool
    help: str = "put it back from a backup, and it goes on by itself"
    resend: OpenTask | None = None


def mend(registry: Registry, id: str) -> None:
    """Repair a federation's damaged blob, on the thread for tensor work; repeated until the blob is intact.

    A federation that waits for the blob then continues. If a needed blob cannot be repaired, the federation pauses.
    """
    federation, error = registry.get(id), registry.damaged[id]
    with registry.database.read() as session:
        use = _use(session, federation, error.digest)
    if use is None:
        _settle(registry, id)  # It is not needed any more.
        return
    if registry.blobs.is_intact(error.digest) or _remade(registry, federation, error.digest):
        log.warning("%s (%s) is whole again", use.name, error.digest, extra=json_logs.where(federation))
        _settle(registry, id)
        return
    if not use.needed:
        log.error("%s (%s) %s", use.name, error.digest, error.why, extra=json_logs.where(federation))
        del registry.damaged[id]
        return
    if not federation.run.is_damaged:
        _wait_for_it(registry, federation, use, error)


def _wait_for_it(registry: Registry, federation: Federation, use: _Use, error: DamagedBlob) -> None:
    text = f"{use.name} ({error.digest}) {error.why}: {use.help}"
    if use.resend is not None:
        registry.note(federation.id, resend={use.resend.client: use.resend})
    with contextlib.suppress(WrongMoment), registry.change(federation.id) as change:
        change.send(events.Damaged(text))
        log.error("%s", text, extra=json_logs.where(federation))


def _settle(registry: Registry, id: str) -> None:
    registry.damaged.pop(id, None)
    registry.note(id, resend={})
    with contextlib.suppress(WrongMoment), registry.change(id) as change:
        change.send(events.Mended(clock.monotonic()))


def take_again(registry: Registry, id: str, upload: Upload) -> None:
    """Store an accepted update again that its client has sent again, if the stored bytes are damaged."""
    if registry.blobs.is_intact(upload.sha256):
        return
    with registry.database.read() as session:
        kept = session.scalars(select(UpdateRow.task_id).where(UpdateRow.sha256 == upload.sha256, UpdateRow.stored))
        if kept.first() is None:
            return  # It was removed on purpose.
    _keep(registry, id, upload)


def _keep(registry: Registry, id: str, content: Upload | bytes) -> None:
    with registry.blobs.hold() as held:
        if isinstance(content, bytes):
            held.put(content)
        else:
            content.keep(held)
        with registry.change(id) as change:
            change.keep(held)
    registry.wake([])


# Use of a blob


def _use(session: Session, federation: Federation, digest: str) -> _Use | None:
    """The use of a blob by a federation; None if no row refers to it."""
    row = session.get_one(FederationRow, federation.id)
    last = queries.last_state(session, federation.id)
    state = session.scalars(queries.states(federation.id).where(StateRow.sha256 == digest, StateRow.stored)).first()
    if state is not None:
        needed = last is not None and last.sha256 == digest
        return _Use(f"the state of round {state.round}", needed)
    if row.supplied_state == digest:
        return _Use("the supplied initial state", last is None, "supply it again")
    return _update_use(session, federation, digest) or _payload_use(session, federation, digest)


def _update_use(session: Session, federation: Federation, digest: str) -> _Use | None:
    query = queries.tasks_with_phases(federation.id).join(UpdateRow, UpdateRow.task_id == TaskRow.id)
    task_and_phase = session.execute(query.where(UpdateRow.sha256 == digest, UpdateRow.stored)).first()
    if task_and_phase is None:
        return None
    task, phase = task_and_phase
    name = f"the update of {task.client!r} in round {phase.round} ({phase.name})"
    help = "its client is asked to send it again; or put it back from a backup, and it goes on by itself"
    return _Use(name, phase.completed_at is None and task.counted, help, open_task(task, phase))


def _payload_use(session: Session, federation: Federation, digest: str) -> _Use | None:
    query = queries.tasks_with_phases(federation.id).order_by(PhaseRow.id.desc()).limit(1)
    task_and_phase = session.execute(query.where(TaskRow.payload_sha256 == digest, TaskRow.payload_stored)).first()
    if task_and_phase is None:
        return None
    _, phase = task_and_phase
    return _Use(f"the payload of round {phase.round} ({phase.name})", phase.completed_at is None)


# Repair


def _remade(registry: Registry, federation: Federation, digest: str) -> bool:
    """Compute the blob again from other stored blobs, which are repaired first; returns whether it worked."""
    wanted = [digest]
    while wanted:
        try:
            content = _made(registry, federation, wanted[-1])
        except DamagedBlob as further:
            if further.digest in wanted:
                return False
            wanted.append(further.digest)
            continue
        except (Refusal, MethodError, TensorError) as error:
            log.warning("%s cannot be made again: %s", wanted[-1], error, extra=json_logs.where(federation))
            return False
        if content is None or digest_of(content) != wanted[-1]:
            return False
        _keep(registry, federation.id, content)
        wanted.pop()
    return True


def _made(registry: Registry, federation: Federation, digest: str) -> bytes | None:
    """Compute a state, or an open task's payload; None for a blob that cannot be computed."""
    with registry.database.read() as session:
        row = session.scalars(queries.states(federation.id).where(StateRow.sha256 == digest)).first()
        steps = replay.steps_of(session, federation, row.round) if row is not None else []
    for step in steps:
        if row is not None and step.state.id == row.id and not step.given.gone:
            before = decode(registry.blobs.read(step.before.sha256))[0] if step.before is not None else {}
            rule = global_state.rule_of(federation, before, step.state.round, step.origin)
            return encode(replay.computed(registry, federation, step, before, step.given.updates, rule))
    return jobs.payload_again(registry, federation, digest)
