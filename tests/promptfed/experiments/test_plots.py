"""Plots: which there are for which bench, and that they show the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from promptfed.experiments.bench import plots
from promptfed.experiments.bench.entries import parse_entries
from promptfed.experiments.bench.plots import draw
from promptfed.experiments.bench.protocols import PROTOCOLS, Setting
from promptfed.experiments.bench.runner import Bench, BenchRun
from promptfed.experiments.bench.tables import TableRow, rows_of
from tests.promptfed.experiments.test_runner import accuracy, run_of


def bench(protocol: str, **setting: Any) -> Bench:
    return Bench(PROTOCOLS[protocol], parse_entries("promptfl,coop"), Setting(("digits",), **setting), (0,))


def results(rounds: tuple[int, ...] = (0, 1, 2)) -> list[BenchRun]:
    return [
        run_of(*(accuracy("test", base + 0.1 * round, 0.2, round) for round in rounds), label=label)
        for label, base in (("promptfl", 0.3), ("coop", 0.5))
    ]


def filled(path: Path) -> bool:
    """Whether the picture holds something besides its background."""
    return len(np.unique(np.asarray(Image.open(path).convert("L")))) > 10


def test_personalisation_gets_its_clients_and_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[list[float], list[float]]] = []
    plot = Axes.plot

    def watched(self: Axes, x: Any, y: Any, **options: Any) -> Any:
        drawn.append((list(x), list(y)))
        return plot(self, x, y, **options)

    monkeypatch.setattr(Axes, "plot", watched)
    described = bench("personalisation")
    found = results()
    paths = draw(described, rows_of(described, found), found, tmp_path)
    assert {path.name for path in paths} == {
        "clients.png",
        "accuracy-over-bytes.png",
        *(f"{x}-trainers.png" for x in ("rounds", "bytes", "seconds")),
    }
    assert all(filled(path) and path.with_suffix(".pdf").stat().st_size > 1000 for path in paths)
    assert drawn[:2] == [([0, 1, 2], pytest.approx([30, 40, 50])), ([0, 1, 2], pytest.approx([50, 60, 70]))]
    costs = found[0].costs
    each = (costs["bytes_up"] + costs["bytes_down"]) / 1000
    assert drawn[2] == (pytest.approx([each, 2 * each]), pytest.approx([40, 50])), "before the first, nothing was spent"
    assert drawn[4] == (pytest.approx([costs["seconds"], 2 * costs["seconds"]]), pytest.approx([40, 50]))


def test_what_costs_nothing_has_no_place_on_a_cost_axis(tmp_path: Path) -> None:
    described = bench("personalisation")
    free = [run.model_copy(update={"costs": dict.fromkeys(run.costs, 0.0)}) for run in results()]
    names = {path.name for path in draw(described, rows_of(described, free), free, tmp_path)}
    assert names == {"clients.png", "rounds-trainers.png"}


def test_two_evaluations_are_no_curve(tmp_path: Path) -> None:
    described = bench("personalisation")
    found = results(rounds=(0, 2))
    names = [path.name for path in draw(described, rows_of(described, found), found, tmp_path)]
    assert names == ["clients.png", "accuracy-over-bytes.png"]


def test_few_shot_curves(tmp_path: Path) -> None:
    described = bench("few-shot:leave-one-domain-out", domains=("a", "b"), curve=(1, 4))
    rows = [
        TableRow("zero-shot", ({"1 shot": 0.2, "4 shots": 0.2},)),
        TableRow("promptfl", ({"1 shot": 0.3, "4 shots": 0.4}, {"1 shot": 0.2, "4 shots": 0.6})),
    ]
    printed = TableRow("plan (paper)", ({"1 shot": 0.3},))  # whose paper has one number of shots
    [path] = draw(described, [*rows, printed], [], tmp_path)
    assert path.name == "few-shot.png"
    assert filled(path)


def test_more_methods_than_colours_differ_in_style() -> None:
    pairs = {
        (plots.COLOURS[k % len(plots.COLOURS)], plots.STYLES[k // len(plots.COLOURS) % len(plots.STYLES)])
        for k in range(20)
    }
    assert len(pairs) == 20


def test_accuracy_over_bytes_has_a_point_for_each_row_that_something_travels_for() -> None:
    costs = {"bytes_up": 2000.0, "bytes_down": 10.0}
    rows = [
        TableRow("zero-shot", ({"mean": 0.2, "harmonic mean": 0.2},)),
        TableRow("promptfl", ({"mean": 0.3, "harmonic mean": 0.25}, {"mean": 0.5, "harmonic mean": 0.35}), costs),
        TableRow("coop", ({"mean": 0.4},), costs),
        TableRow("silent", ({"mean": 0.4},), dict.fromkeys(costs, 0.0)),
        TableRow("by shots", ({"1 shot": 0.4},), costs),
        TableRow("coop (paper)", ({"mean": 0.4},)),
    ]
    points = plots.points_of(rows)
    assert [(point.label, point.bytes) for point in points] == [("promptfl", 2010.0), ("coop", 2010.0)]
    assert points[0].accuracy == pytest.approx(30), "base-to-novel's harmonic mean stands for its columns"
    assert points[0].sd == pytest.approx(5)
    assert points[0].colour != points[1].colour
