"""Names beside points: each is written once, near its point, and none over another."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from promptfed.experiments.bench.plots import Point, name_points, scatter


def written(points: list[Point], zero_shot: float | None = None) -> tuple[Figure, list[tuple[str, Bbox]]]:
    figure = Figure(figsize=(5, 4))
    axes = figure.add_subplot()
    scatter(axes, points, zero_shot)
    name_points(figure, axes, points)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [text for text in axes.texts if isinstance(text, Annotation)]
    return figure, [(text.get_text(), Text.get_window_extent(text, renderer)) for text in texts]


def test_names_of_points_that_lie_close_do_not_cover_each_other() -> None:
    points = [Point(f"method {number}", 1000 * 1.05**number, 50 + 0.3 * (number % 3)) for number in range(12)]
    _, found = written(points)
    assert sorted(name for name, _ in found) == sorted(point.label for point in points)
    boxes = [box for _, box in found]
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])


def test_a_name_without_any_room_is_written_all_the_same() -> None:
    long = "a name that is longer than the whole picture is wide, " * 3
    _, found = written([Point(long, 1000, 50), Point("b", 2000, 50)])
    assert {name for name, _ in found} == {long, "b"}


def test_the_axis_is_logarithmic_tells_bytes_and_has_room_for_all() -> None:
    figure, found = written([Point("small", 300, 40, sd=2), Point("large", 6.6e6, 60)], zero_shot=35)
    [axes] = figure.axes
    low, high = axes.get_xlim()
    assert low < 300
    assert high > 6.6e6
    assert axes.get_xscale() == "log"
    assert axes.xaxis.get_major_formatter()(1000.0) == "1.0 kB"
    lines = [line.get_ydata() for line in axes.lines]
    assert any(list(y) == pytest.approx([35, 35]) for y in lines), "zero-shot is a line"
    assert "zero-shot" in {name for name, _ in found}
