"""Tensor work of means with central noise and of secure sums, from what is stored; a replay computes the same again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation import global_state, secure_sums
from promptfed.coordinator.aggregation.secure_sums import Attempt, NoiseTerms, PrivateMean, private_mean
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Federation, OpenTask
from promptfed.coordinator.domain.round_machine import SHARE, WrongMoment, step_answers_needed
from promptfed.coordinator.domain.run_state import SecureStep
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.blobs import digest_of
from promptfed.coordinator.store.tables import ExchangeRow, PhaseRow, StateRow, SumRow, TaskRow
from promptfed.shared.messages import FailureRequest
from promptfed.shared.methods.core.costs import change_limit, costs
from promptfed.shared.methods.core.interface import ClientUpdate, Phase, ServerContext
from promptfed.shared.plain_text import counted
from promptfed.shared.secagg import SecureError, opening
from promptfed.shared.secagg.messages import KeysAnswer, expect_keys
from promptfed.shared.secagg.vectors import Whole, as_tensors, mean_change
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.weighting import Weighting
from promptfed.shared.tensors import Arrays

BAD_SHARES = "bad-shares"
DEALER = re.compile("ed25519:([0-9a-f]{64})")


def terms_of(federation: Federation, row: PhaseRow) -> NoiseTerms:
    """What the closed phase of ``row`` is noised with: its key and K̄."""
    privacy = federation.spec.privacy
    assert row.noise_key is not None, "a phase at client level closes with its key"
    assert row.expected is not None, "a phase opens with how many are expected"
    assert privacy.clip is not None
    assert privacy.noise_multiplier is not None
    return NoiseTerms(privacy.clip, privacy.noise_multiplier, row.expected, bytes.fromhex(row.noise_key))


def released(session: Session, federation: Federation) -> int:
    """How many noised sums there have been so far."""
    mine = (StateRow.federation_id == federation.id, StateRow.phase_id.is_not(None))
    return session.scalars(select(func.count()).where(*mine)).one()


def noise_told(federation: Federation, terms: NoiseTerms, phases: int, noise: str) -> dict[str, Any]:
    """What a phase was noised with, and what all ``phases`` so far have cost."""
    return {
        **costs(federation.spec, phases),
        "delta": federation.spec.privacy.delta,
        "clip": terms.clip,
        "noise_multiplier": terms.noise_multiplier,
        "expected": terms.expected,
        "noise": "seeded" if noise == "seeded" else "central",
    }


def noised(
    federation: Federation,
    state: Arrays,
    phase: Phase,
    updates: Iterable[ClientUpdate],
    terms: NoiseTerms,
    context: ServerContext,
) -> tuple[Arrays, PrivateMean]:
    """The state after ``phase`` of these updates, and their mean, which is clipped and noised by ``terms``."""
    payload = global_state.common_payload(federation, state, phase, context)
    mean = private_mean(updates, payload, secure_sums.shapes(federation, phase), terms)
    return global_state.after_mean(federation, state, phase, mean.tensors, context), mean


def attempt_of(registry: Registry, federation: Federation, round: int, step: int) -> Attempt:
    """The attempt that ``step`` belongs to; what was read of the latest one is kept in memory."""
    secure = _secure(federation, round, step)
    key = (round, secure.first)
    latest = registry.attempts.get(federation.id)
    if latest is None or latest[0] != key:
        latest = key, Attempt(registry.database, federation, round, secure)
        registry.attempts[federation.id] = latest
    return latest[1]


def keys_of(registry: Registry, federation: Federation, round: int, step: int) -> dict[str, str]:
    """Who has sent which key (hex) for the attempt that begins with ``step``; callers add theirs."""
    latest = registry.keys.get(federation.id)
    if latest is None or latest[0] != (round, step):
        with registry.database.read() as session:
            sent = secure_sums.answers(session, federation.id, round, step, all_sent=True)
        entries = {name: KeysAnswer.model_validate_json(body).entry for name, body in sent.items()}
        keys = {key: name for name, entry in entries.items() for key in expect_keys(entry)}
        latest = registry.keys[federation.id] = (round, step), keys
    return latest[1]


def _secure(federation: Federation, round: int, step: int) -> SecureStep:
    plan = federation.rules.plan(round, step)
    assert plan is not None, "only the steps of a phase are secure"
    assert plan.secure is not None, "only the steps of a secure sum are asked for"
    return plan.secure


def told(registry: Registry, federation: Federation, task: OpenTask) -> bytes:
    """What a task after the training tells its client."""
    return attempt_of(registry, federation, task.round, task.step).told(task.client, task.kind)


def unfit(registry: Registry, federation: Federation, task: OpenTask) -> dict[str, SecureError]:
    """Those who sent keys and whom members' policies rule out of the sum, before its roster is told to anybody."""
    assert federation.spec.secure_aggregation is not None
    with registry.database.read() as session:
        first = _secure(federation, task.round, task.step).first
        sent = secure_sums.answers(session, federation.id, task.round, first)
    answers = {name: KeysAnswer.model_validate_json(body) for name, body in sent.items()}
    return opening.unfit(answers, federation.spec.secure_aggregation, Weighting.of(federation.spec.aggregation))


def blamed(change: Change, task: OpenTask, failure: FailureRequest) -> dict[str, SecureError]:
    """The dealers of false shares for whom so many have failed that the sum could fail, with this ``failure``.

    Those are over half of the members that it can miss, and nobody can name more dealers than that half. Only two know
    who of them lies, so one's word is too little. Who has failed for such a dealer has not failed.
    """
    run, federation = change.federation.run, change.federation
    plan, spec = federation.rules.plan(task.round, task.step), federation.spec.secure_aggregation
    if task.kind != "mask" or failure.type != BAD_SHARES:
        return {}
    assert run.stage is not None
    assert plan is not None
    assert plan.secure is not None
    assert spec is not None
    half = max(1, (len(run.stage.asks) - step_answers_needed(spec, plan.secure, len(run.cohort))) // 2)
    change.flush()
    here = (PhaseRow.round == task.round, PhaseRow.step == task.step, TaskRow.failure.is_not(None))
    names = {federation.clients[name].identity_key: name for name in run.cohort}
    said: dict[str, dict[str, TaskRow]] = {name: {} for name in run.cohort}
    for row in change.session.scalars(queries.tasks_with_phases(federation.id).where(*here)):
        report = row.failure or {}
        for key in DEALER.findall(report["detail"])[:half] if report["type"] == BAD_SHARES else ():
            if names.get(key) not in (None, row.client):
                said[names[key]][row.client] = row
    heard = {name for name, rows in said.items() if len(rows) < 2}  # dealers of false shares may name each other
    heeded = {name: {client: row for client, row in rows.items() if client in heard} for name, rows in said.items()}
    out = {name: rows for name, rows in heeded.items() if len(rows) > half}
    for name in out:
        for row in said[name].values():
            row.failure = None
    text = "could not use the shares that it dealt"
    return {
        name: SecureError(BAD_SHARES, f"{counted(len(rows), 'other member')} {text}: {', '.join(sorted(rows)[:10])}")
        for name, rows in out.items()
    }


def leave_out(change: Change, task: OpenTask, reasons: Mapping[str, SecureError]) -> None:
    """Make the sum that ``task`` belongs to without these, who have failed in its step ``share``."""
    run, secure = change.federation.run, _secure(change.federation, task.round, task.step)
    if (run.round, run.step) != (task.round, task.step):
        raise WrongMoment(run.state)
    here = (PhaseRow.round == task.round, PhaseRow.step.in_((secure.first, secure.first + SHARE)))
    rows = queries.tasks_with_phases(change.federation.id).where(*here, TaskRow.client.in_(reasons))
    for row, phase in change.session.execute(rows):
        if phase.kind == "share":
            row.failure = {"type": reasons[row.client].kind, "detail": str(reasons[row.client])[:2000]}
        else:
            row.counted = False  # a roster is made of those who count
    change.send(run_state.LeftOut(tuple(sorted(reasons)), clock.monotonic()))


def summed(registry: Registry, federation: Federation, state: Arrays, phase: PhaseRow) -> tuple[Arrays, SumRow, float]:
    """Open the sum of a closed attempt, whose last step is ``phase``: the state, the sum, and the mean change's norm.

    Raises:
        SecureError: ``bad-shares`` or ``sum-invalid``: it cannot be a sum of honest clients.
    """
    attempt = attempt_of(registry, federation, phase.round, phase.step)
    total, of_method = attempt.total(), federation.method_phase(phase.round, phase.step)
    after, norm = state_after(federation, state, of_method, total, attempt.weight, federation.context())
    point("sum-computed")
    body, count = total.astype("<i8").tobytes(), len(attempt.confirm.alive)
    row = SumRow(phase_id=phase.id, sha256=digest_of(body), body=body, count=count, weight=attempt.weight)
    return after, row, norm


def state_after(
    federation: Federation, state: Arrays, phase: Phase, total: Whole, weight: float, context: ServerContext
) -> tuple[Arrays, float]:
    """The state after ``phase``, whose payload changes by total/(2³²·``weight``); and the L2 norm of that change."""
    mean = mean_change(total, weight)
    norm = float(np.linalg.norm(mean))
    limit = change_limit(federation.spec, federation.method, mean.size)
    if norm > limit:
        text = f"the mean change's norm is {norm:.6g}; {limit:.6g} is allowed (admission.max_update_norm)"
        raise SecureError("sum-invalid", text)
    payload = global_state.common_payload(federation, state, phase, context)
    tensors = as_tensors(mean, payload, secure_sums.shapes(federation, phase))
    return global_state.after_mean(federation, state, phase, tensors, context), norm


def forget_answers(session: Session, federation: Federation, round: int) -> None:
    """Delete the bodies of a round's exchanges: the sum is there, and nothing else is of use. Digests stay."""
    stages = select(PhaseRow.id).where(PhaseRow.federation_id == federation.id, PhaseRow.round == round)
    tasks = select(TaskRow.id).where(TaskRow.phase_id.in_(stages))
    blindly = {"synchronize_session": False}
    session.execute(
        update(ExchangeRow).where(ExchangeRow.task_id.in_(tasks)).values(body=None), execution_options=blindly
    )
