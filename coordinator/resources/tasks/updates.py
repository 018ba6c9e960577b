"""Admission of updates: they are stored durably, or refused, which is only counted.

Compressed updates become plain ones before anything is checked or stored.
"""

from __future__ import annotations

import math
import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from pydantic import ValidationError

from promptfed.coordinator import problems
from promptfed.coordinator.aggregation.rows import change_norm
from promptfed.coordinator.domain.federation import Client, Federation, OpenTask
from promptfed.coordinator.engine.answers import Answer, AskedTask, asked_task, decided
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.resources.tasks.privacy_costs import spent_by
from promptfed.coordinator.resources.tasks.reports import kept_numbers
from promptfed.coordinator.store.blobs import Blobs, digest_of, digest_of_file
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.messages import UpdateMetadata
from promptfed.shared.methods.core import client_numbers
from promptfed.shared.methods.core.costs import change_limit
from promptfed.shared.service.fault_points import point
from promptfed.shared.tensors import (
    DTYPES,
    LARGE,
    Arrays,
    TensorError,
    check,
    decode,
    decode_file,
    decode_place,
    encode,
    encode_file,
)
from promptfed.shared.tensors.compression import added, decompressed

_one_large = threading.Lock()
"""Of large updates one at a time is expanded: some kilobytes may stand for hundreds of megabytes."""
# Norms of prompts are far smaller. Squares of such numbers may overflow float32, and one update end the federation.
LARGEST_NORM = 1e9
QUICK_HEADER_BYTES = 4096  # of a small update; a longer header may name thousands of tensors


def expanded(blobs: Blobs, federation: Federation, client: Client, task: OpenTask, upload: Upload) -> Upload:
    """The update that a compressed change makes of its task's payload; as it is without compression.

    A large one is the file at the upload's path, also where the change was in memory.

    Raises:
        TensorError: the tensors are not those of a compressed change.
    """
    up = federation.spec.compression.up
    if up == "none":
        return upload
    phase = federation.method_phase(task.round, task.step)
    expected = federation.method.expected_update(phase, client, federation.context())
    size = sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in expected.values())
    payload = decode_place(blobs.place(task.payload_sha256 or ""))[0]
    with _one_large if size >= LARGE else nullcontext():
        tensors, metadata = upload.tensors()
        update = added(decompressed(tensors, expected, up), payload)
        if upload.content is not None and blobs.is_small(size):
            content = encode(update, metadata)
            return replace(upload, content=content, size=len(content), sha256=digest_of(content))
        draft = upload.path.with_suffix(".expanded")
        try:
            encode_file(update, draft, metadata)
            os.replace(draft, upload.path)
        finally:
            draft.unlink(missing_ok=True)
    size = upload.path.stat().st_size
    return replace(upload, content=None, size=size, sha256=digest_of_file(upload.path) or "")


async def accept_update(
    registry: Registry, federation: Federation, client: Client, task_id: str, upload: Upload
) -> bool:
    """Admit an update; returns whether it is new. The protocol defines the order of refusals."""
    accounted = federation.spec.privacy.protects_records
    if _is_quick(upload) and not accounted and _is_remembered(registry, federation, client):
        examined = _admit(registry, federation, client, task_id, upload)
    else:
        examined = await run_sync(_admit, registry, federation, client, task_id, upload)
    if examined is None:
        return False
    whole, columns = examined
    with registry.blobs.hold() as held:
        if whole.content is None:
            # Before its row is written. The files of a group are synced in parallel.
            await run_sync(whole.keep, held)
        else:
            whole.keep(held)
        sent = upload.sha256 if upload.sha256 != whole.sha256 else None
        row = {**columns, "sha256": whole.sha256, "sent": sent, "bytes": upload.size, "stored": True}
        new = await registry.committer.submit(Answer(federation.id, client, task_id, upload.sha256, "train", row, held))
    if new:
        registry.metrics.bytes_up.inc(upload.size)
    return new


def _is_quick(upload: Upload) -> bool:
    """Whether checking the update takes less time than starting a thread for it."""
    return upload.content is not None and int.from_bytes(upload.content[:8], "little") <= QUICK_HEADER_BYTES


def _is_remembered(registry: Registry, federation: Federation, client: Client) -> bool:
    """Whether the client's open task and its payload, which the change is measured against, are in memory."""
    task = federation.tasks.get(client.name)
    return (
        task is not None
        and task.payload_sha256 is not None
        and registry.blobs.remembered(task.payload_sha256) is not None
    )


def _admit(
    registry: Registry, federation: Federation, client: Client, task_id: str, upload: Upload
) -> tuple[Upload, dict[str, Any]] | None:
    """The checked update as it is stored, and columns of its row; None if it was accepted before."""
    task = asked_task(registry.database, federation, client, task_id)
    if decided(federation, task, "train", None if upload.too_large else upload.sha256):
        return None
    if upload.too_large:
        limit = federation.update_limit
        raise problems.BodyTooLarge(f"an update may have {limit} bytes (admission.max_bytes); this one has more")
    try:
        whole = expanded(registry.blobs, federation, client, task, upload)
    except TensorError as error:
        raise problems.TENSOR_REFUSALS[error.kind](str(error)) from None
    examined = _examine(registry, federation, client, task, whole)
    point("update-checked")
    return whole, examined


def _examine(
    registry: Registry, federation: Federation, client: Client, task: AskedTask, upload: Upload
) -> dict[str, Any]:
    """Check an update; returns columns of its row."""
    phase, blobs = federation.method_phase(task.round, task.step), registry.blobs
    try:
        tensors, metadata = upload.tensors()
        size = check(tensors, federation.method.expected_update(phase, client, federation.context()))
    except TensorError as error:
        raise problems.TENSOR_REFUSALS[error.kind](str(error)) from None
    change = _check_change(federation, tensors, _payload_tensors(blobs.place(task.payload_sha256 or "")))
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
    spent = spent_by(registry.database, federation, client, about.privacy)
    patterns = client_numbers.of_training(federation.method, federation.privacy is not None, summed=False)
    metrics = kept_numbers(federation, client, about.metrics, patterns)
    if upload.content is not None:
        blobs.admitted.add(upload.sha256, (tensors, change), upload.size)
    return {"norm": size, "metrics": metrics, "spent": spent}


def _payload_tensors(place: bytes | Path) -> Arrays:
    """The tensors of a payload, which are only read."""
    return _decoded(place) if isinstance(place, bytes) else decode_file(place)[0]


@lru_cache(maxsize=8)  # the clients of a phase mostly have the same payload
def _decoded(content: bytes) -> Arrays:
    return decode(content)[0]


def _check_change(federation: Federation, tensors: Arrays, payload: Arrays) -> float:
    """The norm of a change; one over the limit is refused. The payload, which may be long already, does not count."""
    numbers = sum(tensor.size for tensor in tensors.values())
    size, limit = change_norm(tensors, payload), change_limit(federation.spec, federation.method, numbers)
    if size <= limit:
        return size
    text = f"the change's norm is {size:.6g}; {limit:.6g} is allowed"
    if federation.spec.admission.max_update_norm is not None:
        raise problems.NormTooLarge(f"{text} (admission.max_update_norm)")
    raise problems.NormTooLarge(
        f"{text} ({federation.method.name}'s limit for {numbers:,} numbers): if training has not diverged, create the "
        "federation with a higher admission.max_update_norm"
    )


def _metadata(value: object) -> UpdateMetadata:
    try:
        return UpdateMetadata.model_validate(value)
    except ValidationError as error:
        raise problems.BadMetadata(f"metadata {problems.first_error(error, 'promptfed')}") from None
