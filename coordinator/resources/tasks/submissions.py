"""Payloads of tasks, and admission of their answers: updates and evaluations are stored durably, or refused.

A refusal is only counted. Compressed updates become plain ones before anything is checked or stored. An answer to a
step of a secure sum is stored in the transaction that settles its task.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from anyio.to_thread import run_sync
from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from promptfed.coordinator import problems
from promptfed.coordinator.aggregation import secure_sums
from promptfed.coordinator.aggregation.rows import change_norm
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Client, Federation, OpenTask
from promptfed.coordinator.engine import sums
from promptfed.coordinator.engine.log_lines import where
from promptfed.coordinator.engine.recorder import Change, open_task
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.engine.sums import attempt_of
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.blobs import Blobs, Held, digest_of, digest_of_file
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import EvaluationRow, ExchangeRow, TaskRow, UpdateRow
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.api.report_schemas import SpentPrivacy
from promptfed.shared.canonical import canonical_json
from promptfed.shared.messages import ENDED, EvaluationRequest, FailureRequest, SpendReport, TaskConfig, UpdateMetadata
from promptfed.shared.methods.core import client_numbers
from promptfed.shared.methods.core.costs import change_limit
from promptfed.shared.plain_text import plain
from promptfed.shared.privacy.accounting import (
    COARSE,
    PrivacyError,
    check_delta,
    epsilon_of,
    replace_one_epsilon,
    training_event,
)
from promptfed.shared.secagg import SecureError, opening
from promptfed.shared.secagg.masks import looks_unmasked
from promptfed.shared.secagg.messages import (
    LEAST_EFFECTIVE,
    ConfirmAnswer,
    KeysAnswer,
    SharesAnswer,
    UnmaskAnswer,
    expect_keys,
    is_entry_signed,
    too_heavy,
)
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.sections import Weighting
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

log = logging.getLogger("promptfed.coordinator")
MOST_NAMED = 10  # of what is dropped, in a line of the log
TOLERANCE = 0.01  # by which another version's accountant may come to less
_one_large = threading.Lock()
"""Of large updates one at a time is expanded: some kilobytes may stand for hundreds of megabytes."""

# Norms of prompts are far smaller. Squares of such numbers may overflow float32, and one update end the federation.
LARGEST_NORM = 1e9

QUICK_HEADER_BYTES = 4096  # of a small update; a longer header may name thousands of tensors
MOST_BYTES = 4 << 20  # of an answer without a vector


def kept_numbers(
    federation: Federation, client: Client, given: Mapping[str, float], patterns: list[str]
) -> dict[str, float]:
    """Those of the ``given`` numbers that the method declares; the log names the others."""
    kept = client_numbers.declared(given, patterns)
    if dropped := sorted(given.keys() - kept.keys()):
        names = ", ".join(plain(name) for name in dropped[:MOST_NAMED])
        text = "%d numbers of %s are dropped, which %s does not declare, or which are too large: %s"
        log.warning(text, len(dropped), client.name, federation.method.name, names, extra=where(federation))
    return kept


def spent_by(
    database: Database, federation: Federation, client: Client, spent: SpendReport | None
) -> dict[str, Any] | None:
    """The privacy cost of an update as it is stored: its event, and `SpentPrivacy` with it; None of an unprotected one.

    What the client says must match the public terms. Its ledger cannot have spent less than this update alone costs.
    """
    privacy = federation.privacy
    at_client = privacy is not None and privacy.protects_records
    if not at_client and spent is None:
        return None
    if privacy is None or not at_client:
        whose = "is not protected" if privacy is None else "is protected by the coordinator's noise"
        raise problems.PrivacyMismatch(f"{federation.name} {whose}, and the update says what it cost")
    if spent is None:
        text = f"{federation.name} is protected at level {privacy.level}, and the update does not say what it cost"
        raise problems.PrivacyMissing(f"{text}: install a version of promptfed that protects")
    training, given = federation.spec.training, [event.model_dump() for event in spent.events]
    planned = client.protection
    z = privacy.noise_multiplier or (planned.noise_multiplier if planned is not None else given[0]["z"])
    units = client.num_samples if client.units is None else client.units
    try:
        event = training_event(units, training.batch_size, training.epochs, z)
        check_delta(spent.delta, units)
    except PrivacyError as error:
        raise problems.PrivacyMismatch(str(error)) from None
    if given != [event.as_json()]:
        units_name = "samples" if privacy.unit == "record" else "groups"
        text = f"the update was trained with {given}; {units} {units_name} give {event.as_json()}"
        raise problems.PrivacyMismatch(text)
    if privacy.delta is not None and spent.delta > privacy.delta:
        raise problems.PrivacyMismatch(f"δ = {spent.delta:g} is larger than the federation allows ({privacy.delta:g})")
    alone = epsilon_of([event], spent.delta, COARSE)
    if spent.epsilon < alone * (1 - TOLERANCE):
        text = f"the ledger is said to stand at ε = {spent.epsilon:g}, and this update alone costs {alone:.4g}"
        raise problems.PrivacyMismatch(f"{text} at δ = {spent.delta:g}")
    with database.read() as session:
        every = [event, *queries.spent_events(session, federation.id, client.name)]
    about = SpentPrivacy(
        epsilon=epsilon_of(every, spent.delta, COARSE),
        epsilon_replace_one=replace_one_epsilon(every, spent.delta, COARSE),
        delta=spent.delta,
        noise_multiplier=z,
        noise=spent.noise,
        ledger_epsilon=spent.epsilon,
        ledger_epsilon_replace_one=spent.epsilon_replace_one,
    )
    return {"event": event.as_json(), **about.model_dump()}


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
    expected = federation.method.expected_update(phase, client.info(), federation.context())
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


@dataclass(frozen=True)
class AskedTask(OpenTask):
    """A client's task, open or over. ``accepted``: the digest of its accepted answer."""

    status: str = "open"
    payload_stored: bool = True
    accepted: str | None = None


def asked_task(session: Session | Database, federation: Federation, client: Client, task_id: str) -> AskedTask:
    """The client's task. Raises NotFound if this client has no such task."""
    task = federation.tasks.get(client.name)
    if task is not None and task.id == task_id:
        return AskedTask(**vars(task))
    if isinstance(session, Database):
        with session.read() as reading:
            return asked_task(reading, federation, client, task_id)
    query = queries.tasks_with_phases(federation.id).where(TaskRow.id == task_id, TaskRow.client == client.name)
    row_and_phase = session.execute(query).one_or_none()
    if row_and_phase is None:
        raise problems.NotFound(f"this client has no task {task_id[:100]!r}")
    row, phase = row_and_phase
    accepted = select(func.coalesce(UpdateRow.sent, UpdateRow.sha256)).where(UpdateRow.task_id == row.id)
    if federation.spec.secure_aggregation is not None and phase.kind != "evaluate":
        accepted = select(ExchangeRow.digest).where(ExchangeRow.task_id == row.id)
    if phase.kind == "evaluate":
        accepted = select(EvaluationRow.digest).where(EvaluationRow.task_id == row.id)
    return AskedTask(
        **vars(open_task(row, phase)),
        status=row.status,
        payload_stored=row.payload_stored,
        accepted=session.scalar(accepted),
    )


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
    whole, told = examined
    with registry.blobs.hold() as held:
        if whole.content is None:
            # Before its row is written. The files of a group are synced in parallel.
            await run_sync(whole.keep, held)
        else:
            whole.keep(held)
        sent = (upload.sha256, upload.size, whole.sha256)
        entry = _Update(federation.id, client, task_id, *sent, held, told)
        new = await registry.committer.submit(entry)
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


@dataclass(frozen=True)
class Answer(ABC):
    """An examined answer to a client's task. The committer enters it; subclasses say what is stored.

    ``kind`` as for `decided`; ``entered``: the fault point behind it.
    """

    kind: ClassVar[str | None]
    entered: ClassVar[str]

    federation: str
    client: Client
    task_id: str
    digest: str

    def enter(self, change: Change) -> bool:
        """Store it and step the round machine; returns whether it is new.

        The task is checked again: its phase may have closed, or the same request may have been stored meanwhile.
        """
        task = _task_in(change, self.client, self.task_id)
        if decided(change.federation, task, self.kind, self.digest):
            return False
        self.store(change, {"task_id": task.id, "received_at": clock.now()})
        change.send(self.event(change, task))
        point(self.entered)
        return True

    @abstractmethod
    def store(self, change: Change, row: dict[str, Any]) -> None:
        """Add its row, which begins with ``row``, to the change."""

    def event(self, change: Change, task: AskedTask) -> run_state.Event:
        """The event for the round machine."""
        return run_state.Answered(self.client.name, clock.monotonic())


@dataclass(frozen=True)
class _Update(Answer):
    kind = "train"
    entered = "update-entered"

    size: int
    stored: str
    held: Held
    told: dict[str, Any]

    def store(self, change: Change, row: dict[str, Any]) -> None:
        change.keep(self.held)
        sent = self.digest if self.digest != self.stored else None
        about = {"sha256": self.stored, "sent": sent, "bytes": self.size, "stored": True}
        change.batch.updates.append({**row, **self.told, **about})


async def accept_evaluation(
    registry: Registry, federation: Federation, client: Client, task_id: str, request: EvaluationRequest
) -> bool:
    """Store a client's accuracies; returns whether they are new."""
    digest = digest_of(canonical_json(request.model_dump(mode="json")).encode())
    return await registry.committer.submit(_Evaluation(federation.id, client, task_id, digest, request))


@dataclass(frozen=True)
class _Evaluation(Answer):
    kind = "evaluate"
    entered = "evaluation-entered"

    told: EvaluationRequest

    def store(self, change: Change, row: dict[str, Any]) -> None:
        federation = change.federation
        _check_counts(federation, self.told)
        patterns = client_numbers.of_evaluation(federation.method)
        metrics = kept_numbers(federation, self.client, self.told.metrics, patterns)
        body = self.told.model_dump(mode="json") | {"metrics": metrics}
        change.batch.evaluations.append({**row, "digest": self.digest, "body": body})


def _check_counts(federation: Federation, told: EvaluationRequest) -> None:
    """Refuse a cost of noisy counts that is not one of these accuracies in this federation."""
    if told.privacy is None:
        return
    a, most = federation.spec.privacy.evaluation_epsilon, len(told.splits) + len(told.zero_shot)
    given = told.privacy.events
    if [(event.mechanism, event.q, event.z) for event in given] != [("laplace", 1.0, a)] or given[0].count > most:
        counts = [event.model_dump() for event in given[:2]]
        text = (
            f"the accuracies are said to have cost {counts}; they are at most {most} counts with laplace noise of {a}"
        )
        raise problems.PrivacyMismatch(text)


def _task_in(change: Change, client: Client, task_id: str) -> AskedTask:
    task = change.federation.tasks.get(client.name)
    if task is None or task.id != task_id:
        change.flush()  # Its answer may be in the same group.
    return asked_task(change.session, change.federation, client, task_id)


def accept_failure(
    registry: Registry, federation: Federation, client: Client, task_id: str, request: FailureRequest
) -> None:
    """Record that a client cannot carry out its task. Repeating it changes nothing."""
    with registry.change(federation.id) as change:
        task = _task_in(change, client, task_id)
        if task.status == "failed":
            return
        if task.accepted is not None:
            raise problems.AlreadyAnswered("this task was answered before it was reported as failed: its answer stands")
        _expect_open(change.federation, task)
        change.session.get_one(TaskRow, task.id).failure = request.model_dump()
        if out := sums.blamed(change, task, request):
            sums.leave_out(change, task, out)
        else:
            change.send(run_state.Failed(client.name, clock.monotonic()))
    registry.metrics.failed(request.type)


def decided(federation: Federation, task: AskedTask, kind: str | None, digest: str | None) -> bool:
    """Whether exactly this answer was accepted before. Refuses an answer that cannot be accepted any more.

    ``kind`` None: an answer to a step of a secure sum, whose tasks accept no other answers.
    """
    exchanged = federation.spec.secure_aggregation is not None and task.kind != "evaluate"
    if exchanged != (kind is None) or (kind is not None and task.kind != kind):
        wanted = "an update" if task.kind == "train" else "an evaluation"
        if exchanged:
            wanted = f"the exchange of step {task.kind}: its federation takes no update in the clear"
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
    text = f"the phase of round {task.round} is over ({task.status}); {federation.name} is in {where}"
    raise problems.PhaseClosed(text, round=federation.run.round, phase=federation.phase, state=federation.run.state)


def _examine(
    registry: Registry, federation: Federation, client: Client, task: AskedTask, upload: Upload
) -> dict[str, Any]:
    """Check an update; returns columns of its row."""
    phase, blobs = federation.method_phase(task.round, task.step), registry.blobs
    try:
        tensors, metadata = upload.tensors()
        size = check(tensors, federation.method.expected_update(phase, client.info(), federation.context()))
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


class NotSecure(problems.Refusal, status=409, title="This federation has no secure sums"):
    """An exchange in a federation without secure aggregation, or an unmasked update in a federation with it."""


class BadExchange(problems.Refusal, status=422, title="The answer is not what the step asks for"):
    """An answer in another form than its step of the secure sum requires."""


class BadSignature(problems.Refusal, status=422, title="The signature is not the client's"):
    """A signature that is not that of the client's identity key."""


class WrongRoster(problems.Refusal, status=422, title="The answer is for another roster"):
    """An answer for another roster than this attempt's."""


class LooksUnmasked(problems.Refusal, status=422, title="The vector is not masked"):
    """An unmasked vector. Nothing of it was stored."""


class BadShares(problems.Refusal, status=422, title="A share is not the one that was dealt"):
    """A false share in step ``unmask``. Its client counts as failed; the other clients open the sum."""


class BadKeys(problems.Refusal, status=422, title="No member could use these keys"):
    """Keys with which every other member would refuse the sum. Their client counts as failed; the others go on."""


class TooHeavy(problems.Refusal, status=422, title="The client outweighs all others"):
    """So many samples that no member would take part in a sum with it. It counts as failed; the others go on."""


REFUSALS = {
    kind.kind: kind for kind in (BadExchange, BadSignature, WrongRoster, LooksUnmasked, BadShares, BadKeys, TooHeavy)
}
FAILED = (BadShares.kind, BadKeys.kind, TooHeavy.kind)  # whoever answers so is not waited for


def limit(federation: Federation) -> int:
    """The maximum size of an answer in bytes. A masked vector has twice the size of an update."""
    return max(MOST_BYTES, 2 * federation.spec.admission.max_bytes)


def config_of(federation: Federation) -> TaskConfig:
    """The part of a task that is the same for all clients."""
    # Most methods do not need it, and a thousand descriptions would make every task long.
    peers = federation.peers() if federation.method.needs.domain_descriptions else []
    return TaskConfig(**dict(federation.training_terms()), peers=peers)


async def accept(registry: Registry, federation: Federation, client: Client, task_id: str, upload: Upload) -> bool:
    """Admit an answer; returns whether it is new."""
    admitted = await run_sync(_admit_step, registry, federation, client, task_id, upload)
    if admitted is None:
        return False
    entry = _Exchange(federation.id, client, task_id, upload.sha256, registry, *admitted)
    new = await registry.committer.submit(entry)
    point("exchange-committed")
    if new:
        registry.metrics.bytes_up.inc(upload.size)
    return new


def _admit_step(
    registry: Registry, federation: Federation, client: Client, task_id: str, upload: Upload
) -> tuple[bytes, dict[str, Any] | None] | None:
    """The checked body and what it cost; None if this answer was accepted before."""
    task = asked_task(registry.database, federation, client, task_id)
    if federation.spec.secure_aggregation is None:
        raise NotSecure(f"{federation.name} has no secure aggregation: its tasks want updates and evaluations")
    if decided(federation, task, None, None if upload.too_large else upload.sha256):
        return None
    if upload.too_large:
        raise problems.BodyTooLarge(f"an answer may have {limit(federation)} bytes; this one has more")
    body = upload.read()
    try:
        spent = _examine_step(registry, federation, client, task, body)
    except ValidationError as error:
        raise BadExchange(f"step {task.kind}: {problems.first_error(error)}") from None
    except SecureError as error:
        if error.kind in FAILED:
            told = FailureRequest(type=error.kind, detail=f"refused in step {task.kind}: {error}")
            accept_failure(registry, federation, client, task_id, told)
        raise REFUSALS.get(error.kind, BadExchange)(f"step {task.kind}: {error}") from None
    return body, spent


def _examine_step(
    registry: Registry, federation: Federation, client: Client, task: AskedTask, body: bytes
) -> dict[str, Any] | None:
    """Check an answer; returns the privacy cost that a masked vector reports, None for other steps."""
    if task.kind == "train":
        _examine_keys(registry, federation, client, task, KeysAnswer.model_validate_json(body))
        return None
    attempt = attempt_of(registry, federation, task.round, task.step)
    roster, place = attempt.roster, attempt.place(client.name)
    if task.kind == "share":
        opening.check_shares(roster, place, SharesAnswer.model_validate_json(body))
    elif task.kind == "mask":
        spent = _examine_vector(federation, task, body, roster.sha256.hex())
        return spent_by(registry.database, federation, client, spent)
    elif task.kind == "confirm":
        opening.check_confirmation(roster, place, attempt.confirm.alive, ConfirmAnswer.model_validate_json(body))
    else:
        opening.check_reveal(roster, place, attempt.confirm, UnmaskAnswer.model_validate_json(body), attempt.shares)
    return None


def _examine_keys(
    registry: Registry, federation: Federation, client: Client, task: AskedTask, answer: KeysAnswer
) -> None:
    plan = federation.rules.plan(task.round, task.step)
    assert plan is not None, "only the steps of a phase are secure"
    assert plan.secure is not None, "only the steps of a phase are secure"
    wanted = {
        "federation_id": federation.id,
        "round": task.round,
        "phase": plan.secure.phase,
        "attempt": plan.secure.attempt,
        "identity_key": client.identity_key,
        "samples": 1 if federation.spec.aggregation.weighting == "uniform" else client.num_samples,
        "payload_sha256": task.payload_sha256,
        "terms": config_of(federation).terms(),
    }
    given = answer.entry.model_dump()
    other = [name for name, value in wanted.items() if given[name] != value]
    if other:
        raise BadExchange(f"the entry has another {', '.join(other)} than the task: take the task's own")
    if not is_entry_signed(answer):
        raise BadSignature("the entry is not signed with the identity key that this client enrolled")
    try:
        keys = expect_keys(answer.entry)
    except SecureError as error:
        raise SecureError(BadKeys.kind, str(error)) from None
    known = sums.keys_of(registry, federation, task.round, task.step)
    if any(known.setdefault(key, client.name) != client.name for key in keys):
        raise SecureError(BadKeys.kind, "another member has one of these keys: make new ones")
    _expect_light(federation, client)


def _expect_light(federation: Federation, client: Client) -> None:
    """Refuse a client with whom all others would refuse the sum of those who are asked.

    Raises:
        SecureError: too-heavy.
    """
    stage = federation.run.stage
    asked = stage.having("open", "answered") if stage is not None else []
    samples = {name: federation.clients[name].num_samples for name in asked}
    rule = Weighting.of(federation.spec.aggregation)
    if client.name in samples and client.name in too_heavy(samples, rule):
        text = f"with its {client.num_samples} samples a sum of {len(samples)} clients would count as of fewer than"
        text += f" {LEAST_EFFECTIVE:g} of equal weight: take aggregation.weighting uniform, or a max_weight_share"
        raise SecureError(TooHeavy.kind, text)


def _examine_vector(federation: Federation, task: AskedTask, body: bytes, roster: str) -> SpendReport | None:
    """Check a masked vector; returns its report of the privacy cost."""
    try:
        tensors, about = decode(body)
    except TensorError as error:
        raise BadExchange(str(error)) from None
    size = secure_sums.size_of(secure_sums.shapes(federation, federation.method_phase(task.round, task.step)))
    vector = tensors.get(secure_sums.MASKED)
    if len(tensors) != 1 or vector is None or vector.dtype != np.int64 or tuple(vector.shape) != (size,):
        raise BadExchange(f"one tensor {secure_sums.MASKED!r} of {size} int64 numbers is expected")
    told: dict[str, Any] = dict(about) if isinstance(about, dict) else {}
    privacy = told.pop("privacy", None)
    if told != {"roster_sha256": roster}:
        raise WrongRoster("the metadata is not just the roster's SHA-256 under roster_sha256")
    if looks_unmasked(secure_sums.vector_of(body)):
        raise LooksUnmasked("most of its numbers are small: it was sent without masks, and was not stored")
    return None if privacy is None else SpendReport.model_validate(privacy)


@dataclass(frozen=True)
class _Exchange(Answer):
    kind = None
    entered = "exchange-before-commit"

    registry: Registry
    body: bytes
    spent: dict[str, Any] | None

    def store(self, change: Change, row: dict[str, Any]) -> None:
        answer = {"digest": self.digest, "body": self.body, "bytes": len(self.body), "spent": self.spent}
        change.batch.exchanges.append({**row, **answer})

    def event(self, change: Change, task: AskedTask) -> run_state.Event:
        """Of step ``unmask``, the answer that makes the sum known ends the step."""
        stage = change.federation.run.stage
        if task.kind == "unmask" and stage is not None:
            attempt = attempt_of(self.registry, change.federation, task.round, task.step)
            if attempt.can_open([*stage.having("answered"), self.client.name]):
                return run_state.AnsweredLast(self.client.name, clock.monotonic())
        return super().event(change, task)
