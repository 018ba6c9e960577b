"""Learning rates chosen on held-out training images: for the entries of a bench, or for a run file (`tune`).

Every entry gets the same grid of rates, and no test image is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from pydantic import BaseModel

from promptfed.experiments.bench.entries import BenchEntry
from promptfed.experiments.bench.results import BenchRun
from promptfed.experiments.bench.runner import Bench
from promptfed.experiments.bench.tables import markdown_table, scores_of
from promptfed.experiments.protocols.setting import with_options
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime import run_file
from promptfed.runtime.services import Site
from promptfed.sdk.backbone import open_backbone, resolve
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.plain_text import markdown_cell
from promptfed.shared.spec.spec import AllowedBackbones, merged

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


@dataclass(frozen=True)
class Tuned:
    """Accuracies on held-out images by rate (fractions, mean over trainers and seeds), the template's, and the choice.

    ``at_edge``: the chosen rate is the smallest or the largest that was tried, so a better one may lie outside.
    """

    by_rate: dict[float, float]
    zero_shot: float | None
    chosen: float
    at_edge: bool


def held_out_sites(sites: Sequence[Site], share: float) -> list[Site]:
    """The trainers, each tested on a share of its own training images. No test image is used."""
    trainers = [site for site in sites if site.role == "trainer"]
    return [replace(site, data=with_options(site.data, {"validation": share}), tests={}) for site in trainers]


def tune(
    run: run_file.RunFile,
    grid: Grid,
    *,
    pool: int = 1,
    device: str = "cpu",
    allow_backbone: AllowedBackbones = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Tuned:
    """The rate of ``grid`` with the highest accuracy on held-out training images, or the lowest of equals.

    ``progress`` receives how many federations are done, how many there are, and the next one in words.

    Raises:
        CommandError: the run cannot be simulated, or all rates have the same accuracy.
    """
    sites, sources = held_out_sites(run.sites, grid.share), SharedSources()
    spec = resolve(run.spec)
    backbone = open_backbone(spec.backbone, allow_backbone=allow_backbone, device=device)
    jobs = [(rate, seed) for rate in grid.rates for seed in grid.seeds]
    accuracies: dict[float, list[float]] = {rate: [] for rate in grid.rates}
    templates: list[float] = []
    with TemporaryDirectory(prefix="promptfed-tune-") as features:
        for done, (rate, seed) in enumerate(jobs):
            progress(done, len(jobs), f"rate {rate:g}, seed {seed}")
            changes = {"training": {"learning_rate": rate}, "evaluation": {"every": spec.rounds}}
            try:
                result = simulate(
                    merged(dict(run.spec), changes) | {"seed": seed},
                    sites,
                    pool=pool,
                    backbone=backbone,
                    features=Path(features),
                    sources=sources,
                )
            except CommandError as error:
                if not _has_diverged(error):
                    raise
                accuracies[rate].append(0.0)  # the coordinator refused the updates of this rate: it loses
                continue
            own = [row for row in result.final() if row.split == "test"]
            accuracies[rate].append(fmean(row.accuracy for row in own))
            templates += [row.zero_shot for row in own if row.zero_shot is not None]
    by_rate = {rate: fmean(values) for rate, values in accuracies.items()}
    if len(set(by_rate.values())) == 1 and len(by_rate) > 1:
        raise CommandError("every rate has the same accuracy: the method trains nothing that shows", Exit.BAD_INPUT)
    best, edge = best_rate(by_rate)
    return Tuned(by_rate, fmean(templates) if templates else None, best, edge)


def _has_diverged(error: CommandError) -> bool:
    """Whether the federation ended because a change was too long or the state grew without bound."""
    ended = error.exit is Exit.FEDERATION_ENDED_BADLY
    return ended and ("norm-too-large" in str(error) or "grown: " in str(error))
