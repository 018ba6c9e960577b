"""Reports of evaluations, from the database alone."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.readable import Reading, rows_of
from promptfed.coordinator.engine.selection import selected_round
from promptfed.coordinator.resources.results.phases import rows_by_client, stage_report
from promptfed.coordinator.store.tables import EvaluationRow, PhaseRow, TaskRow
from promptfed.shared.api import report_schemas
from promptfed.shared.messages import FIGURES
from promptfed.shared.spec.sections import FINAL


def evaluation_report(session: Session, federation: Federation, stage: Any) -> report_schemas.EvaluationReport:
    tasks, reading = rows_by_client(session, TaskRow, TaskRow.phase_id == stage.id), Reading()
    bodies = {row.task_id: row for row in rows_by_client(session, EvaluationRow, TaskRow.phase_id == stage.id)}
    by_client = {
        task.client: reading.row(
            f"the evaluation of {task.client}", partial(_client_evaluation, federation, task.client, bodies[task.id])
        )
        for task in tasks
        if task.id in bodies and task.status == "answered"
    }
    clients = {name: report for name, report in by_client.items() if report is not None}
    report = {**stage_report(stage, tasks, reading), "bytes_up": 0, **_with_means(clients, federation.spec.task)}
    report["unreadable"] = reading.unreadable
    return report_schemas.EvaluationReport.model_validate(report)


def with_final_test(
    session: Session, federation: Federation, round: int, report: report_schemas.EvaluationReport
) -> report_schemas.EvaluationReport:
    """The evaluation of ``round`` with what the final test, which is of the selected round, has added to it."""
    if federation.spec.selection is None or selected_round(session, federation) != round:
        return report
    final = (PhaseRow.federation_id == federation.id, PhaseRow.name == FINAL)
    stage = session.execute(rows_of(PhaseRow).where(*final)).one_or_none()
    if stage is None:
        return report
    clients = dict(report.clients)
    final_report = evaluation_report(session, federation, stage)
    for name, tested in final_report.clients.items():
        before = clients.get(name, tested)
        both = {at: getattr(before, at) | getattr(tested, at) for at in ("splits", "zero_shot", "metrics")}
        clients[name] = before.model_copy(update=both)
    both = {"unreadable": [*report.unreadable, *final_report.unreadable]}
    return report.model_copy(update=_with_means(clients, federation.spec.task) | both)


def _with_means(clients: dict[str, report_schemas.ClientEvaluation], task: str) -> dict[str, Any]:
    """The clients' figures and their means by role and split, each with its interval."""
    by_role: dict[str, list[report_schemas.ClientEvaluation]] = {}
    for name, client in clients.items():
        clients[name] = client.model_copy(update={"bounds": _bounds([client], task)})
        by_role.setdefault(client.role, []).append(client)
    by_split = {role: _mean_accuracy(own) for role, own in sorted(by_role.items())}
    mean = {role: splits["test"] for role, splits in by_split.items() if "test" in splits}
    bounds = {role: _bounds(own, task) for role, own in sorted(by_role.items())}
    return {"clients": clients, "mean": mean, "by_split": by_split, "bounds": bounds}


def _bounds(clients: list[report_schemas.ClientEvaluation], task: str) -> dict[str, report_schemas.Bounds]:
    splits = sorted({split for client in clients for split in client.splits})
    found = {
        split: report_schemas.bounds_of([client for client in clients if split in client.splits], split, task)
        for split in splits
    }
    return {split: bounds for split, bounds in found.items() if bounds is not None}


def _client_evaluation(federation: Federation, name: str, row: Any) -> report_schemas.ClientEvaluation:
    client = federation.clients[name]
    return report_schemas.ClientEvaluation.model_validate(
        {
            "role": client.role,
            "domain": client.domain.name if client.domain else None,
            "splits": row.body["splits"],
            "zero_shot": row.body["zero_shot"],
            "metrics": row.body["metrics"],
            "withheld": row.body.get("withheld", False),
            "privacy": _spent_counts(row.body.get("privacy")),
            "received_at": row.received_at,
        }
    )


def _spent_counts(spent: dict[str, Any] | None) -> dict[str, Any] | None:
    if spent is None:
        return None
    (event,) = spent["events"]
    a, counts = event["z"], event["count"]
    ledger = {"ledger_epsilon": spent["epsilon"], "delta": spent["delta"], "noise": spent["noise"]}
    return {**ledger, "epsilon": counts * a, "count_epsilon": a, "counts": counts}


def _mean_accuracy(clients: list[report_schemas.ClientEvaluation]) -> dict[str, dict[str, float]]:
    """For each split the unweighted mean over the clients that have it."""
    means: dict[str, dict[str, float]] = {}
    for split in sorted({name for client in clients for name in client.splits}):
        results = [client.splits[split] for client in clients if split in client.splits]
        measured = {
            "accuracy": [evaluated.accuracy for evaluated in results],
            "zero_shot": [client.zero_shot[split].accuracy for client in clients if split in client.zero_shot],
            **{name: [figures[name] for one in results if name in (figures := one.figures())] for name in FIGURES},
        }
        means[split] = {name: fmean(values) for name, values in measured.items() if values}
    return means
