"""Learning rates chosen on held-out training images for the entries of a bench.

Every entry gets the same grid of rates, and no test image is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pydantic import BaseModel

from promptfed.experiments.bench.entries import BenchEntry
from promptfed.experiments.bench.results import BenchRun
from promptfed.experiments.bench.runner import Bench
from promptfed.experiments.bench.tables import markdown_table, scores_of
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.plain_text import markdown_cell
from promptfed.shared.spec.spec import merged

SHARE = 0.25  # of the training images that are held out, unless told otherwise
DECIDES = {
    "base-to-novel": "harmonic mean",
    "leave-one-domain-out": "clients",  # the target stays unseen
    "personalisation": "mean",
    "cross-dataset": "source",
    "combined:base-to-novel": "CM",
}
"""The column that decides, by protocol."""


class Swept(BaseModel):
    """An entry's accuracy on held-out images by rate (fraction, mean over the sweep's seeds), and the chosen rate.

    ``at_edge``: the chosen rate is the smallest or the largest of the grid, so a better one may lie outside.
    """

    label: str
    column: str
    by_rate: dict[float, float]
    chosen: float
    at_edge: bool


@dataclass(frozen=True)
class Grid:
    """The learning rates, the same for all entries, and the seeds and share of held-out images that choose one."""

    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    share: float = SHARE


def rates_of(text: str, option: str = "--sweep") -> tuple[float, ...]:
    """The rates of a text such as ``0.001,0.01`` in ascending order.

    Raises:
        CommandError: the text does not hold different rates above 0.
    """
    try:
        rates = tuple(sorted(float(part) for part in text.split(",")))
    except ValueError:
        rates = ()
    if not rates or len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
        raise CommandError(f"{option} {text!r}: write different rates above 0 separated by commas", Exit.BAD_INPUT)
    return rates


def choosing(bench: Bench, grid: Grid) -> Bench:
    """The bench that chooses the rates: every entry at every rate, on held-out training images.

    Raises:
        CommandError: the protocol has no column that decides, or an entry sets its rate itself.
    """
    if bench.protocol.name not in DECIDES:
        raise CommandError(f"--sweep is for {', '.join(DECIDES)}, not for {bench.protocol.name}", Exit.BAD_INPUT)
    for entry in bench.entries:
        if "learning_rate" in entry.changes.get("training", {}):
            text = f"{entry.label} names its rate, which --sweep is to choose: leave it out"
            raise CommandError(text, Exit.BAD_INPUT)
    entries = [_at(entry, rate, _label(entry, rate)) for entry in bench.entries for rate in grid.rates]
    setting = replace(bench.setting, validation=grid.share)
    return replace(bench, entries=entries, setting=setting, seeds=grid.seeds)


def _label(entry: BenchEntry, rate: float) -> str:
    return f"{entry.label}, rate {rate:g}"


def _at(entry: BenchEntry, rate: float, label: str) -> BenchEntry:
    return BenchEntry(label, entry.method, merged(entry.changes, {"training": {"learning_rate": rate}}))


def sweep(bench: Bench, grid: Grid, run: Callable[[Bench], list[BenchRun]]) -> tuple[Bench, list[Swept]]:
    """``bench`` with every entry at its best rate, and how it was chosen; ``run`` runs the choosing bench.

    Raises:
        CommandError: as `choosing`, or raised by ``run``.
    """
    trial = choosing(bench, grid)
    runs, column = run(trial), DECIDES[bench.protocol.name]
    entries, rows = [], []
    for entry in bench.entries:
        by_rate = {rate: _score(trial, runs, _label(entry, rate), column) for rate in grid.rates}
        best, edge = best_rate(by_rate)
        rows.append(Swept(label=entry.label, column=column, by_rate=by_rate, chosen=best, at_edge=edge))
        entries.append(_at(entry, best, entry.label))
    return replace(bench, entries=entries), rows


def best_rate(by_rate: Mapping[float, float]) -> tuple[float, bool]:
    """The rate with the highest accuracy, or the lowest of equals, and whether it is at an edge of several rates."""
    best = max(by_rate, key=lambda rate: (by_rate[rate], -rate))
    return best, len(by_rate) > 1 and best in (min(by_rate), max(by_rate))


def _score(bench: Bench, runs: Sequence[BenchRun], label: str, column: str) -> float:
    values = []
    for seed in bench.seeds:
        own = [run for run in runs if run.label == label and run.seed == seed]
        values.append(scores_of(bench.protocol, own)[0][""][column])
    return fmean(values)


def sweep_table(rows: Sequence[Swept]) -> list[str]:
    """The lines of the table in Markdown: percent, with the chosen rate in bold."""
    lines = []
    for row in rows:
        cells = {rate: f"{100 * value:.1f}" for rate, value in row.by_rate.items()}
        cells[row.chosen] = f"**{cells[row.chosen]}**" + (" !" if row.at_edge else "")
        lines.append([markdown_cell(row.label), *cells.values()])
    return [
        f"Rates, chosen by `{rows[0].column}` on held-out training images; ! marks the best at an edge of the grid.",
        "",
        *markdown_table(["method", *(f"{rate:g}" for rate in rows[0].by_rate)], lines),
    ]
