"""Figures of a bench beside its accuracies: calibration, macro-F1, worst class, spread over clients.

All are computed from the outcomes that runs keep (`promptfed.shared.metrics.outcomes`), by entry, variant and test set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from itertools import chain
from statistics import fmean, pstdev

from pydantic import BaseModel

from promptfed.experiments.bench.results import VARIANT, BenchRun, row_label
from promptfed.experiments.bench.tables import markdown_table
from promptfed.experiments.protocols.protocols import ELSEWHERE, TARGET
from promptfed.shared.metrics import calibration_error, class_accuracies, macro_f1, reliability
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.plain_text import markdown_cell

FIGURES = ("accuracy", "ece", "macro_f1", "worst_class", "sd_clients", "worst_client")


class Measures(BaseModel):
    """Fractions of one entry (or variant) on one test set by seed; ``reliability`` is over the images of all seeds.

    ``accuracy``, ``macro_f1``, ``sd_clients`` and ``worst_client`` weight every client equally; ``ece`` and
    ``worst_class`` are over all clients' images. A bin is lower, upper, count, mean confidence, accuracy.
    """

    label: str
    split: str
    seeds: list[int]
    accuracy: list[float]
    ece: list[float]
    macro_f1: list[float]
    worst_class: list[float]
    sd_clients: list[float]
    worst_client: list[float]
    reliability: list[tuple[float, float, int, float, float]]


class Matrix(BaseModel):
    """Accuracy of each client's classifier (row) on each client's test images (column), as a mean over the seeds."""

    label: str
    clients: list[str]
    accuracy: list[list[float]]

    @property
    def elsewhere(self) -> float:
        """The mean outside the diagonal: the classifiers on other clients' images."""
        size = range(len(self.clients))
        return fmean(self.accuracy[row][column] for row in size for column in size if row != column)


def measures_of(runs: Sequence[BenchRun]) -> list[Measures]:
    """The measures of each entry, variant and test set, in the order of the runs. The template is a variant.

    ``test`` is the trainers' own test set. An evaluator's is `TARGET`, as where trainers are tested on the target.
    """
    groups: dict[tuple[str, str], dict[int, list[Outcomes]]] = {}
    for run in runs:
        evaluators = {row.client for row in run.last() if row.role == "evaluator"}
        for outcomes in run.outcomes:
            split = TARGET if outcomes.client in evaluators else outcomes.split.partition(VARIANT)[0]
            if not split.startswith(ELSEWHERE):
                key = row_label(run, outcomes.split), split
                groups.setdefault(key, {}).setdefault(run.seed, []).append(outcomes)
    measures = []
    for (label, split), by_seed in groups.items():
        each_seed = [figures(clients) for clients in by_seed.values()]
        rows = {name: [values[name] for values in each_seed] for name in FIGURES}
        bins = [astuple(bin) for bin in reliability(*_pooled(chain.from_iterable(by_seed.values())))]
        measures.append(Measures(label=label, split=split, seeds=list(by_seed), **rows, reliability=bins))
    return measures


def figures(clients: Sequence[Outcomes]) -> dict[str, float]:
    """The figures of `Measures` for the outcomes of one test set, one for each client."""
    accuracies = [fmean(a == b for a, b in zip(own.labels, own.predicted, strict=True)) for own in clients]
    sure, right = _pooled(clients)
    names = sorted({name for own in clients for name in own.class_names})
    place = {name: index for index, name in enumerate(names)}
    labels = [place[own.class_names[k]] for own in clients for k in own.labels]
    predicted = [place[own.class_names[k]] for own in clients for k in own.predicted]
    return {
        "accuracy": fmean(accuracies),
        "ece": calibration_error(sure, right),
        "macro_f1": fmean(macro_f1(own.labels, own.predicted) for own in clients),
        "worst_class": min(class_accuracies(labels, predicted).values()),
        "sd_clients": pstdev(accuracies),
        "worst_client": min(accuracies),
    }


def _pooled(clients: Iterable[Outcomes]) -> tuple[list[float], list[bool]]:
    """The confidences of all clients' answers, and whether each answer is right."""
    sure: list[float] = []
    right: list[bool] = []
    for own in clients:
        sure += own.confidence
        right += (a == b for a, b in zip(own.labels, own.predicted, strict=True))
    return sure, right


def matrices_of(runs: Sequence[BenchRun]) -> list[Matrix]:
    """The matrix of each entry whose clients were tested on each other's images."""
    by_label: dict[str, dict[tuple[str, str], list[float]]] = {}
    for run in runs:
        for row in run.last():
            if row.split == "test" or (row.split.startswith(ELSEWHERE) and VARIANT not in row.split):
                owner = row.client if row.split == "test" else row.split.removeprefix(ELSEWHERE)
                by_label.setdefault(run.label, {}).setdefault((row.client, owner), []).append(row.accuracy)
    matrices = []
    for label, cells in by_label.items():
        clients = sorted({client for client, _ in cells})
        if len(clients) > 1 and len(cells) == len(clients) ** 2:
            rows = [[fmean(cells[row, column]) for column in clients] for row in clients]
            matrices.append(Matrix(label=label, clients=clients, accuracy=rows))
    return matrices


def measures_table(rows: Sequence[Measures]) -> list[str]:
    """The lines of the table in Markdown: percent, means over the seeds."""
    header = ["method", "test set", "accuracy", "ECE", "macro-F1", "worst class", "sd of clients", "worst client"]
    lines = [
        [markdown_cell(row.label), markdown_cell(row.split), *(_percent(getattr(row, name)) for name in FIGURES)]
        for row in rows
    ]
    return markdown_table(header, lines, text_columns=(0, 1))


def _percent(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):.1f}"


def matrix_table(matrix: Matrix) -> list[str]:
    """The lines of the table in Markdown: percent, one row for each client's classifier."""
    rows = zip(matrix.clients, matrix.accuracy, strict=True)
    lines = [[markdown_cell(client), *(f"{100 * value:.1f}" for value in row)] for client, row in rows]
    return [
        f"{markdown_cell(matrix.label)}: each client's classifier (row) on each client's test images (column); "
        f"{100 * matrix.elsewhere:.1f} on the others' in the mean.",
        "",
        *markdown_table(["", *map(markdown_cell, matrix.clients)], lines),
    ]
