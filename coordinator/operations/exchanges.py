"""Admission of answers to the steps of a secure sum. Each is stored in the transaction that settles its task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from anyio.to_thread import run_sync
from pydantic import ValidationError

from promptfed.coordinator import problems
from promptfed.coordinator.aggregation import secure_sums
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.engine.sums import attempt_of
from promptfed.coordinator.operations.submissions import (
    Answer,
    AskedTask,
    accept_failure,
    asked_task,
    decided,
    spent_metrics,
)
from promptfed.coordinator.store.blobs import Upload
from promptfed.coordinator.store.fault_points import point
from promptfed.shared.messages import FailureRequest, SpendReport, TaskConfig
from promptfed.shared.secagg import SecureError, opening
from promptfed.shared.secagg.messages import ConfirmAnswer, KeysAnswer, SharesAnswer, UnmaskAnswer, is_entry_signed
from promptfed.shared.secagg.primitives import looks_unmasked
from promptfed.shared.tensors import TensorError, decode

MOST_BYTES = 4 << 20  # of an answer without a vector


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


REFUSALS = {kind.kind: kind for kind in (BadExchange, BadSignature, WrongRoster, LooksUnmasked, BadShares)}


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
    admitted = await run_sync(_admit, registry, federation, client, task_id, upload)
    if admitted is None:
        return False
    entry = _Exchange(federation.id, client, task_id, upload.sha256, registry, *admitted)
    new = await registry.committer.submit(entry)
    point("exchange-committed")
    if new:
        registry.metrics.bytes_up.inc(upload.size)
    return new


def _admit(
    registry: Registry, federation: Federation, client: Client, task_id: str, upload: Upload
) -> tuple[bytes, dict[str, float] | None] | None:
    """The checked body and its metrics; None if this answer was accepted before."""
    task = asked_task(registry.database, federation, client, task_id)
    if federation.spec.secure_aggregation is None:
        raise NotSecure(f"{federation.name} has no secure aggregation: its tasks want updates and evaluations")
    if decided(federation, task, None, None if upload.too_large else upload.sha256):
        return None
    if upload.too_large:
        raise problems.BodyTooLarge(f"an answer may have {limit(federation)} bytes; this one has more")
    body = upload.read()
    try:
        metrics = _examine(registry, federation, client, task, body)
    except ValidationError as error:
        raise BadExchange(f"step {task.kind}: {problems.first_error(error)}") from None
    except SecureError as error:
        if error.kind == BadShares.kind:
            told = FailureRequest(type=error.kind, detail=f"refused in step {task.kind}: {error}")
            accept_failure(registry, federation, client, task_id, told)
        raise REFUSALS.get(error.kind, BadExchange)(f"step {task.kind}: {error}") from None
    return body, metrics


def _examine(
    registry: Registry, federation: Federation, client: Client, task: AskedTask, body: bytes
) -> dict[str, float] | None:
    """Check an answer; returns the privacy cost that a masked vector reports, None for other steps."""
    if task.kind == "train":
        _examine_keys(federation, client, task, KeysAnswer.model_validate_json(body))
        return None
    attempt = attempt_of(registry, federation, task.round, task.step)
    roster, place = attempt.roster, attempt.place(client.name)
    if task.kind == "share":
        opening.check_shares(roster, place, SharesAnswer.model_validate_json(body))
    elif task.kind == "mask":
        spent = _examine_vector(federation, task, body, roster.sha256.hex())
        return spent_metrics(federation, client, spent) or None
    elif task.kind == "confirm":
        opening.check_confirmation(roster, place, attempt.confirm.alive, ConfirmAnswer.model_validate_json(body))
    else:
        opening.check_reveal(roster, place, attempt.confirm, UnmaskAnswer.model_validate_json(body), attempt.shares)
    return None


def _examine_keys(federation: Federation, client: Client, task: AskedTask, answer: KeysAnswer) -> None:
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
    metrics: dict[str, float] | None

    def store(self, change: Change, row: dict[str, Any]) -> None:
        answer = {"digest": self.digest, "body": self.body, "bytes": len(self.body), "metrics": self.metrics}
        change.batch.exchanges.append({**row, **answer})

    def event(self, change: Change, task: AskedTask) -> run_state.Event:
        """Of step ``unmask``, the answer that makes the sum known ends the step."""
        stage = change.federation.run.stage
        if task.kind == "unmask" and stage is not None:
            attempt = attempt_of(self.registry, change.federation, task.round, task.step)
            if attempt.can_open([*stage.having("answered"), self.client.name]):
                return run_state.AnsweredLast(self.client.name, clock.monotonic())
        return super().event(change, task)
