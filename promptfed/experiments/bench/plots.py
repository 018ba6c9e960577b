"""Plots of a bench for a paper: accuracy by round, and few-shot curves (``promptfed[plots]``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from promptfed.experiments.bench.protocols import FewShot
from promptfed.experiments.bench.runner import Bench, BenchRun
from promptfed.experiments.bench.tables import TableRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can tell apart; line styles help in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A00")
STYLES = ("-", "--", "-.", ":")
GREY = "#6E6E6E"


def draw(bench: Bench, rows: Sequence[TableRow], runs: Sequence[BenchRun], out: Path) -> list[Path]:
    """Write the plots of the bench into ``out`` as PNG and PDF; return the paths of the PNG files.

    Accuracy by round needs evaluations between the first and the last round (``evaluation.every``). It is the mean over
    all trainers' own test images; evaluators have a plot of their own.

    Raises:
        ModuleNotFoundError: there is something to draw, and matplotlib is not installed.
    """
    figures: dict[str, Figure] = {}
    if isinstance(bench.protocol, FewShot):
        figures["few-shot"] = _few_shot(bench, rows)
    for role in ("trainer", "evaluator"):
        curves = _by_round(bench, runs, role)
        if any(len(points) > 2 for points in curves.values()):
            figures[f"rounds-{role}s"] = _rounds(curves, role)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=200, bbox_inches="tight")
        figure.savefig(out / f"{name}.pdf", bbox_inches="tight", metadata={"CreationDate": None})
    return [out / f"{name}.png" for name in figures]


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(4.5, 3.2))
        axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def look(number: int) -> tuple[str, str]:
    """Colour and line style of the entry ``number``: twenty entries differ."""
    return COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]


def _zero_shot(axes: Axes, rows: Sequence[TableRow], values: Sequence[float]) -> None:
    """Lines of the zero-shot rows at these percentages, with dots farther apart for every further one."""
    for number, (row, value) in enumerate(zip(rows, values, strict=True)):
        axes.axhline(value, color=GREY, linestyle=(0, (1, 1 + 2 * number)), label=row.label)


def _few_shot(bench: Bench, rows: Sequence[TableRow]) -> Figure:
    figure, axes = _axes("training images of each class", "accuracy (%)")
    columns, places = bench.columns, range(len(bench.columns))
    whole = [row for row in rows if all(column in scores for scores in row.scores for column in columns)]  # no paper's
    for number, row in enumerate(row for row in whole if not row.is_zero_shot):
        means = [100 * row.mean(column) for column in columns]
        spread = [100 * (row.sd(column) or 0.0) for column in columns]
        colour, style = look(number)
        axes.errorbar(
            places, means, spread, label=row.label, color=colour, linestyle=style, marker="o", ms=3, capsize=2
        )
    templates = [row for row in whole if row.is_zero_shot]
    _zero_shot(axes, templates, [100 * row.mean(columns[0]) for row in templates])
    axes.set_xticks(list(places), [column.split()[0] for column in columns])
    axes.legend(frameon=False, fontsize=7)
    return figure


def _by_round(bench: Bench, runs: Sequence[BenchRun], role: str) -> dict[str, dict[int, list[float]]]:
    """Mean accuracies on the split ``test`` (percent) of each entry by round, one for each seed and trial."""
    curves: dict[str, dict[int, list[float]]] = {entry.label: {} for entry in bench.entries}
    for run in runs:
        measured = [accuracy for accuracy in run.accuracies if accuracy.role == role and accuracy.split == "test"]
        for number in sorted({accuracy.round for accuracy in measured}):
            mean = fmean(100 * accuracy.accuracy for accuracy in measured if accuracy.round == number)
            curves[run.label].setdefault(number, []).append(mean)
    return {label: points for label, points in curves.items() if points}


def _rounds(curves: Mapping[str, Mapping[int, Sequence[float]]], role: str) -> Figure:
    """Accuracy over rounds: the mean, and its deviation over seeds and trials."""
    from matplotlib.ticker import MaxNLocator

    whose = "clients' own test images" if role == "trainer" else "unseen domains"
    figure, axes = _axes("round", f"accuracy (%), {whose}")
    for number, (label, points) in enumerate(curves.items()):
        colour, style = look(number)
        rounds = sorted(points)
        means, spread = [fmean(points[k]) for k in rounds], [pstdev(points[k]) for k in rounds]
        axes.plot(rounds, means, label=label, color=colour, linestyle=style)
        low, high = ([mean + sign * sd for mean, sd in zip(means, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=7)
    return figure
