"""Plots: which there are for which bench, and that they show the numbers."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from promptfed.experiments.bench.entries import parse_entries
from promptfed.experiments.bench.plots import draw, look
from promptfed.experiments.bench.protocols import PROTOCOLS, Setting
from promptfed.experiments.bench.runner import Bench, BenchRun
from promptfed.experiments.bench.tables import (
    Measures,
    TableRow,
    figures,
    holm,
    measures_of,
    measures_table,
    p_below,
    rows_of,
    table_of,
)
from promptfed.experiments.bench.tuning import paired_bootstrap
from promptfed.sdk.result import Accuracy
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.plain_text import markdown_cell, markdown_code
from tests.promptfed.experiments.bench.test_runner import accuracy, run_of


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


def test_a_bench_gets_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[list[float], list[float]]] = []
    plot = Axes.plot

    def watched(self: Axes, x: Any, y: Any, **options: Any) -> Any:
        drawn.append((list(x), list(y)))
        return plot(self, x, y, **options)

    monkeypatch.setattr(Axes, "plot", watched)
    described = bench("personalisation")
    found = results()
    paths = draw(described, rows_of(described, found), found, tmp_path)
    assert {path.name for path in paths} == {"rounds-trainers.png"}
    assert all(filled(path) and path.with_suffix(".pdf").stat().st_size > 1000 for path in paths)
    assert drawn == [([0, 1, 2], pytest.approx([30, 40, 50])), ([0, 1, 2], pytest.approx([50, 60, 70]))]


def test_two_evaluations_are_no_curve(tmp_path: Path) -> None:
    described = bench("personalisation")
    found = results(rounds=(0, 2))
    assert draw(described, rows_of(described, found), found, tmp_path) == []


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
    assert len({look(number) for number in range(20)}) == 20


# Tables in Markdown: names that somebody else chose (methods of packages, domains, clients, data), and their rows.


BAD = "<img src=x onerror=alert(1)> a|b [c](javascript:d) `e`"


ROWS = {
    "accuracy": table_of([BAD], [TableRow(BAD, ({BAD: 0.5},))]),
    "measures": measures_table([
        Measures(
            label=BAD, split=BAD, seeds=[0], accuracy=[1], majority=[1], auroc=[1], ece=[0],
            macro_f1=[1], worst_class=[1], sd_clients=[0],
            worst_client=[1],
        )
    ]),
}  # fmt: skip


@pytest.mark.parametrize("which", ROWS)
def test_no_name_is_html_a_link_or_a_further_column(which: str) -> None:
    lines = ROWS[which]
    assert any("&lt;img" in line for line in lines)
    table = [line for line in lines if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, "each line has as many columns"
    for line in lines:
        assert "<" not in line
        assert not re.search(r"(?<!\\)[\[`]", line)


def test_names_stay_readable() -> None:
    assert markdown_cell("zero_shot (lr=0.1, 2*3)") == "zero_shot (lr=0.1, 2*3)"
    assert markdown_cell("a\n\x1bb") == "a \\\\x1bb"


@pytest.mark.parametrize(("given", "shown"), [("a_b", "`a_b`"), ("a`<b>", "`` a`<b> ``"), ("a\nb``", "``` a b`` ```")])
def test_code_is_ended_by_nothing_in_it(given: str, shown: str) -> None:
    assert markdown_code(given) == shown


def test_trainers_and_unseen_targets_have_rows_of_their_own() -> None:
    """A global method's evaluator and a personal method's trainers measure the same target: both rows are `target`."""

    def one(client: str, role: str, split: str, right: int) -> tuple[Accuracy, Outcomes]:
        accuracy = Accuracy(1, client, role, None, split, right / 4, 0.25, 4)
        predicted = tuple(0 if row < right else 1 for row in range(4))
        return accuracy, Outcomes(1, client, split, ("a", "b"), (0,) * 4, predicted, (0.9,) * 4, "images")

    def run(label: str, *told: tuple[Accuracy, Outcomes]) -> BenchRun:
        accuracies, outcomes = (list(each) for each in zip(*told, strict=True))
        numbers: dict[str, Any] = {"seed": 0, "trial": "t", "rounds": 1, "costs": {}, "wall_seconds": 0}
        return BenchRun(label=label, accuracies=accuracies, outcomes=outcomes, setup_seconds=0, **numbers)

    shared = run("promptfl", one("a", "trainer", "test", 4), one("target-b", "evaluator", "test", 1))
    personal = run("fedpgp", one("a", "trainer", "test", 3), one("a", "trainer", "target", 2))
    measured = {(row.label, row.split): (row.accuracy, row.ece) for row in measures_of([shared, personal])}
    assert measured == {
        ("promptfl", "test"): ([1.0], [pytest.approx(0.1)]), ("promptfl", "target"): ([0.25], [pytest.approx(0.65)]),
        ("fedpgp", "test"): ([0.75], [pytest.approx(0.15)]), ("fedpgp", "target"): ([0.5], [pytest.approx(0.4)]),
    }  # fmt: skip


# The paired bootstrap, and figures of a bench's answers, against literal versions.


NAMES = ("sun", "moon", "star")


def told(client: str, split: str, labels: str, predicted: str, images: str = "x", sure: float = 0.75) -> Outcomes:
    answers = tuple(map(int, labels)), tuple(map(int, predicted))
    return Outcomes(2, client, split, NAMES, *answers, (sure,) * len(labels), images)


def run(label: str, *outcomes: Outcomes, seed: int = 0, trial: str = "all", accuracies: Any = ()) -> BenchRun:
    return BenchRun(
        label=label, seed=seed, trial=trial, accuracies=list(accuracies), rounds=2, costs={}, wall_seconds=1.0,
        setup_seconds=1.0, outcomes=list(outcomes),
    )  # fmt: skip


def test_the_bootstrap_is_that_of_resampled_pairs() -> None:
    rng = np.random.default_rng(1)
    lists = [rng.choice([-1.0, 0.0, 1.0], size=size, p=[0.1, 0.6, 0.3]) for size in (40, 90)]
    low, high = paired_bootstrap(lists, draws=4000)
    literal = np.random.default_rng(5)
    means = [sum(sum(rows[literal.integers(len(rows))] for _ in rows) for rows in lists) / 130 for _ in range(600)]
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.03)
    assert paired_bootstrap(lists, draws=4000) == (low, high)


def test_figures_count_clients_once_and_pool_what_is_of_images() -> None:
    clients = [told("a", "test", "0011", "0010", sure=0.9), told("b", "test", "22", "20", sure=0.6)]
    found = figures(clients)
    assert found["accuracy"] == pytest.approx((0.75 + 0.5) / 2)
    assert found["ece"] == pytest.approx((4 * abs(0.75 - 0.9) + 2 * abs(0.5 - 0.6)) / 6)
    assert found["worst_class"] == 0.5
    assert found["worst_client"] == 0.5
    assert found["sd_clients"] == pytest.approx(0.125)
    assert found["macro_f1"] == pytest.approx(((0.8 + 2 / 3) / 2 + (2 / 3 + 0) / 2) / 2)


def test_the_p_below_zero_shot_is_of_signs_of_whole_images_and_corrected_for_the_table() -> None:
    one, two = ("c", "0"), ("d", "0")
    for seeds in ([[-1, -1, 0, 1, -1]], [[-1, -1, 1, 0, -1], [0, -1, -1, 1, 0]]):
        each = np.sum(seeds, axis=0)
        signs = np.array(list(product((1, -1), repeat=len(each)))) * each
        exact = np.mean(np.where(np.isclose(signs.sum(1), each.sum()), 0.5, signs.sum(1) < each.sum()))
        assert p_below([(one, np.array(rows, float)) for rows in seeds]) == pytest.approx(exact, abs=0.03)
    rows = np.array([1.0, -1.0, -1.0])
    assert p_below([(one, rows), (two, rows)]) < p_below([(one, rows)]) < 0.5 < p_below([(one, -rows)])
    assert p_below([(one, np.zeros(3))]) == 1.0
    assert holm([0.04, 0.01, 0.03, 0.5]) == pytest.approx([0.09, 0.04, 0.09, 0.5])
    assert (holm([]), holm([0.6, 0.7])) == ([], [1.0, 1.0])


def test_rows_are_by_variant_and_test_set_over_the_seeds() -> None:
    runs = [
        run("a", told("c", "test", "01", "01"), told("c", "test@zero-shot", "01", "00")),
        run("a", told("c", "test", "01", "11"), seed=1),
    ]
    rows = measures_of(runs)
    assert [(row.label, row.split, row.seeds) for row in rows] == [
        ("a", "test", [0, 1]),
        ("a (zero-shot)", "test", [0]),
    ]
    assert rows[0].over_zero_shot == (0.5, 0.0, 1.0)  # of the images that both were tested on
    assert rows[1].over_zero_shot is None
    assert "| +50.0 (+0.0 to +100.0) | 0.84 |" in measures_table(rows)[2]
    assert rows[0].accuracy == [1.0, 0.5]
