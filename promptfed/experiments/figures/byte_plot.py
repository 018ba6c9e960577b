"""Accuracy over the bytes of a round: one point for each row, with its name at a free place beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from promptfed.sdk.text import size

GREY = "#6E6E6E"
REACH = 9  # how many steps from its point a name may stand, before it is written over others
STEP = 5.0  # typographic points
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))


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
