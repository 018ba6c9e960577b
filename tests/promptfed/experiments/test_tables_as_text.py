"""Tables in Markdown: names that somebody else chose (methods of packages, domains, clients, data), and their rows."""

from __future__ import annotations

import re
from typing import Any

import pytest

from promptfed.experiments.bench.runner import BenchRun
from promptfed.experiments.bench.tables import (
    Matrix,
    Measures,
    TableRow,
    matrix_table,
    measures_of,
    measures_table,
    table_of,
)
from promptfed.sdk.result import Accuracy
from promptfed.shared.metrics import Outcomes
from promptfed.shared.plain_text import markdown_cell, markdown_code

BAD = "<img src=x onerror=alert(1)> a|b [c](javascript:d) `e`"
ROWS = {
    "accuracy": table_of([BAD], [TableRow(BAD, ({BAD: 0.5},))]),
    "matrix": matrix_table(Matrix(label=BAD, clients=[BAD, BAD], accuracy=[[1.0, 0.5], [0.5, 1.0]])),
    "measures": measures_table(
        [
            Measures(
                label=BAD, split=BAD, seeds=[0], accuracy=[1], ece=[0], macro_f1=[1], worst_class=[1], sd_clients=[0],
                worst_client=[1], reliability=[],
            )
        ]
    ),
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
        ("promptfl", "test"): ([1.0], [pytest.approx(0.1)]),
        ("promptfl", "target"): ([0.25], [pytest.approx(0.65)]),
        ("fedpgp", "test"): ([0.75], [pytest.approx(0.15)]),
        ("fedpgp", "target"): ([0.5], [pytest.approx(0.4)]),
    }
