"""All metrics of some rounds, in order, as JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import chain

from pydantic_core import to_json

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.reports.pieces import batches, listed
from promptfed.coordinator.reports.rounds import round_report
from promptfed.coordinator.store.database import Database
from promptfed.shared.api import api_schemas as schemas
from promptfed.shared.api import report_schemas
from promptfed.shared.plain_text import csv_cell

FIELDS = tuple(schemas.Metric.model_fields)

Number = tuple[int, str, str | None, str | None, str, float]
"""The fields of a ``Metric``, in its order."""


def as_json(
    database: Database, federation: Federation, rounds: Sequence[int], following: str | None = None
) -> Iterator[bytes]:
    """A ``MetricList`` of these rounds, in pieces."""
    numbers = batches(_numbers(database, federation, rounds))
    some = (to_json([dict(zip(FIELDS, number, strict=True)) for number in batch])[1:-1] for batch in numbers)
    return chain([b'{"metrics":'], listed(some, b"[", b"]"), [b',"next":' + to_json(following) + b"}"])


def as_csv(database: Database, federation: Federation, rounds: Sequence[int]) -> Iterator[bytes]:
    """The same as CSV, with a header line."""
    lines: Iterator[tuple[object, ...]] = chain([FIELDS], _numbers(database, federation, rounds))
    for some in batches(lines):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([_cell(value) for value in row] for row in some)
        yield text.getvalue().encode()


def _cell(value: object) -> object:
    """Escape text that a spreadsheet would read as a formula: clients choose names. Numbers stay numbers."""
    return csv_cell(value) if isinstance(value, str) else value


def _numbers(database: Database, federation: Federation, rounds: Sequence[int]) -> Iterator[Number]:
    """Read one round at a time, each in its own transaction: slow readers keep no transaction open."""
    for number in rounds:
        with database.read() as session:
            report = round_report(session, federation, number)
        for phase in report.phases:
            yield from _of_phase(number, phase)
        if report.evaluation is not None:
            yield from _of_evaluation(number, report.evaluation)


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
            for name, value in (("ece", evaluated.ece), ("macro_f1", evaluated.macro_f1)):
                if value is not None:
                    yield round, "evaluation", client, split, name, float(value)
        for name, value in measured.metrics.items():
            yield round, "evaluation", client, None, name, float(value)
    for role, means in report.mean.items():
        for name, value in means.items():
            yield round, "evaluation", None, None, f"{role}_{name}", float(value)
