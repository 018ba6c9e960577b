"""Reports of rounds and their metrics, from the database alone: nothing is computed from tensors."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation.rows import far_off
from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.domain.round_machine import MASK, TRAIN
from promptfed.coordinator.engine.jobs import selected_round
from promptfed.coordinator.engine.readable import Reading, leniently, rows_of
from promptfed.coordinator.problems import NoState, NotFound
from promptfed.coordinator.resources.federations.views import spent_privacy
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import (
    Base,
    EvaluationRow,
    ExchangeRow,
    PhaseRow,
    StateRow,
    SumRow,
    TaskRow,
    UpdateRow,
)
from promptfed.shared.api import report_schemas
from promptfed.shared.api.report_schemas import remarks
from promptfed.shared.messages import ENDED, FIGURES
from promptfed.shared.methods import has_rate
from promptfed.shared.plain_text import csv_cell
from promptfed.shared.spec.sections import FINAL

AT_ONCE = 200  # rows that are fetched together, which takes a millisecond or two in which no other thread runs
LAST_ROUND = 1 << 31  # beyond every round, and no more than databases take
MOST_TASKS = 1000  # of the rounds of one page: their reports take less than a tenth of a second
FIELDS = ("round", "phase", "client", "split", "name", "value")

Number = tuple[int, str, str | None, str | None, str, float]
"""One number: its `FIELDS`; the client is None for what concerns the whole phase."""


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


def state_of(session: Session, federation: Federation, round: int | None) -> StateRow:
    """The last state of ``round``, or of all, whose tensors are still kept. Raises NoState."""
    if round is not None and not _has_state(federation, round):
        now = federation.run.round
        raise NoState(f"round {round} is not over: {federation.name} is in round {now}; wait, or name an earlier one")
    row = _last_state(session, federation, round)
    if row is None:
        raise NoState(f"{federation.name} has no state yet: start it first")
    if not row.stored:
        raise NoState(f"the state of round {round} is no longer kept (retention: {federation.spec.retention})")
    return row


def _last_state(session: Session, federation: Federation, round: int | None) -> StateRow | None:
    # A round without phases keeps the state of the round before.
    until = () if round is None else (StateRow.round <= round,)
    return queries.last_state(session, federation.id, *until)


def _has_state(federation: Federation, round: int) -> bool:
    """Whether all phases of ``round`` are committed."""
    run = federation.run
    phases = federation.rules.phases(run.round) if run.round > 0 else ()
    return round < run.round or (round == run.round and run.step >= len(phases))


def rounds(session: Session, id: str) -> list[int]:
    """Numbers of the rounds that have begun."""
    query = select(PhaseRow.round).where(PhaseRow.federation_id == id)
    return list(session.scalars(query.distinct().order_by(PhaseRow.round)))


def has_begun(session: Session, id: str, round: int) -> bool:
    """Whether the round has begun."""
    here = (PhaseRow.federation_id == id, PhaseRow.round == round)
    return session.scalar(select(PhaseRow.id).where(*here).limit(1)) is not None


def numbers_of_page(session: Session, id: str, limit: int, after: str | None) -> tuple[list[int], str | None]:
    """At most ``limit`` rounds after round ``after``, and the last one's number if more follow.

    A page with several rounds has at most `MOST_TASKS` tasks.
    """
    last = min(int(after), LAST_ROUND) if after is not None and after.isdecimal() else -1
    query = select(PhaseRow.round, func.count(TaskRow.phase_id)).outerjoin(TaskRow, TaskRow.phase_id == PhaseRow.id)
    query = query.where(PhaseRow.federation_id == id, PhaseRow.round > last).group_by(PhaseRow.round)
    numbers: list[int] = []
    tasks = 0
    for number, asked in session.execute(query.order_by(PhaseRow.round).limit(limit + 1)):
        tasks += asked
        if numbers and (len(numbers) == limit or tasks > MOST_TASKS):
            return numbers, str(numbers[-1])
        numbers.append(number)
    return numbers, None


def page(
    database: Database, federation: Federation, numbers: list[int], following: str | None
) -> report_schemas.RoundPage:
    """The reports of these rounds, each read in a transaction of its own."""
    reports = []
    for number in numbers:
        with database.read() as session:
            reports.append(round_report(session, federation, number))
    return report_schemas.RoundPage(rounds=reports, next=following)


def round_report(session: Session, federation: Federation, round: int) -> report_schemas.RoundReport:
    """Phases, updates, evaluation, bytes and seconds of one round, which must have begun."""
    mine = (PhaseRow.federation_id == federation.id, PhaseRow.round == round)
    stages = list(session.execute(rows_of(PhaseRow).where(*mine).order_by(PhaseRow.step)))
    if not stages:
        raise NotFound(f"{federation.name} has just been deleted")
    if federation.spec.secure_aggregation is None:
        phases = [_phase_report(session, federation, stage) for stage in stages if stage.kind == "train"]
    else:
        tried = attempts(federation, stages)
        phases = [_secure_report(session, federation, attempt) for attempt in tried]
    evaluated = [stage for stage in stages if stage.kind == "evaluate" and stage.name != FINAL]
    evaluations = [_evaluation_report(session, federation, stage) for stage in evaluated]
    if evaluations and federation.phase in (None, FINAL):
        evaluations[0] = _tested(session, federation, round, evaluations[0])
    state = _last_state(session, federation, round) if _has_state(federation, round) else None
    over = round < federation.run.round or federation.run.state in ENDED
    ended = stages[-1].completed_at if over else None
    everything = [*phases, *evaluations]
    return report_schemas.RoundReport.model_validate(
        {
            "round": round,
            "state_hash": state.state_hash if state is not None else None,
            "started_at": stages[0].opened_at,
            "ended_at": ended,
            "seconds": clock.seconds_between(stages[0].opened_at, ended),
            "bytes_up": sum(stage.bytes_up for stage in everything),
            "bytes_down": sum(stage.bytes_down for stage in everything),
            "phases": phases,
            "evaluation": evaluations[0] if evaluations else None,
        }
    )


def remarks_of(session: Session, federation: Federation) -> list[str]:
    """Remarks on the federation so far. At most four rounds are read: reports have megabytes with many clients."""
    begun, spec = rounds(session, federation.id), federation.spec
    every, last = spec.evaluation.every, max(begun, default=0)
    evaluated = [round for round in begun if round % every == 0 or round == spec.rounds]
    earlier = [round for round in evaluated if round <= 0.75 * last]
    wanted = {*begun[1:2], *earlier[-1:], *evaluated[-2:]}
    counts = [len(client.class_names) for client in federation.clients.values() if client.role == "trainer"]
    if spec.class_names is not None and spec.method.get("label_space") != "client":
        counts = [len(spec.class_names)]
    reports = [round_report(session, federation, round) for round in sorted(wanted)]
    return remarks(spec, reports, counts, has_rate(spec))


def _stage_report(stage: Any, tasks: list[Any], reading: Reading) -> dict[str, Any]:
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
    return [told for told in found if told is not None]


def _rows(session: Session, table: type[Base], *where: Any) -> list[Any]:
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


def _phase_report(session: Session, federation: Federation, stage: Any) -> report_schemas.PhaseReport:
    tasks, reading = _rows(session, TaskRow, TaskRow.phase_id == stage.id), Reading()
    updates = {row.task_id: row for row in _rows(session, UpdateRow, TaskRow.phase_id == stage.id)}
    answered = [(task, updates[task.id]) for task in tasks if task.id in updates]
    counted = [(task, update) for task, update in answered if task.counted]
    measured = reading.row("what was measured", lambda: _measured(stage)) or _Measured()
    far = far_off(measured.changes)
    told = {
        task.id: reading.row(
            f"the update of {task.client}",
            partial(_update_report, federation, stage, task, update, measured.changes.get(task.client)),
        )
        for task, update in answered
    }
    reports = [report for report in told.values() if report is not None]
    for report in reports:
        report.far = far.get(report.client)
    weighed = [(task.weight or 0.0, sent.metrics) for task, _ in counted if (sent := told[task.id]) is not None]
    return report_schemas.PhaseReport.model_validate(
        {
            **_stage_report(stage, tasks, reading),
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


def _secure_report(session: Session, federation: Federation, stages: list[Any]) -> report_schemas.PhaseReport:
    """The report of one attempt at a secure sum: as a phase, with the sum instead of updates."""
    first, last, reading = stages[0], stages[-1], Reading()
    report = _phase_report(session, federation, first)
    within = TaskRow.phase_id.in_([stage.id for stage in stages])
    sent = select(func.sum(ExchangeRow.bytes)).join(TaskRow, TaskRow.id == ExchangeRow.task_id).where(within)
    tasks = _rows(session, TaskRow, within)
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


def _evaluation_report(session: Session, federation: Federation, stage: Any) -> report_schemas.EvaluationReport:
    tasks, reading = _rows(session, TaskRow, TaskRow.phase_id == stage.id), Reading()
    bodies = {row.task_id: row for row in _rows(session, EvaluationRow, TaskRow.phase_id == stage.id)}
    told = {
        task.client: reading.row(
            f"the evaluation of {task.client}", partial(_client_evaluation, federation, task.client, bodies[task.id])
        )
        for task in tasks
        if task.id in bodies and task.status == "answered"
    }
    clients = {name: report for name, report in told.items() if report is not None}
    report = {**_stage_report(stage, tasks, reading), "bytes_up": 0, **_with_means(clients)}
    report["unreadable"] = reading.unreadable
    return report_schemas.EvaluationReport.model_validate(report)


def _tested(
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
    final_report = _evaluation_report(session, federation, stage)
    for name, tested in final_report.clients.items():
        known = clients.get(name, tested)
        both = {at: getattr(known, at) | getattr(tested, at) for at in ("splits", "zero_shot", "metrics")}
        clients[name] = known.model_copy(update=both)
    both = {"unreadable": [*report.unreadable, *final_report.unreadable]}
    return report.model_copy(update=_with_means(clients) | both)


def _with_means(clients: dict[str, report_schemas.ClientEvaluation]) -> dict[str, Any]:
    """The clients' figures, and their means by role and split."""
    roles = sorted({client.role for client in clients.values()})
    by_split = {role: _mean_accuracy([client for client in clients.values() if client.role == role]) for role in roles}
    mean = {role: splits["test"] for role, splits in by_split.items() if "test" in splits}
    return {"clients": clients, "mean": mean, "by_split": by_split}


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
    told = {"ledger_epsilon": spent["epsilon"], "delta": spent["delta"], "noise": spent["noise"]}
    return {**told, "epsilon": counts * a, "count_epsilon": a, "counts": counts}


def _mean_accuracy(clients: list[report_schemas.ClientEvaluation]) -> dict[str, dict[str, float]]:
    """For each split the unweighted mean over the clients that have it."""
    means: dict[str, dict[str, float]] = {}
    for split in sorted({name for client in clients for name in client.splits}):
        own = [client.splits[split] for client in clients if split in client.splits]
        measured = {
            "accuracy": [evaluated.accuracy for evaluated in own],
            "zero_shot": [client.zero_shot[split].accuracy for client in clients if split in client.zero_shot],
            **{name: [told[name] for one in own if name in (told := one.figures())] for name in FIGURES},
        }
        means[split] = {name: fmean(values) for name, values in measured.items() if values}
    return means


def as_csv(database: Database, federation: Federation, rounds: Sequence[int]) -> Iterator[bytes]:
    """All numbers of these rounds as CSV with a header line. Each round is read in a transaction of its own."""
    header: list[tuple[object, ...]] = [FIELDS]
    for number in rounds:
        with database.read() as session:
            report = round_report(session, federation, number)
        yield _csv(chain(header, _numbers(report)))
        header = []
    if header:
        yield _csv(header)


def _csv(lines: Iterable[tuple[object, ...]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(value) for value in line] for line in lines)
    return text.getvalue().encode()


def _cell(value: object) -> object:
    """Escape text that a spreadsheet would read as a formula: clients choose names. Numbers stay numbers."""
    return csv_cell(value) if isinstance(value, str) else value


def _numbers(report: report_schemas.RoundReport) -> Iterator[Number]:
    for phase in report.phases:
        yield from _of_phase(report.round, phase)
    if report.evaluation is not None:
        yield from _of_evaluation(report.round, report.evaluation)


def _of_phase(round: int, phase: report_schemas.PhaseReport) -> Iterator[Number]:
    whole = {
        **phase.metrics,
        **phase.measured.phase,
        "asked": len(phase.asked),
        "answered": len(phase.answered),
        "counted": len(phase.counted),
        "bytes_up": phase.bytes_up,
        "bytes_down": phase.bytes_down,
        **({"seconds": phase.seconds} if phase.seconds is not None else {}),
    }
    for name, value in whole.items():
        yield round, phase.phase, None, None, name, float(value)
    for update in phase.updates:
        values = {**update.metrics, "norm": update.norm, "bytes": update.bytes}
        judged = {"weight": update.weight, "influence": update.influence, "distance": update.distance}
        values |= {name: value for name, value in judged.items() if value is not None}
        for name, value in values.items():
            yield round, phase.phase, update.client, None, name, float(value)
    for client, measured in sorted(phase.measured.clients.items()):
        for name, value in measured.items():
            yield round, phase.phase, client, None, name, float(value)


def _of_evaluation(round: int, report: report_schemas.EvaluationReport) -> Iterator[Number]:
    for client, measured in report.clients.items():
        for name, splits in (("accuracy", measured.splits), ("zero_shot", measured.zero_shot)):
            for split, evaluated in splits.items():
                yield round, "evaluation", client, split, name, float(evaluated.accuracy)
        for split, evaluated in measured.splits.items():
            for name, value in evaluated.figures().items():
                yield round, "evaluation", client, split, name, float(value)
        for name, value in measured.metrics.items():
            yield round, "evaluation", client, None, name, float(value)
    for role, means in report.mean.items():
        for name, value in means.items():
            yield round, "evaluation", None, None, f"{role}_{name}", float(value)
