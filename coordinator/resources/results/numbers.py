"""All numbers of rounds as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.resources.results.rounds import round_report
from promptfed.coordinator.store.database import Database
from promptfed.shared.api import report_schemas
from promptfed.shared.plain_text import csv_cell

FIELDS = ("round", "phase", "client", "split", "name", "value")
Number = tuple[int, str, str | None, str | None, str, float]
"""One number: its `FIELDS`; the client is None for what concerns the whole phase."""


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
