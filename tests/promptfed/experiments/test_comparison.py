"""The paired bootstrap, and figures of a bench's answers, against literal versions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from promptfed.experiments.bench.plots import paired_bootstrap
from promptfed.experiments.bench.runner import BenchRun
from promptfed.experiments.bench.tables import figures, matrices_of, measures_of
from promptfed.sdk.result import Accuracy
from promptfed.shared.metrics import Outcomes

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
    low, high, p = paired_bootstrap(lists, draws=4000)
    literal = np.random.default_rng(5)
    means = [sum(sum(rows[literal.integers(len(rows))] for _ in rows) for rows in lists) / 130 for _ in range(600)]
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.03)
    assert p < 0.05
    assert paired_bootstrap([np.zeros(10)])[2] == 1.0
    assert paired_bootstrap(lists, draws=4000) == (low, high, p)


def test_a_picture_that_several_seeds_were_shown_counts_once() -> None:
    rng = np.random.default_rng(2)
    once = rng.choice([-1.0, 0.0, 1.0], size=60, p=[0.2, 0.5, 0.3])
    assert paired_bootstrap([np.stack([once, once, once])]) == pytest.approx(paired_bootstrap([once]))
    apart = paired_bootstrap([once, once, once])
    assert apart[1] - apart[0] < 0.7 * (paired_bootstrap([once])[1] - paired_bootstrap([once])[0])


def test_figures_count_clients_once_and_pool_what_is_of_images() -> None:
    clients = [told("a", "test", "0011", "0010", sure=0.9), told("b", "test", "22", "20", sure=0.6)]
    found = figures(clients)
    assert found["accuracy"] == pytest.approx((0.75 + 0.5) / 2)
    assert found["ece"] == pytest.approx((4 * abs(0.75 - 0.9) + 2 * abs(0.5 - 0.6)) / 6)
    assert found["worst_class"] == 0.5
    assert found["worst_client"] == 0.5
    assert found["sd_clients"] == pytest.approx(0.125)
    assert found["macro_f1"] == pytest.approx(((0.8 + 2 / 3) / 2 + (2 / 3 + 0) / 2) / 2)


def test_rows_are_by_variant_and_test_set_over_the_seeds() -> None:
    runs = [
        run("a", told("c", "test", "01", "01"), told("c", "test@zero-shot", "01", "00"), told("c", "of-d", "01", "10")),
        run("a", told("c", "test", "01", "11"), seed=1),
    ]
    rows = measures_of(runs)
    assert [(row.label, row.split, row.seeds) for row in rows] == [
        ("a", "test", [0, 1]),
        ("a (zero-shot)", "test", [0]),
    ]
    assert rows[0].accuracy == [1.0, 0.5]
    assert [bin for bin in rows[0].reliability if bin[2]] == [
        (pytest.approx(11 / 15), pytest.approx(12 / 15), 4, 0.75, 0.75)
    ]


def test_the_matrix_holds_everybody_on_everybody_s_images() -> None:
    def one(client: str, split: str, value: float) -> Accuracy:
        return Accuracy(2, client, "trainer", None, split, value, None, 4)

    cells = [one("a", "test", 0.9), one("a", "of-b", 0.2), one("b", "test", 0.8), one("b", "of-a", 0.4)]
    [matrix] = matrices_of([run("m", accuracies=[*cells, one("a", "test@global", 0.0)])])
    assert matrix.accuracy == [[0.9, 0.2], [0.4, 0.8]]
    assert matrix.elsewhere == pytest.approx(0.3)
    assert matrices_of([run("m", accuracies=[cells[0], cells[2]])]) == []
