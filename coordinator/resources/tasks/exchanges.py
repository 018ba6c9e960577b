"""Answers to the steps of secure sums: checked, and stored in the transaction that settles their task."""

from __future__ import annotations

from typing import Any

import numpy as np
from anyio.to_thread import run_sync
from pydantic import ValidationError

from promptfed.coordinator import problems
from promptfed.coordinator.aggregation import secure_sums
from promptfed.coordinator.aggregation.secure_sums import Attempt
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine import sums
from promptfed.coordinator.engine.answers import Answer, AskedTask, asked_task, decided
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.engine.sums import attempt_of
from promptfed.coordinator.resources.tasks.privacy_costs import spent_by
from promptfed.coordinator.resources.tasks.reports import accept_failure
from promptfed.coordinator.resources.tasks.served import config_of
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.messages import FailureRequest, SpendReport
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
from promptfed.shared.spec.weighting import Weighting
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


async def accept_exchange(
    registry: Registry, federation: Federation, client: Client, task_id: str, upload: Upload
) -> bool:
    """Admit an answer; returns whether it is new."""
    admitted = await run_sync(_admit_step, registry, federation, client, task_id, upload)
    if admitted is None:
        return False
    row, attempt = admitted
    answer = Answer(federation.id, client, task_id, upload.sha256, None, row, attempt=attempt)
    new = await registry.committer.submit(answer)
    point("exchange-committed")
    if new:
        registry.metrics.bytes_up.inc(upload.size)
    return new


def _admit_step(
    registry: Registry, federation: Federation, client: Client, task_id: str, upload: Upload
) -> tuple[dict[str, Any], Attempt | None] | None:
    """The row of a checked answer, and its attempt once that has a roster; None if it was accepted before."""
    task = asked_task(registry.database, federation, client, task_id)
    if federation.spec.secure_aggregation is None:
        raise NotSecure(f"{federation.name} has no secure aggregation: its tasks want updates and evaluations")
    if decided(federation, task, None, None if upload.too_large else upload.sha256):
        return None
    if upload.too_large:
        raise problems.BodyTooLarge(f"an answer may have {limit(federation)} bytes; this one has more")
    body = upload.read()
    try:
        attempt = attempt_of(registry, federation, task.round, task.step) if task.kind != "train" else None
        spent = _examine_step(registry, federation, client, task, body, attempt)
    except ValidationError as error:
        raise BadExchange(f"step {task.kind}: {problems.first_error(error)}") from None
    except SecureError as error:
        if error.kind in FAILED:
            failure = FailureRequest(type=error.kind, detail=f"refused in step {task.kind}: {error}")
            accept_failure(registry, federation, client, task_id, failure)
        raise REFUSALS.get(error.kind, BadExchange)(f"step {task.kind}: {error}") from None
    return {"digest": upload.sha256, "body": body, "bytes": len(body), "spent": spent}, attempt


def _examine_step(
    registry: Registry, federation: Federation, client: Client, task: AskedTask, body: bytes, attempt: Attempt | None
) -> dict[str, Any] | None:
    """Check an answer; returns the privacy cost that a masked vector reports, None for other steps."""
    if attempt is None:
        _examine_keys(registry, federation, client, task, KeysAnswer.model_validate_json(body))
        return None
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
    expected = {
        "federation_id": federation.id,
        "round": task.round,
        "phase": plan.secure.phase,
        "attempt": plan.secure.attempt,
        "identity_key": client.identity_key,
        "samples": 1 if federation.spec.aggregation.weighting == "uniform" else client.num_samples,
        "payload_sha256": task.payload_sha256,
        "terms": config_of(federation).terms(),
    }
    entry = answer.entry.model_dump()
    other = [name for name, value in expected.items() if entry[name] != value]
    if other:
        raise BadExchange(f"the entry has another {', '.join(other)} than the task: take the task's own")
    if not is_entry_signed(answer):
        raise BadSignature("the entry is not signed with the identity key that this client enrolled")
    try:
        keys = expect_keys(answer.entry)
    except SecureError as error:
        raise SecureError(BadKeys.kind, str(error)) from None
    owners = sums.keys_of(registry, federation, task.round, task.step)
    if any(owners.setdefault(key, client.name) != client.name for key in keys):
        raise SecureError(BadKeys.kind, "another member has one of these keys: make new ones")
    _expect_light(federation, client)


def _expect_light(federation: Federation, client: Client) -> None:
    """Refuse a client with whom all others would refuse the sum of those who are asked.

    Raises:
        SecureError: too-heavy.
    """
    stage = federation.run.stage
    members = stage.having("open", "answered") if stage is not None else []
    samples = {name: federation.clients[name].num_samples for name in members}
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
    metadata: dict[str, Any] = dict(about) if isinstance(about, dict) else {}
    privacy = metadata.pop("privacy", None)
    if metadata != {"roster_sha256": roster}:
        raise WrongRoster("the metadata is not just the roster's SHA-256 under roster_sha256")
    if looks_unmasked(secure_sums.vector_of(body)):
        raise LooksUnmasked("most of its numbers are small: it was sent without masks, and was not stored")
    return None if privacy is None else SpendReport.model_validate(privacy)
