"""The folder of a bench: which federations are finished, and learning rates chosen on held-out training images."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from promptfed.experiments.bench.entries import BenchEntry
from promptfed.experiments.bench.runner import Bench, BenchRun, Job, JsonObject, Runner, read_run
from promptfed.experiments.bench.tables import TableRow, markdown_table, scores_of
from promptfed.sdk.client import CommandError, Exit
from promptfed.sdk.progress import duration
from promptfed.shared.files import write_whole
from promptfed.shared.plain_text import markdown_cell
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import merged

BENCH_FILE, RESULTS_FILE = "bench.json", "results.json"
GROWS = ("targets",)  # fields of a setting that may grow later, as methods and seeds may


def identity(bench: Bench) -> JsonObject:
    """The settings that must be the same for all runs of a folder, so that one table can compare them."""
    setting = {name: value for name, value in asdict(bench.setting).items() if name not in GROWS}
    spec = {"spec": dict(bench.base), "m": bench.m, "steps": bench.steps}
    plain: JsonObject = json.loads(json.dumps({"protocol": bench.protocol.name, "setting": setting} | spec))
    return plain


def claim(out: Path, bench: Bench) -> None:
    """Make ``out`` the bench's folder.

    Raises:
        CommandError: it belongs to another bench, with the differences, or cannot be written.
    """
    own, there = identity(bench), _identity_in(out)
    if there is not None:
        differs = [name for name in there if there[name] != own[name]]
        if differs:
            what = "; ".join(f"{name} was {_short(there[name])}, is {_short(own[name])}" for name in differs)
            text = f"{out} holds another bench ({what}): give --out another folder, or run that one again"
            raise CommandError(text, Exit.BAD_INPUT)
    text = json.dumps(own, indent=1, ensure_ascii=False)
    try:  # whole, since another bench may begin in this folder at the same time, or this one be killed
        (out / "runs").mkdir(parents=True, exist_ok=True)
        write_whole(out / BENCH_FILE, (text + "\n").encode(), synced=False)
    except OSError as error:
        raise CommandError(f"cannot write {out / BENCH_FILE}: {why(error)}", Exit.BAD_INPUT) from None


def _identity_in(out: Path) -> JsonObject | None:
    """The identity of the folder's bench; None for a new folder."""
    for name in (BENCH_FILE, RESULTS_FILE):
        path = out / name
        if not path.exists():
            continue
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            if name == BENCH_FILE:
                return {key: said[key] for key in ("protocol", "setting", "spec", "m", "steps")}
            return {"protocol": said["protocol"]}  # of a version that kept no more
        except (OSError, ValueError, KeyError, TypeError):
            raise CommandError(f"{path} cannot be read: give --out another folder", Exit.BAD_INPUT) from None
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."


def left(jobs: Sequence[Job], runner: Runner) -> tuple[list[Job], float | None]:
    """The unfinished jobs, and an estimate of their seconds from the finished ones (None without any)."""
    seconds: dict[str, list[float]] = {}
    open_jobs = []
    for job in jobs:
        path = runner.path(job)
        if path.exists():
            run = read_run(path)
            seconds.setdefault(job.entry.label, []).append(run.wall_seconds + run.setup_seconds)
        else:
            open_jobs.append(job)
    everybody = [value for values in seconds.values() for value in values]
    if not everybody:
        return open_jobs, None
    return open_jobs, sum(fmean(seconds.get(job.entry.label, everybody)) for job in open_jobs)


def resumed(jobs: Sequence[Job], runner: Runner) -> str | None:
    """A sentence about finished jobs and the time for the rest; None if no job is finished."""
    rest, seconds = left(jobs, runner)
    if seconds is None:
        return None
    done = f"{len(jobs) - len(rest)} of {len(jobs)} federations are done in {runner.out}"
    return f"{done}; the other {len(rest)} will take about {duration(seconds)}" if rest else f"{done}: all of them"


def results_csv(rows: Sequence[TableRow], seeds: Sequence[int]) -> bytes:
    """The table as CSV, one accuracy (fraction) in each line. Rows of papers have no seed."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "seed", "column", "accuracy"])
    for row in rows:
        numbers: Sequence[int | str] = seeds if len(row.scores) == len(seeds) else [""] * len(row.scores)
        for seed, scores in zip(numbers, row.scores, strict=True):
            writer.writerows([row.label, seed, column, repr(value)] for column, value in scores.items())
    return text.getvalue().encode()


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
