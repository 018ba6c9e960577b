"""The progress of `promptfed bench`, and its table, fitted to the width of the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from string import ascii_lowercase

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from promptfed.experiments.bench.bench_folder import claim, left, resumed
from promptfed.experiments.bench.results import BenchRun
from promptfed.experiments.bench.runner import Bench, Job, Runner
from promptfed.sdk.output import console, messages, note, say, table
from promptfed.sdk.pace import duration
from promptfed.sdk.result import Accuracy
from promptfed.shared.api.remarks import Reached, falling, movement, near_chance, noise_of, rising

LONG_LABEL, LONG_HEADER = 16, 14  # characters, beyond which a narrow table has an alias
_BORDERS = 3  # columns of the terminal that a cell takes beside its text


def run_shown(bench: Bench, runner: Runner) -> list[BenchRun]:
    """Every run of the bench, with a bar at a terminal and a line for each federation elsewhere."""
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("federations"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    jobs = bench.jobs()
    claim(runner.out, bench)
    resuming = resumed(jobs, runner)
    if resuming is not None:
        note(resuming)
    time_left = _TimeLeft(jobs, runner)
    with Progress(*columns, console=messages, disable=not messages.is_terminal) as progress:
        bar = progress.add_task("", total=None)

        def show(done: int, total: int, job: Job) -> None:
            progress.update(bar, completed=done, total=total, description=escape(job.title))
            if not messages.is_terminal:
                text = f"{done + 1} of {total}: {job.title}"
                note(text + time_left.remark(done))

        return runner.run_all(jobs, show)


class _TimeLeft:
    """The time that the rest takes, computed only now and then, since it reads all finished runs."""

    def __init__(self, jobs: Sequence[Job], runner: Runner) -> None:
        self._jobs, self._runner, self._next = jobs, runner, 0.0

    def remark(self, done: int) -> str:
        """The end of a line of progress: how long this federation and the following ones will take."""
        if done == 0 or time.monotonic() < self._next:
            return ""
        began = time.monotonic()
        _, seconds = left(self._jobs, self._runner)
        self._next = began + max(10.0, 50 * (time.monotonic() - began))
        return "" if not seconds else f" (about {duration(seconds)} left)"


def show_table(header: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> None:
    """The table, in several one below the other where it is wider than ``width``, and a legend of its aliases."""
    parts, legend = fitted(header, lines, width)
    for columns, rows in parts:
        console.print(table(None, columns, rows))
    for line in legend:
        say(line)


def remarks_on(runs: Sequence[BenchRun]) -> list[str]:
    """Remarks on the clients' own test images: on zero-shot by class count and backbone, then on each entry."""
    templates: dict[tuple[int, str], list[float]] = {}
    entries: dict[str, list[BenchRun]] = {}
    best: dict[tuple[int, str], float] = {}  # the mean accuracy of the best run
    for run in runs:
        entries.setdefault(run.label, []).append(run)
        names, backbone = run.spec.get("class_names"), run.spec.get("backbone")
        if isinstance(names, list) and isinstance(backbone, dict):
            known = [row for row in run.last() if row.split == "test" and row.zero_shot is not None]
            key = len(names), str(backbone.get("model"))
            templates.setdefault(key, []).extend(row.zero_shot or 0.0 for row in known)
            best[key] = max(best.get(key, 0.0), fmean(row.accuracy for row in known) if known else 0.0)
    chance = [near_chance(fmean(values), *key, best.get(key, 0.0)) for key, values in templates.items() if values]
    return [*chain.from_iterable(chance), *chain.from_iterable(map(_of_entry, entries.values()))]


def _of_entry(runs: Sequence[BenchRun]) -> list[str]:
    """Remarks on an entry by the mean over its runs (seeds and trials), as far as these know: they keep no losses."""
    training = runs[0].spec.get("training")
    rate = training.get("learning_rate") if isinstance(training, dict) else None
    if not isinstance(rate, float):
        return []
    own = [(run, row) for run in runs for row in run.accuracies if row.role == "trainer" and row.split == "test"]
    last: dict[str, list[Accuracy]] = {}
    by_round: dict[int, list[float]] = {}
    for run, row in own:
        by_round.setdefault(row.round, []).append(row.accuracy)
        if row.round == run.rounds and row.zero_shot is not None:
            last.setdefault(row.client, []).append(row)
    if not last:
        return []
    sites = {
        client: Reached(
            fmean(row.accuracy for row in rows),
            fmean(row.zero_shot or 0.0 for row in rows),
            sum(row.num_samples for row in rows),
        )
        for client, rows in last.items()
    }
    gain = fmean(site.accuracy - (site.zero_shot or 0.0) for site in sites.values())
    means = {round: fmean(values) for round, values in by_round.items()}
    noise = noise_of(
        fmean(site.zero_shot or 0.0 for site in sites.values()), sum(site.images for site in sites.values())
    )
    said = [*movement(gain, [], rate, runs[0].rounds, noise), *falling(sites, rate), *rising(means, noise)]
    return [f"{runs[0].label}: {remark}" for remark in said]


Part = tuple[list[str], list[list[str]]]


def fitted(header: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> tuple[list[Part], list[str]]:
    """The table in parts of at most ``width`` characters, each with the rows' names, and a legend of aliases.

    Long names become letters, long headers numbered ones, and only where the table as it is does not fit.
    """
    whole = list(header), [list(line) for line in lines]
    if _width(*whole) <= width:
        return [whole], []
    names = {line[0]: letters(number) for number, line in enumerate(lines) if len(line[0]) > LONG_LABEL}
    titles = {title: f"c{number}" for number, title in enumerate(header) if len(title) > LONG_HEADER}
    short = [titles.get(title, title) for title in header]
    rows = [[names.get(line[0], line[0]), *line[1:]] for line in lines]
    parts: list[Part] = []
    columns: list[int] = []
    for column in range(1, len(short)):
        if columns and _width(*_chosen(short, rows, [0, *columns, column])) > width:
            parts.append(_chosen(short, rows, [0, *columns]))
            columns = []
        columns.append(column)
    parts.append(_chosen(short, rows, [0, *columns]))
    return parts, [f"{alias} = {name}" for name, alias in {**titles, **names}.items()]


def letters(number: int) -> str:
    """``a`` to ``z``, then ``aa`` and so on."""
    rest, last = divmod(number, len(ascii_lowercase))
    return (letters(rest - 1) if rest else "") + ascii_lowercase[last]


def _chosen(header: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int]) -> Part:
    return [header[column] for column in columns], [[row[column] for column in columns] for row in rows]


def _width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return 1 + sum(max(len(row[k]) for row in [header, *rows]) + _BORDERS for k in range(len(header)))
