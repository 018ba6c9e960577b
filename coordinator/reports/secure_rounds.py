"""A secure sum in a round's report: who answered each step, and figures of the sum. There are none by client."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.domain.secure_steps import MASK, TRAIN
from promptfed.coordinator.reports.privacy import spent_privacy
from promptfed.coordinator.store.tables import ExchangeRow, PhaseRow, SumRow, TaskRow
from promptfed.shared.api import report_schemas


def attempts(federation: Federation, stages: Sequence[PhaseRow]) -> list[list[PhaseRow]]:
    """The stages of each attempt, in order of step."""
    by_attempt: list[list[PhaseRow]] = []
    for stage in stages:
        plan = federation.rules.plan(stage.round, stage.step)
        if plan is not None and plan.secure is not None:
            if plan.secure.index == TRAIN:
                by_attempt.append([])
            by_attempt[-1].append(stage)
    return by_attempt


def secure_report(session: Session, federation: Federation, stages: Sequence[PhaseRow]) -> report_schemas.SecureReport:
    """The report of one attempt; ``stages``: its steps that have begun."""
    plan = federation.rules.plan(stages[0].round, stages[0].step)
    assert plan is not None, "it is an attempt's first step"
    assert plan.secure is not None, "it is an attempt's first step"
    steps = [_step(session, stage) for stage in stages]
    total = session.scalars(select(SumRow).where(SumRow.phase_id.in_([stage.id for stage in stages]))).one_or_none()
    measured = (stages[-1].measured or {}).get("phase", {})
    return report_schemas.SecureReport(
        attempt=plan.secure.attempt,
        steps=steps,
        sum_clients=total.count if total is not None else None,
        sum_weight=total.weight if total is not None else None,
        mean_norm=measured.get("mean_norm"),
        privacy=_privacy(session, stages),
    )


def _privacy(session: Session, stages: Sequence[PhaseRow]) -> dict[str, report_schemas.SpentPrivacy] | None:
    """The privacy cost of each client that sent a masked vector; None if nothing is protected."""
    vectors = _masked_vectors(session, stages)
    spent = {task.client: spent_privacy(exchange.metrics or {}) for task, exchange in vectors}
    return {client: cost for client, cost in spent.items() if cost is not None} or None


def _masked_vectors(session: Session, stages: Sequence[PhaseRow]) -> list[tuple[TaskRow, ExchangeRow]]:
    """Tasks of an attempt's step ``mask`` with their answers (bodies deferred), in order of client name."""
    masks = [stage.id for stage in stages[MASK : MASK + 1]]
    query = select(TaskRow, ExchangeRow).join(ExchangeRow, ExchangeRow.task_id == TaskRow.id)
    answered = query.where(TaskRow.phase_id.in_(masks)).order_by(TaskRow.client)
    return [(task, exchange) for task, exchange in session.execute(answered.options(defer(ExchangeRow.body)))]


def _step(session: Session, stage: PhaseRow) -> report_schemas.SecureStepReport:
    rows = session.execute(select(TaskRow.client, TaskRow.status).where(TaskRow.phase_id == stage.id)).all()
    return report_schemas.SecureStepReport(
        kind="train" if stage.kind == "train" else stage.kind,  # type: ignore[arg-type]
        asked=len({row.client for row in rows}),
        answered=sum(row.status == "answered" for row in rows),
        seconds=clock.seconds_between(stage.opened_at, stage.completed_at),
    )


def troubles(
    session: Session, report: report_schemas.PhaseReport, stages: Sequence[PhaseRow]
) -> dict[str, list[report_schemas.FailureReport] | list[str]]:
    """Clients that failed or did not answer, in the training (``report``) or in a later step."""
    later = [stage.id for stage in stages[1:]]
    rows = session.execute(select(TaskRow.client, TaskRow.status, TaskRow.failure).where(TaskRow.phase_id.in_(later)))
    failed, silent = list(report.failed), set(report.expired)
    for row in rows.all():
        if row.failure is not None:
            why = row.failure
            failed.append(report_schemas.FailureReport(client=row.client, type=why["type"], detail=why["detail"]))
        elif row.status == "expired":
            silent.add(row.client)
    return {"failed": failed, "expired": sorted(silent)}


def counted(session: Session, stages: Sequence[PhaseRow]) -> list[report_schemas.CountedUpdate]:
    """The clients whose masked vectors are in the sum, with the digests of the vectors."""
    return [
        report_schemas.CountedUpdate(client=task.client, sha256=exchange.digest, weight=task.weight or 0.0)
        for task, exchange in _masked_vectors(session, stages)
        if task.counted
    ]


def bytes_up(session: Session, stages: Sequence[PhaseRow]) -> int:
    """Bytes of all answers to an attempt's steps."""
    tasks = select(TaskRow.id).where(TaskRow.phase_id.in_([stage.id for stage in stages]))
    return sum(session.scalars(select(ExchangeRow.bytes).where(ExchangeRow.task_id.in_(tasks))))
