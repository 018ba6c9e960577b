"""Plots of a bench for a paper: accuracy by round and by cost, few-shot curves, and accuracy by client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from promptfed.experiments.bench.protocols import FewShot, Personalisation, headline
from promptfed.experiments.bench.runner import Bench, BenchRun
from promptfed.experiments.bench.tables import Measures, TableRow, measures_of
from promptfed.sdk.output import size

# Okabe and Ito's colours, which people with any colour vision can tell apart; the line styles help in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A00")
STYLES = ("-", "--", "-.", ":")
GREY = "#6E6E6E"
REACH = 9  # how many steps from its point a name may stand, before it is written over others
STEP = 5.0  # typographic points
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
BY_ROUND: tuple[str, Mapping[str, float]] = ("round", {})
# Costs of a client and round, by the name of the plot: what the axis says, and how much of it is one unit.
COSTS = {"bytes": ("kB up and down for each client", 1000.0), "seconds": ("seconds of training for each client", 1.0)}


def draw(bench: Bench, rows: Sequence[TableRow], runs: Sequence[BenchRun], out: Path) -> list[Path]:
    """Write the plots of the bench into ``out`` as PNG and PDF; return the paths of the PNG files.

    Accuracy by round needs evaluations between the first and the last round (``evaluation.every``). It is the mean over
    all trainers' own test images; evaluators have a plot of their own.
    """
    figures: dict[str, Figure] = {}
    if isinstance(bench.protocol, FewShot):
        figures["few-shot"] = _few_shot(bench, rows)
    if isinstance(bench.protocol, Personalisation):
        figures["clients"] = _clients(bench, runs)
    points = points_of(rows)
    if len(points) > 1:
        figures["accuracy-over-bytes"] = _over_bytes(rows, points)
    measured = measures_of(runs)
    for split in dict.fromkeys(row.split for row in measured):
        figures[f"reliability-{split}"] = _reliability([row for row in measured if row.split == split])
    for role in ("trainer", "evaluator"):
        curves = _by_round(bench, runs, role)
        if any(len(points) > 2 for points in curves.values()):
            figures[f"rounds-{role}s"] = _rounds(curves, role, *BY_ROUND)
            for cost, (label, unit) in COSTS.items():
                prices = _prices(runs, cost, unit)
                if any(prices.values()):
                    figures[f"{cost}-{role}s"] = _rounds(curves, role, label, prices, log=True)
    paths = []
    for name, figure in figures.items():
        for kind in ("png", "pdf"):
            path = out / f"{name}.{kind}"
            figure.savefig(
                path, dpi=200, bbox_inches="tight", metadata={"CreationDate": None} if kind == "pdf" else None
            )
            paths.append(path)
    return [path for path in paths if path.suffix == ".png"]


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(4.5, 3.2))
        axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _few_shot(bench: Bench, rows: Sequence[TableRow]) -> Figure:
    figure, axes = _axes("training images of each class", "accuracy (%)")
    columns = bench.columns
    places = range(len(columns))
    rows = [
        row for row in rows if all(column in scores for scores in row.scores for column in columns)
    ]  # a paper's not
    for number, row in enumerate(row for row in rows if not row.is_zero_shot):
        means = [100 * row.mean(column) for column in columns]
        spread = [100 * (row.sd(column) or 0.0) for column in columns]
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
        axes.errorbar(
            places, means, spread, label=row.label, color=colour, linestyle=style, marker="o", ms=3, capsize=2
        )
    for number, row in enumerate(row for row in rows if row.is_zero_shot):
        apart = (0, (1, 1 + 2 * number))  # dots, farther apart for every further one
        axes.axhline(100 * row.mean(columns[0]), color=GREY, linestyle=apart, label=row.label)
    axes.set_xticks(list(places), [column.split()[0] for column in columns])
    axes.legend(frameon=False, fontsize=7)
    return figure


def points_of(rows: Sequence[TableRow]) -> list[Point]:
    """A point for each row that has a headline number and sends bytes."""
    points: list[Point] = []
    for row in rows:
        spent = 0.0 if row.costs is None else row.costs["bytes_up"] + row.costs["bytes_down"]
        if spent and {"mean", "harmonic mean"} & set(row.scores[0]):
            values = [100 * headline(scores) for scores in row.scores]
            colour = COLOURS[len(points) % len(COLOURS)]
            points.append(Point(row.label, spent, fmean(values), pstdev(values), colour))
    return points


def _over_bytes(rows: Sequence[TableRow], points: Sequence[Point]) -> Figure:
    """Each row's headline number over the bytes of a round, with the first zero-shot row as a line."""
    figure, axes = _axes("", "accuracy (%)")
    template = next((row for row in rows if row.is_zero_shot), None)
    scatter(axes, points, None if template is None else 100 * fmean(map(headline, template.scores)))
    name_points(figure, axes, points)
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


def _prices(runs: Sequence[BenchRun], cost: str, unit: float) -> dict[str, float]:
    """The cost of a client and round by entry, in units: the mean over seeds and trials."""
    spent: dict[str, list[float]] = {}
    for run in runs:
        each = run.costs["bytes_up"] + run.costs["bytes_down"] if cost == "bytes" else run.costs["seconds"]
        spent.setdefault(run.label, []).append(each / unit)
    return {label: fmean(values) for label, values in spent.items()}


def _rounds(
    curves: Mapping[str, Mapping[int, Sequence[float]]],
    role: str,
    x: str,
    scale: Mapping[str, float],
    log: bool = False,
) -> Figure:
    """Accuracy over rounds, or over their cost: ``scale`` is the cost of a round by entry, 1 by default.

    On a logarithmic axis a curve starts at its first round, since the evaluation before it has cost nothing. Entries
    whose rounds cost nothing are left out.
    """
    whose = "clients' own test images" if role == "trainer" else "unseen domains"
    figure, axes = _axes(x, f"accuracy (%), {whose}")
    for number, (label, points) in enumerate(curves.items()):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
        price = scale.get(label, 1.0)
        rounds = [k for k in sorted(points) if not log or k * price > 0]
        if not rounds:
            continue
        places, means = [k * price for k in rounds], [fmean(points[k]) for k in rounds]
        axes.plot(places, means, label=label, color=colour, linestyle=style, marker="o" if log else None, ms=2)
        spread = [pstdev(points[k]) for k in rounds]
        low, high = ([mean + sign * sd for mean, sd in zip(means, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    if log:
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=7)
    return figure


def _reliability(rows: Sequence[Measures]) -> Figure:
    """Accuracy over confidence, one line for each row and one point for each bin with images."""
    figure, axes = _axes("confidence", "accuracy")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    for number, row in enumerate(rows):
        points = [(confidence, right) for _, _, count, confidence, right in row.reliability if count]
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, label=row.label, color=colour, linestyle=style, marker="o", ms=2.5, linewidth=1)
    axes.legend(frameon=False, fontsize=6)
    return figure


def _clients(bench: Bench, runs: Sequence[BenchRun]) -> Figure:
    """One dot for each client and seed in a column for each entry; a bar marks the mean."""
    figure, axes = _axes("", "accuracy (%) of each client")
    for place, entry in enumerate(bench.entries):
        values = [
            100 * accuracy.accuracy
            for run in runs
            if run.label == entry.label
            for accuracy in run.last()
            if accuracy.split == "test" and accuracy.role == "trainer"
        ]
        spread = [place + 0.25 * ((index * 0.618) % 1 - 0.5) for index in range(len(values))]  # so that dots stay apart
        axes.scatter(spread, values, s=8, alpha=0.6, color=COLOURS[place % len(COLOURS)], linewidths=0)
        axes.hlines(fmean(values), place - 0.3, place + 0.3, color=COLOURS[place % len(COLOURS)])
    labels = [entry.label for entry in bench.entries]
    axes.set_xticks(range(len(labels)), labels, rotation=20, ha="right", fontsize=7)
    return figure


@dataclass(frozen=True)
class Point:
    """A row: bytes of a client and round (both directions), accuracy and its standard deviation in percent."""

    label: str
    bytes: float
    accuracy: float
    sd: float = 0.0
    colour: str = GREY
    marker: str = "o"


def scatter(axes: Axes, points: Sequence[Point], zero_shot: float | None = None, font_size: float = 7) -> None:
    """Draw the points on a logarithmic axis of bytes, and zero-shot (percent), which sends no bytes, as a line.

    Call `name_points` after the figure's size and all axes are final.
    """
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axes.set_xlabel("bytes of a client in a round, up and down")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if zero_shot is not None:
        axes.axhline(zero_shot, color=GREY, linestyle=":", linewidth=1)
        axes.annotate(
            "zero-shot", (1, zero_shot), (-1, 2), ("axes fraction", "data"), "offset points",
            ha="right", fontsize=font_size, color=GREY,
        )  # fmt: skip
    for point in points:
        axes.errorbar(
            [point.bytes], [point.accuracy], [point.sd],
            color=point.colour, marker=point.marker, ms=4, linewidth=0.7, alpha=0.9,
        )  # fmt: skip
    if points:
        axes.set_xlim(0.5 * min(point.bytes for point in points), 4 * max(point.bytes for point in points))


def name_points(figure: Figure, axes: Axes, points: Sequence[Point], font_size: float = 7) -> None:
    """Write each point's name at the nearest place where it covers no other name or point."""
    FigureCanvasAgg(figure)  # which measures text
    pixels = figure.dpi / 72  # of a typographic point
    inside = axes.get_window_extent()
    places = [axes.transData.transform((point.bytes, point.accuracy)) for point in points]
    taken = [Bbox.from_bounds(x - 3 * pixels, y - 3 * pixels, 6 * pixels, 6 * pixels) for x, y in places]
    for point, (x, y) in zip(points, places, strict=True):
        probe = axes.text(0, 0, point.label, fontsize=font_size)
        shape = probe.get_window_extent()
        probe.remove()
        free = (
            (offset, box)
            for offset in _offsets()
            if _within(box := _box(x, y, shape, offset, pixels), inside) and not any(map(box.overlaps, taken))
        )
        (dx, dy), box = next(free, ((STEP, 0.0), _box(x, y, shape, (STEP, 0.0), pixels)))
        line = {"arrowstyle": "-", "color": point.colour, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            point.label, (point.bytes, point.accuracy), (dx, dy), textcoords="offset points",
            ha=_side(dx), va="center", fontsize=font_size, color=point.colour,
            arrowprops=line if max(abs(dx), abs(dy)) > 2 * STEP else None,
        )  # fmt: skip
        taken.append(box)


def _offsets() -> Iterator[tuple[float, float]]:
    """Offsets of a name from its point in typographic points (1/72 inch), the nearest first."""
    for step in range(1, REACH + 1):
        for x, y in SIDES:
            yield x * STEP * step, y * STEP * step


def _side(dx: float) -> str:
    """The horizontal alignment of a name at this offset."""
    return "left" if dx > 0 else "right" if dx < 0 else "center"


def _box(x: float, y: float, shape: Bbox, offset: tuple[float, float], pixels: float) -> Bbox:
    """The box of a name in pixels."""
    dx, dy = (pixels * part for part in offset)
    left = {"left": 0.0, "right": -shape.width, "center": -shape.width / 2}[_side(dx)]
    return Bbox.from_bounds(x + dx + left, y + dy - shape.height / 2, shape.width, shape.height)


def _within(box: Bbox, outer: Bbox) -> bool:
    return bool(outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0 and box.y1 <= outer.y1)


DRAWS = 10_000
Floats = NDArray[np.float64]


def paired_bootstrap(differences: Sequence[Floats], seed: int = 0, draws: int = DRAWS) -> tuple[float, float, float]:
    """The 95 % interval and the two-sided p-value of the mean difference of pairs.

    ``differences`` has one array for each list of pictures: ``(N,)``, or ``(seeds, N)`` if several seeds share the
    list. Pictures are resampled within their list, with all their seeds, so every draw has the same number of pictures
    of each list. p = 2·min(P(d ≤ 0), P(d ≥ 0)), each as (count + 1)/(draws + 1), at most 1.
    """
    lists = [np.atleast_2d(rows) for rows in differences]
    rng = np.random.default_rng(seed)
    sums = np.zeros(draws)
    for rows in (each.sum(axis=0) for each in lists):
        for start in range(0, draws, 500):
            size = min(500, draws - start)
            sums[start : start + size] += rows[rng.integers(len(rows), size=(size, len(rows)))].sum(axis=1)
    means = sums / sum(each.size for each in lists)
    low, high = (float(value) for value in np.quantile(means, [0.025, 0.975]))
    tails = [(int(count) + 1) / (draws + 1) for count in ((means <= 0).sum(), (means >= 0).sum())]
    return low, high, min(1.0, 2 * min(tails))
