"""The table of a bench: its metrics, accuracies in percent (mean and deviation over seeds) and costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import erfc, sqrt
from statistics import StatisticsError, fmean, pstdev, stdev
from typing import Any

import numpy as np
from pydantic import BaseModel

from promptfed.experiments.bench.protocols import TARGET, Protocol
from promptfed.experiments.bench.runner import VARIANT, Bench, BenchRun, row_label
from promptfed.experiments.bench.tuning import paired_bootstrap
from promptfed.sdk.result import Accuracy
from promptfed.shared.metrics.estimates import mean_interval
from promptfed.shared.metrics.figures import Floats, calibration_error, class_accuracies, largest_share, macro_f1
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.plain_text import markdown_cell, markdown_code, size

ZERO_SHOT = "zero-shot"
PAPER = " (paper)"  # behind the label of a row that a paper prints
BELOW = "▼"
FAR = 0.1  # below zero-shot: no spread of seeds, but settings that do not suit the data
COSTS = ("trained", "up", "down", "seconds")
FIGURES = ("accuracy", "majority", "auroc", "ece", "macro_f1", "worst_class", "sd_clients", "worst_client")
BySeed = Mapping[int, Sequence[Outcomes]]


@dataclass(frozen=True)
class TableRow:
    """One row: fractions by column for every seed, and the costs of a client (`runner.costs`; None for zero-shot).

    ``zero_shot`` is the label of the zero-shot row over the same class names, with which the row is compared.
    """

    label: str
    scores: tuple[dict[str, float], ...]
    costs: dict[str, float] | None = None
    zero_shot: str = ZERO_SHOT

    @property
    def is_zero_shot(self) -> bool:
        """Whether this is a row of the template, not of a method."""
        return self.label == self.zero_shot

    def mean(self, column: str) -> float:
        """Mean over the seeds (fraction)."""
        return fmean(scores[column] for scores in self.scores)

    def sd(self, column: str) -> float | None:
        """Sample standard deviation over the seeds; None for one seed."""
        return stdev(scores[column] for scores in self.scores) if len(self.scores) > 1 else None


def rows_of(bench: Bench, runs: Sequence[BenchRun]) -> list[TableRow]:
    """Zero-shot first, then the entries in order, each followed by its variants.

    Each federation measures zero-shot over the class names of its method. The table begins with that of the first
    entry. An entry whose ``label_space`` or template gives another zero-shot result has that row in front of it.
    """
    rows: list[TableRow] = []
    for entry in bench.entries:
        by_variant: dict[str, list[dict[str, float]]] = {}
        template: list[dict[str, float]] = []
        entry_runs = [run for run in runs if run.label == entry.label]
        for seed in bench.seeds:
            scores, zero_shot = scores_of(bench.protocol, [run for run in entry_runs if run.seed == seed])
            for variant, columns in scores.items():
                by_variant.setdefault(variant, []).append(columns)
            if zero_shot is not None:
                template.append(zero_shot)
        templates = [row for row in rows if row.is_zero_shot]
        same = next((row for row in templates if row.scores == tuple(template)), None)
        if same is None and template:
            label = f"{ZERO_SHOT}, as for {entry.label}" if templates else ZERO_SHOT
            same = TableRow(label, tuple(template), zero_shot=label)
            rows.insert(len(rows) if templates else 0, same)
        costs = {key: fmean(run.costs[key] for run in entry_runs) for key in entry_runs[0].costs}
        for variant, seeds in by_variant.items():
            label = f"{entry.label} ({variant})" if variant else entry.label
            rows.append(TableRow(label, tuple(seeds), costs, same.label if same else ZERO_SHOT))
    return rows


def scores_of(
    protocol: Protocol, runs: Sequence[BenchRun]
) -> tuple[dict[str, dict[str, float]], dict[str, float] | None]:
    """Columns of one entry and seed by variant ("" is the method's own classifier), and zero-shot's if it is known."""
    by_variant: dict[str, dict[str, list[Accuracy]]] = {}
    for run in runs:
        for accuracy in run.last():
            split, _, variant = accuracy.split.partition(VARIANT)
            by_trial = by_variant.setdefault(variant, {})
            by_trial.setdefault(run.trial, []).append(replace(accuracy, split=split))
    scores = {}
    for variant in sorted(by_variant):
        try:
            scores[variant] = protocol.scores(by_variant[variant], lambda accuracy: accuracy.accuracy)
        except StatisticsError:
            # A further classifier may be one that only trainers have: where a protocol looks at evaluators, no row.
            if not variant:
                raise
    main = by_variant[""]
    if any(accuracy.zero_shot is None for accuracies in main.values() for accuracy in accuracies):
        return scores, None
    return scores, protocol.scores(main, lambda accuracy: accuracy.zero_shot)


def interleaved(ours: Sequence[TableRow], paper: Sequence[TableRow]) -> list[TableRow]:
    """Our rows, each followed by the paper's row of the same label, then the paper's other rows."""
    theirs = {row.label.removesuffix(PAPER): row for row in paper}
    rows: list[TableRow] = []
    for row in ours:
        rows.append(row)
        if row.label in theirs:
            rows.append(theirs.pop(row.label))
    return [*rows, *theirs.values()]


def cells(columns: Sequence[str], rows: Sequence[TableRow]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table, as text."""
    by_label = {row.label: row for row in rows}
    header = ["method", *columns, *COSTS]
    return header, [_line(row, columns, by_label.get(row.zero_shot)) for row in rows]


def table_of(columns: Sequence[str], rows: Sequence[TableRow]) -> list[str]:
    """The lines of the table in Markdown."""
    header, lines = cells(columns, rows)
    return markdown_table(_escaped(header), map(_escaped, lines))


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = (0,)
) -> list[str]:
    """The lines of a Markdown table of cells in Markdown. Columns other than ``text_columns`` are aligned right."""
    rule = ["---" if column in text_columns else "--:" for column in range(len(header))]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return [lines[0], "|" + "|".join(rule) + "|", *lines[1:]]


def markdown(bench: Bench, rows: Sequence[TableRow]) -> str:
    """The table in Markdown below its caption."""
    remarks = _escaped(far_below(bench.columns, rows))
    return "\n".join([caption(bench), "", *table_of(bench.columns, rows), *([""] if remarks else []), *remarks]) + "\n"


def far_below(columns: Sequence[str], rows: Sequence[TableRow]) -> list[str]:
    """A remark for each of our rows that lies more than `FAR` below its zero-shot row in a column."""
    by_label, remarks = {row.label: row for row in rows}, []
    for row in rows:
        template = by_label.get(row.zero_shot, row)
        both = [name for name in columns if name in row.scores[0] and name in template.scores[0] and name[:2] != "sd"]
        lost = max((template.mean(name) - row.mean(name) for name in both), default=0.0)
        if lost > FAR and not row.label.endswith(PAPER):
            text = "points below zero-shot: try a lower learning rate, or `promptfed tune`"
            remarks.append(f"{row.label} lies up to {100 * lost:.0f} {text}.")
    return remarks


def caption(bench: Bench) -> str:
    """A sentence about the table: protocol, data, seeds and units."""
    data, seeds = ", ".join(map(markdown_code, bench.setting.data)), ", ".join(str(seed) for seed in bench.seeds)
    spread = ", mean ± standard deviation over seeds" if len(bench.seeds) > 1 else ""
    held_out = " on training images held out" if bench.setting.validation is not None else ""
    return (
        f"**{bench.protocol.name}**: {bench.protocol.summary}. Data {data}; seeds {seeds}. "
        f"Accuracy in percent after the last round{held_out}{spread}; the numbers that a client trains, and "
        f"bytes and seconds of training per client and round. {BELOW} marks what lies below zero-shot."
    )


def _escaped(texts: Sequence[str]) -> list[str]:
    return [markdown_cell(text) for text in texts]


def _line(row: TableRow, columns: Sequence[str], zero_shot: TableRow | None) -> list[str]:
    accuracies = [cell(row, column, zero_shot) for column in columns]
    if row.costs is None:
        return [row.label, *accuracies, *["-"] * len(COSTS)]
    costs = [
        f"{row.costs['trained']:,.0f}",
        size(row.costs["bytes_up"]),
        size(row.costs["bytes_down"]),
        f"{row.costs['seconds']:.2f}",
    ]
    return [row.label, *accuracies, *costs]


def cell(row: TableRow, column: str, zero_shot: TableRow | None) -> str:
    """One accuracy, flagged if it is below zero-shot. Standard deviations get no flag."""
    if column not in row.scores[0]:
        return "-"
    value, sd = row.mean(column), row.sd(column)
    text = f"{100 * value:.1f}" + (f" ± {100 * sd:.1f}" if sd is not None else "")
    compared = zero_shot is not row and not column.startswith("sd") and not row.label.endswith(PAPER)
    return f"{text} {BELOW}" if compared and zero_shot is not None and value < zero_shot.mean(column) else text


class Measures(BaseModel):
    """Fractions of one entry (or variant) on one test set by seed.

    ``ece`` and ``worst_class`` are over all clients' images; the others weight every client equally.
    ``over_zero_shot``: the mean difference over all images of all seeds, and its 95 % interval over paired images.
    ``interval``: of ``accuracy`` (95 %), over images, of which every seed may have the same ones.
    ``below``: the p of lying below zero-shot on the trainers' own test images, by Holm's correction over the table.
    """

    label: str
    split: str
    seeds: list[int]
    accuracy: list[float]
    majority: list[float]
    auroc: list[float]
    ece: list[float]
    macro_f1: list[float]
    worst_class: list[float]
    sd_clients: list[float]
    worst_client: list[float]
    over_zero_shot: tuple[float, float, float] | None = None
    interval: tuple[float, float] | None = None
    below: float | None = None


def measures_of(runs: Sequence[BenchRun]) -> list[Measures]:
    """The measures of each entry, variant and test set, in the order of the runs. The template is a variant.

    ``test`` is the trainers' own test set. An evaluator's is `TARGET`, as where trainers are tested on the target.
    """
    groups: dict[tuple[str, str], dict[int, list[Outcomes]]] = {}
    for run in runs:
        evaluators = {row.client for row in run.last() if row.role == "evaluator"}
        for outcomes in run.outcomes:
            split = TARGET if outcomes.client in evaluators else outcomes.split.partition(VARIANT)[0]
            key = row_label(run, outcomes.split), split
            groups.setdefault(key, {}).setdefault(run.seed, []).append(outcomes)
    measures, below = [], dict[str, float]()
    for (label, split), by_seed in groups.items():
        each_seed = [figures(clients) for clients in by_seed.values()]
        rows: Any = {name: [values[name] for values in each_seed] for name in FIGURES}
        template = groups.get((f"{label} ({ZERO_SHOT})", split))
        gain = None if template is None else _gain(by_seed, template)
        rows |= {"over_zero_shot": gain, "interval": _interval(by_seed.values())}
        measures.append(Measures(label=label, split=split, seeds=list(by_seed), **rows))
        if template is not None and split == "test":
            below[label] = p_below(_differences(by_seed, template))
    corrected = dict(zip(below, holm(list(below.values())), strict=True))
    return [
        row.model_copy(update={"below": corrected.get(row.label) if row.split == "test" else None}) for row in measures
    ]


def _gain(ours: BySeed, others: BySeed) -> tuple[float, float, float]:
    """Over the images that both were tested on."""
    differences = [rows for _, rows in _differences(ours, others)]
    return float(np.concatenate(differences).mean()), *paired_bootstrap(differences)


def _differences(ours: BySeed, others: BySeed) -> list[tuple[tuple[str, str], Floats]]:
    """Right answers less the others', by client and list of images, for each seed in which both have them."""
    right_of = {(seed, site.client, site.images): _right(site) for seed, clients in others.items() for site in clients}
    both = [((seed, site.client, site.images), site) for seed, clients in ours.items() for site in clients]
    return [(key[1:], _right(site) - right_of[key]) for key, site in both if key in right_of]


def p_below(differences: Iterable[tuple[tuple[str, str], Floats]]) -> float:
    """The one-sided p of a mean below 0, where each image's sum over the seeds might as well have the other sign.

    A normal approximation, of differences by their list of images.
    """
    sums: dict[tuple[str, str], Floats] = {}
    for images, rows in differences:
        sums[images] = sums.get(images, np.zeros(len(rows))) + rows
    each = np.concatenate(list(sums.values()))
    return 0.5 * erfc(-float(each.sum()) / sqrt(2 * float(each @ each))) if each.any() else 1.0


def holm(values: Sequence[float]) -> list[float]:
    """The p ``values``, corrected for their number (Holm, 1979)."""
    least, corrected = 0.0, [0.0] * len(values)
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        corrected[place] = least = max(least, min(1.0, (len(values) - rank) * values[place]))
    return corrected


def _interval(by_seed: Iterable[Sequence[Outcomes]]) -> tuple[float, float]:
    """Of the mean over clients and seeds, as if all seeds had the same images."""
    sites: dict[tuple[str, str], list[Floats]] = {}
    for site in (site for clients in by_seed for site in clients):
        sites.setdefault((site.client, site.images), []).append(_right(site))
    return mean_interval([(float(np.mean(seeds)), len(seeds[0])) for seeds in sites.values()])


def _right(site: Outcomes) -> Floats:
    return np.equal(site.labels, site.predicted).astype(float)


def figures(clients: Sequence[Outcomes]) -> dict[str, float]:
    """The figures of `Measures` for the outcomes of one test set, one for each client."""
    accuracies = [fmean(a == b for a, b in zip(site.labels, site.predicted, strict=True)) for site in clients]
    sure, right = _pooled(clients)
    names = sorted({name for site in clients for name in site.class_names})
    place = {name: index for index, name in enumerate(names)}
    labels = [place[site.class_names[k]] for site in clients for k in site.labels]
    predicted = [place[site.class_names[k]] for site in clients for k in site.predicted]
    return {
        "accuracy": fmean(accuracies),
        "majority": fmean(largest_share(site.labels) for site in clients),
        "auroc": fmean(areas) if (areas := [site.auroc for site in clients if site.auroc is not None]) else 0.5,
        "ece": calibration_error(sure, right),
        "macro_f1": fmean(macro_f1(site.labels, site.predicted) for site in clients),
        "worst_class": min(class_accuracies(labels, predicted).values()),
        "sd_clients": pstdev(accuracies),
        "worst_client": min(accuracies),
    }


def _pooled(clients: Iterable[Outcomes]) -> tuple[list[float], list[bool]]:
    """The confidences of all clients' answers, and whether each answer is right."""
    sure: list[float] = []
    right: list[bool] = []
    for outcomes in clients:
        sure += outcomes.confidence
        right += (a == b for a, b in zip(outcomes.labels, outcomes.predicted, strict=True))
    return sure, right


def measures_table(rows: Sequence[Measures]) -> list[str]:
    """The lines of the table of `measures_cells` in Markdown."""
    header, lines = measures_cells(rows)
    return markdown_table(header, map(_escaped, lines), text_columns=(0, 1))


def measures_cells(rows: Sequence[Measures]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: percent, means over the seeds; in brackets 95 % intervals over images."""
    header = [
        "method",
        "test set",
        "accuracy",
        "over zero-shot",
        "p below (Holm)",
        "majority",
        "AUROC",
        "ECE",
        "macro-F1",
        "worst class",
        "sd of clients",
        "worst client",
    ]
    lines = [
        [
            row.label,
            row.split,
            _percent(row.accuracy)
            + ("" if row.interval is None else " ({:.1f} to {:.1f})".format(*_points(row.interval))),
            "" if row.over_zero_shot is None else "{:+.1f} ({:+.1f} to {:+.1f})".format(*_points(row.over_zero_shot)),
            "" if row.below is None else f"{row.below:.2g}",
            *(_percent(getattr(row, name)) for name in FIGURES[1:]),
        ]
        for row in rows
    ]
    return header, lines


def _points(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]


def _percent(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):.1f}"
