"""The door for answers: an update or evaluation is stored durably, or refused with nothing changed but a counter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator import problems
from promptfed.coordinator.domain import clock, events
from promptfed.coordinator.domain.federation import Client, Federation, OpenTask
from promptfed.coordinator.domain.run_state import ENDED
from promptfed.coordinator.engine.recorder import Change, open_task
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.blobs import digest_of
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.tables import EvaluationRow, PhaseRow, TaskRow, UpdateRow
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.messages import EvaluationRequest, FailureRequest, UpdateMetadata
from promptfed.shared.tensors import TensorError, canonical_json, check, decode_file, norm

# No prompt comes near it, and what methods make of such numbers (squares, products of several updates) may overflow
# float32: the aggregate would be no state, and one update the end of the federation.
LARGEST_NORM = 1e9


@dataclass(frozen=True)
class AskedTask(OpenTask):
    """A task of a client, open or over; ``accepted`` is the digest of the answer that it already has."""

    status: str = "open"
    payload_stored: bool = True
    accepted: str | None = None


def asked_task(session: Session | Database, federation: Federation, client: Client, task_id: str) -> AskedTask:
    """The client's task. Raises NotFound for another's, or none."""
    task = federation.tasks.get(client.name)
    if task is not None and task.id == task_id:
        return AskedTask(**vars(task))  # No need to ask the database what memory holds.
    if isinstance(session, Database):
        with session.read() as reading:
            return asked_task(reading, federation, client, task_id)
    row_and_phase = session.execute(
        select(TaskRow, PhaseRow)
        .join(PhaseRow, PhaseRow.id == TaskRow.phase_id)
        .where(TaskRow.id == task_id, TaskRow.federation_id == federation.id, TaskRow.client == client.name)
    ).one_or_none()
    if row_and_phase is None:
        raise problems.NotFound(f"this client has no task {task_id[:100]!r}")
    row, phase = row_and_phase
    accepted = select(UpdateRow.sha256).where(UpdateRow.task_id == row.id)
    if phase.kind == "evaluate":
        accepted = select(EvaluationRow.digest).where(EvaluationRow.task_id == row.id)
    return AskedTask(
        **vars(open_task(row, phase)),
        status=row.status,
        payload_stored=row.payload_stored,
        accepted=session.scalar(accepted),
    )


def payload(registry: Registry, federation: Federation, client: Client, task_id: str) -> tuple[str, Path, int]:
    """Digest, file and bytes of a task's payload. Raises NotFound, PayloadGone."""
    task = asked_task(registry.database, federation, client, task_id)
    if task.payload_sha256 is None:
        raise problems.NotFound("the payload of this task is not made yet: ask for the task first")
    if not task.payload_stored:
        raise problems.PayloadGone(f"round {task.round} is over, and the spec keeps only the last round")
    registry.last_seen.served(task.id, task.payload_bytes)
    registry.metrics.bytes_down.inc(task.payload_bytes)
    return task.payload_sha256, registry.blobs.path(task.payload_sha256), task.payload_bytes


def accept_update(registry: Registry, federation: Federation, client: Client, task_id: str, upload: Upload) -> bool:
    """Admit an update; whether it is new. The refusals come in the order that the protocol gives."""
    task = asked_task(registry.database, federation, client, task_id)
    if _decided(federation, task, "train", None if upload.too_large else upload.sha256):
        return False
    if upload.too_large:
        limit = federation.spec.admission.max_bytes
        raise problems.BodyTooLarge(f"an update may have {limit} bytes (admission.max_bytes); this one has more")
    size, metrics = _examine(federation, client, task, upload)
    point("update-checked")
    with registry.blobs.hold() as held:
        held.adopt(upload.path, upload.sha256)
        with registry.change(federation.id) as change:
            # Looked at again inside the transaction: the phase may have closed, or a twin of this request been faster.
            task = asked_task(change.session, change.federation, client, task_id)
            if _decided(change.federation, task, "train", upload.sha256):
                return False
            change.session.add(
                UpdateRow(
                    task_id=task.id,
                    sha256=upload.sha256,
                    bytes=upload.size,
                    norm=size,
                    metrics=metrics,
                    received_at=clock.now(),
                    stored=True,
                )
            )
            change.send(events.Answered(client.name, clock.monotonic()))
            point("update-before-commit")
    point("update-committed")
    registry.metrics.bytes_up.inc(upload.size)
    return True


def accept_evaluation(
    registry: Registry, federation: Federation, client: Client, task_id: str, request: EvaluationRequest
) -> bool:
    """Store a client's accuracies; whether they are new."""
    body = request.model_dump(mode="json")
    digest = digest_of(canonical_json(body).encode())
    with registry.change(federation.id) as change:
        task = asked_task(change.session, change.federation, client, task_id)
        if _decided(change.federation, task, "evaluate", digest):
            return False
        row = EvaluationRow(task_id=task.id, digest=digest, body=body, received_at=clock.now())
        change.session.add(row)
        change.send(events.Answered(client.name, clock.monotonic()))
        point("evaluation-before-commit")
    point("evaluation-committed")
    return True


def accept_failure(
    registry: Registry, federation: Federation, client: Client, task_id: str, request: FailureRequest
) -> None:
    """Note that a client cannot carry out its task; saying so again changes nothing."""
    with registry.change(federation.id) as change:
        task = asked_task(change.session, change.federation, client, task_id)
        if task.status == "failed":
            return
        if task.accepted is not None:
            raise problems.AlreadyAnswered("this task was answered before it was reported as failed: its answer stands")
        _expect_open(change.federation, task)
        _note_failure(change, task, request)
        change.send(events.Failed(client.name, clock.monotonic()))


def _note_failure(change: Change, task: AskedTask, request: FailureRequest) -> None:
    change.session.get_one(TaskRow, task.id).failure = request.model_dump()


def _decided(federation: Federation, task: AskedTask, kind: str, digest: str | None) -> bool:
    """Whether just this answer has been accepted before; refuses what can no longer be one."""
    if task.kind != kind:
        wanted = "an update" if task.kind == "train" else "an evaluation"
        raise problems.WrongTaskKind(f"this task wants {wanted}")
    if task.accepted is not None and task.accepted == digest:
        return True
    if task.accepted is not None:
        raise problems.AlreadyAnswered(f"this task was answered with {task.accepted}; that answer stands")
    _expect_open(federation, task)
    return False


def _expect_open(federation: Federation, task: AskedTask) -> None:
    if task.status == "open" and federation.run.state not in ENDED:
        return
    where = f"round {federation.run.round}" + (f", {federation.phase}" if federation.phase else "")
    over = f"the phase of round {task.round} that this task belonged to is over ({task.status})"
    text = f"{over}; {federation.name} is in {where}"
    raise problems.PhaseClosed(text, round=federation.run.round, phase=federation.phase, state=federation.run.state)


def _examine(federation: Federation, client: Client, task: AskedTask, upload: Upload) -> tuple[float, dict[str, Any]]:
    """Norm and metrics of an update that is as it must be."""
    phase = federation.method_phase(task.round, task.step)
    try:
        tensors, metadata = decode_file(upload.path)
        check(tensors, federation.method.expected_update(phase, client.info(), federation.context()))
    except TensorError as error:
        raise problems.TENSOR_REFUSALS[error.kind](str(error)) from None
    size, limit = norm(tensors), federation.spec.admission.max_update_norm
    if limit is not None and size > limit:
        raise problems.NormTooLarge(
            f"the update's norm is {size:.6g}; {limit:g} is allowed (admission.max_update_norm)"
        )
    if size > LARGEST_NORM:
        text = f"the update's norm is {size:.6g}; no federation takes more than {LARGEST_NORM:g}"
        raise problems.NormTooLarge(f"{text}: training has diverged, lower training.learning_rate")
    about = _metadata(metadata)
    if about.task_id != task.id:
        raise problems.WrongTask(f"the metadata names task {about.task_id!r}; the update was sent for {task.id!r}")
    if about.payload_sha256 != task.payload_sha256:
        raise problems.WrongPayload(
            f"the update was made from payload {about.payload_sha256}; {task.payload_sha256} was served: train again"
        )
    return size, about.metrics


def _metadata(value: object) -> UpdateMetadata:
    try:
        return UpdateMetadata.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "promptfed"
        raise problems.BadMetadata(f"metadata {place}: {first['msg']}") from None
