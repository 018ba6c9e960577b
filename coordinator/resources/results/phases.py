"""Reports of phases and secure sums, from the database alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation.rows import far_off
from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.domain.round_machine import MASK, TRAIN
from promptfed.coordinator.engine.readable import Reading, leniently, rows_of
from promptfed.coordinator.resources.federations.views import spent_privacy
from promptfed.coordinator.store.tables import Base, ExchangeRow, StateRow, SumRow, TaskRow, UpdateRow
from promptfed.shared.api import report_schemas
from promptfed.shared.messages import ENDED

AT_ONCE = 200  # rows that are fetched together, which takes a millisecond or two in which no other thread runs


def attempts(federation: Federation, stages: Sequence[Any]) -> list[list[Any]]:
    """The stages of each attempt, in order of step."""
    by_attempt: list[list[Any]] = []
    for stage in stages:
        plan = federation.rules.plan(stage.round, stage.step)
        if plan is not None and plan.secure is not None:
            if plan.secure.index == TRAIN:
                by_attempt.append([])
            by_attempt[-1].append(stage)
    return by_attempt


def stage_report(stage: Any, tasks: list[Any], reading: Reading) -> dict[str, Any]:
    def those(*statuses: str) -> list[str]:
        return sorted({task.client for task in tasks if task.status in statuses})

    payloads = {task.payload_sha256 for task in tasks} - {None}
    return {
        "opened_at": stage.opened_at,
        "deadline": stage.deadline,
        "closed_at": stage.closed_at,
        "completed_at": stage.completed_at,
        "seconds": clock.seconds_between(stage.opened_at, stage.completed_at),
        "payload_sha256": payloads.pop() if len(payloads) == 1 else None,
        "asked": sorted({task.client for task in tasks}),
        "answered": those("answered", "discarded"),
        "failed": _failures(tasks, reading),
        "expired": those("expired"),
        "withdrawn": those("withdrawn", "discarded"),
        "bytes_down": sum(task.bytes_down for task in tasks),
    }


def _failures(tasks: list[Any], reading: Reading) -> list[report_schemas.FailureReport]:
    def failure(task: Any) -> report_schemas.FailureReport:
        return report_schemas.FailureReport.model_validate({**task.failure, "client": task.client})

    failed = [task for task in tasks if task.failure is not None]
    found = [reading.row(f"the failure of {task.client}", partial(failure, task)) for task in failed]
    return [report for report in found if report is not None]


def rows_by_client(session: Session, table: type[Base], *where: Any) -> list[Any]:
    """All columns of the rows, in order of client name. This takes a tenth of the time of mapped objects.

    Rows are fetched in batches, since other threads cannot run while the driver converts one.
    """
    query = rows_of(table)
    if table is not TaskRow:
        query = query.join(TaskRow, TaskRow.id == table.__table__.c.task_id)
    rows: list[Any] = []
    for some in session.execute(query.where(*where).order_by(TaskRow.client)).partitions(AT_ONCE):
        rows.extend(some)
    return rows


class _Measured(report_schemas.MeasuredView):
    """What was measured when a phase closed, as it is stored: ``changes`` are norms, by client."""

    changes: dict[str, float] = Field(default_factory=dict)
    privacy: report_schemas.CentralPrivacy | None = None


def _measured(stage: Any) -> _Measured:
    return _Measured() if stage.measured is None else _Measured.model_validate(stage.measured)


def phase_report(session: Session, federation: Federation, stage: Any) -> report_schemas.PhaseReport:
    tasks, reading = rows_by_client(session, TaskRow, TaskRow.phase_id == stage.id), Reading()
    updates = {row.task_id: row for row in rows_by_client(session, UpdateRow, TaskRow.phase_id == stage.id)}
    answered = [(task, updates[task.id]) for task in tasks if task.id in updates]
    counted = [(task, update) for task, update in answered if task.counted]
    measured = reading.row("what was measured", lambda: _measured(stage)) or _Measured()
    far = far_off(measured.changes)
    by_task = {
        task.id: reading.row(
            f"the update of {task.client}",
            partial(_update_report, federation, stage, task, update, measured.changes.get(task.client)),
        )
        for task, update in answered
    }
    reports = [report for report in by_task.values() if report is not None]
    for report in reports:
        report.far = far.get(report.client)
    weighed = [(task.weight or 0.0, sent.metrics) for task, _ in counted if (sent := by_task[task.id]) is not None]
    return report_schemas.PhaseReport.model_validate(
        {
            **stage_report(stage, tasks, reading),
            "phase": stage.name,
            "sample_size": stage.sample_size,
            "extended": stage.extended,
            "bytes_up": sum(report.bytes for report in reports),
            "counted": [
                report_schemas.CountedUpdate(client=task.client, sha256=update.sha256, weight=task.weight or 0.0)
                for task, update in counted
            ],
            "updates": reports,
            "state_hash": session.scalar(select(StateRow.state_hash).where(StateRow.phase_id == stage.id)),
            "metrics": _mean_metrics(weighed),
            "measured": report_schemas.MeasuredView(phase=measured.phase, clients=measured.clients),
            "privacy": measured.privacy,
            "unreadable": reading.unreadable,
        }
    )


def secure_report(session: Session, federation: Federation, stages: list[Any]) -> report_schemas.PhaseReport:
    """The report of one attempt at a secure sum: as a phase, with the sum instead of updates."""
    first, last, reading = stages[0], stages[-1], Reading()
    report = phase_report(session, federation, first)
    within = TaskRow.phase_id.in_([stage.id for stage in stages])
    sent = select(func.sum(ExchangeRow.bytes)).join(TaskRow, TaskRow.id == ExchangeRow.task_id).where(within)
    tasks = rows_by_client(session, TaskRow, within)
    later = [task for task in tasks if task.phase_id != first.id]
    silent = {task.client for task in later if task.failure is None and task.status == "expired"}
    masks = [stage.id for stage in stages[MASK : MASK + 1]]
    columns = (TaskRow.client, TaskRow.weight, TaskRow.counted, ExchangeRow.digest, ExchangeRow.spent)
    vectors = select(*map(leniently, columns)).join(ExchangeRow, ExchangeRow.task_id == TaskRow.id)
    answers = session.execute(vectors.where(TaskRow.phase_id.in_(masks)).order_by(TaskRow.client)).all()
    spent = {
        row.client: reading.row(f"the cost of {row.client}", partial(spent_privacy, row.spent))
        for row in answers
        if row.spent is not None
    }
    total = session.scalars(select(SumRow).where(SumRow.phase_id.in_([stage.id for stage in stages]))).one_or_none()
    plan = federation.rules.plan(first.round, first.step)
    assert plan is not None, "it is an attempt's first step"
    assert plan.secure is not None, "it is an attempt's first step"
    measured = reading.row("what was measured", lambda: _measured(last)) or _Measured()
    norm = measured.phase.get("mean_norm")
    return report.model_copy(
        update={
            "completed_at": clock.parse(last.completed_at) if last.completed_at is not None else None,
            "seconds": clock.seconds_between(first.opened_at, last.completed_at),
            "counted": [
                report_schemas.CountedUpdate(client=row.client, sha256=row.digest, weight=row.weight or 0.0)
                for row in answers
                if row.counted
            ],
            "bytes_up": int(session.scalar(sent) or 0),
            "bytes_down": sum(task.bytes_down for task in tasks),
            "state_hash": session.scalar(select(StateRow.state_hash).where(StateRow.phase_id == last.id)),
            "failed": [*report.failed, *_failures(later, reading)],
            "expired": sorted(silent.union(report.expired)),
            "secure": report_schemas.SecureReport(
                attempt=plan.secure.attempt,
                sum_clients=total.count if total is not None else None,
                sum_weight=total.weight if total is not None else None,
                mean_norm=norm,
                privacy={client: cost for client, cost in spent.items() if cost is not None} or None,
            ),
            "unreadable": [*report.unreadable, *reading.unreadable],
        }
    )


def _update_report(
    federation: Federation, stage: Any, task: Any, update: Any, change: float | None
) -> report_schemas.UpdateReport:
    judged = update.judged or {}
    if task.counted:
        verdict = judged.get("verdict", "counted")
    elif task.status == "discarded":
        verdict = "discarded"
    else:
        verdict = "unused" if stage.closed_at is not None or federation.run.state in ENDED else "pending"
    return report_schemas.UpdateReport.model_validate(
        {
            "client": task.client,
            "task_id": task.id,
            "sha256": update.sha256,
            "bytes": update.bytes,
            "norm": update.norm,
            "change": change,
            "received_at": update.received_at,
            "verdict": verdict,
            "weight": task.weight,
            "influence": judged.get("influence"),
            "distance": judged.get("distance"),
            "metrics": update.metrics,
            "privacy": None if update.spent is None else spent_privacy(update.spent),
        }
    )


def _mean_metrics(parts: list[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """Weighted means of the metrics that all clients have sent."""
    total = sum(weight for weight, _ in parts)
    if not total:
        return {}
    common = set.intersection(*(set(metrics) for _, metrics in parts))
    return {name: sum(weight * metrics[name] for weight, metrics in parts) / total for name in sorted(common)}
