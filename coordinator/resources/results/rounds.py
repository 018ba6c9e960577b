"""Reports of rounds and their metrics, from the database alone: nothing is computed from tensors."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.readable import rows_of
from promptfed.coordinator.problems import NotFound
from promptfed.coordinator.resources.results.evaluations import evaluation_report, with_final_test
from promptfed.coordinator.resources.results.phases import attempts, phase_report, secure_report
from promptfed.coordinator.resources.results.states import has_state, last_state
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import PhaseRow, TaskRow
from promptfed.shared.api import report_schemas
from promptfed.shared.api.report_schemas import remarks
from promptfed.shared.messages import ENDED
from promptfed.shared.methods import has_rate
from promptfed.shared.spec.sections import FINAL

LAST_ROUND = 1 << 31  # beyond every round, and no more than databases take
MOST_TASKS = 1000  # of the rounds of one page: their reports take less than a tenth of a second


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
    for number, count in session.execute(query.order_by(PhaseRow.round).limit(limit + 1)):
        tasks += count
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
        phases = [phase_report(session, federation, stage) for stage in stages if stage.kind == "train"]
    else:
        tried = attempts(federation, stages)
        phases = [secure_report(session, federation, attempt) for attempt in tried]
    evaluated = [stage for stage in stages if stage.kind == "evaluate" and stage.name != FINAL]
    evaluations = [evaluation_report(session, federation, stage) for stage in evaluated]
    if evaluations and federation.phase in (None, FINAL):
        evaluations[0] = with_final_test(session, federation, round, evaluations[0])
    state = last_state(session, federation, round) if has_state(federation, round) else None
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
    chosen = {*begun[1:2], *earlier[-1:], *evaluated[-2:]}
    counts = [len(client.class_names) for client in federation.clients.values() if client.role == "trainer"]
    if spec.class_names is not None and spec.method.get("label_space") != "client":
        counts = [len(spec.class_names)]
    reports = [round_report(session, federation, round) for round in sorted(chosen)]
    return remarks(spec, reports, counts, has_rate(spec))
