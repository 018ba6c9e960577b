"""A bench's folder: whose it is, what is done, its table in a narrow terminal and as CSV, and its curve."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from promptfed.cli.bench import fitted, letters, remarks_on
from promptfed.cli.main import app
from promptfed.experiments.bench.entries import parse_entries
from promptfed.experiments.bench.folder import BENCH_FILE, claim, results_csv
from promptfed.experiments.bench.protocols import PROTOCOLS, Setting
from promptfed.experiments.bench.runner import Bench, BenchRun
from promptfed.experiments.bench.tables import TableRow
from promptfed.sdk.client import Exit
from promptfed.sdk.result import Accuracy

DATA = "symbols:sketch?topic=games&per_class=4&test_per_class=2"


def bench(out: Path, *more: str, data: str = DATA, methods: str = "zero_shot") -> tuple[int, str, str]:
    arguments = ["personalisation", "--data", data, "--clients", "2", "--partition", "iid", "--seeds", "0"]
    result = CliRunner().invoke(app, ["bench", *arguments, "--methods", methods, "--out", str(out), *more])
    return result.exit_code, result.stdout, result.stderr


def test_a_folder_of_another_bench_is_refused_and_of_the_same_goes_on(tmp_path: Path) -> None:
    assert bench(tmp_path)[0] == 0
    before = (tmp_path / "results.json").read_bytes()
    for more, differs in (((), "setting was"), (("--rounds", "2"), 'spec was {}, is {"rounds": 2}')):
        code, _, stderr = bench(tmp_path, *more, data=DATA if more else DATA.replace("games", "signs"))
        assert code == Exit.BAD_INPUT
        assert "holds another bench" in stderr
        assert differs in stderr
    assert (tmp_path / "results.json").read_bytes() == before
    (tmp_path / "bench.json").unlink()  # as a version left it that knew of no other benches
    other = ["bench", "cross-dataset", "--data", DATA, "--data", "digits", "--methods", "zero_shot"]
    result = CliRunner().invoke(app, [*other, "--out", str(tmp_path)])
    assert 'protocol was "personalisation", is "cross-dataset"' in result.stderr
    code, _, stderr = bench(tmp_path, methods="zero_shot,promptfl:m=2:rounds=2")
    assert code == 0
    assert f"1 of 2 federations are done in {tmp_path}; the other 1 will take about" in stderr
    assert "all of them" in bench(tmp_path, methods="zero_shot,promptfl:m=2:rounds=2")[2]


def test_a_claim_that_is_killed_while_it_writes_leaves_a_folder_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Bench(PROTOCOLS["personalisation"], parse_entries("zero_shot"), Setting((DATA,)), (0,))
    claim(tmp_path, wanted)
    before = (tmp_path / BENCH_FILE).read_bytes()
    write = os.fdopen

    def half(descriptor: int, mode: str = "r", *more: Any, **options: Any) -> Any:
        file = write(descriptor, mode, *more, **options)
        file.write(b"{")
        file.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdopen", half)
    monkeypatch.setattr(Path, "write_bytes", lambda path, body: half(os.open(path, os.O_WRONLY | os.O_TRUNC), "wb"))
    with pytest.raises(KeyboardInterrupt):
        claim(tmp_path, wanted)
    assert (tmp_path / BENCH_FILE).read_bytes() == before


def test_results_are_kept_as_csv_too_and_accuracy_by_round_is_drawn(tmp_path: Path) -> None:
    code, stdout, _ = bench(tmp_path, methods="promptfl:m=2:rounds=3")
    assert code == 0
    assert (tmp_path / "rounds-trainers.png").exists()
    assert "results.csv" in stdout
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    table: list[dict[str, Any]] = json.loads((tmp_path / "results.json").read_text())["table"]
    told = {(row["method"], row["column"]): float(row["accuracy"]) for row in rows}
    assert told == {(row["label"], name): value for row in table for name, value in row["scores"][0].items()}
    assert {row["seed"] for row in rows} == {"0"}


def test_a_papers_row_has_no_seed() -> None:
    text = results_csv(
        [TableRow("ours", ({"mean": 0.5}, {"mean": 0.25})), TableRow("theirs", ({"mean": 0.75},))], [3, 4]
    )
    assert text.decode().splitlines()[1:] == ["ours,3,mean,0.5", "ours,4,mean,0.25", "theirs,,mean,0.75"]


LABELS = ("zero-shot", "fedpgp:pairs=positive_only:training.learning_rate=0.01", "promptfl:training.learning_rate=0.05")


@pytest.mark.parametrize("columns", [1, 4, 9])
def test_a_table_fits_eighty_columns_by_aliases_and_in_parts(columns: int) -> None:
    header = ["method", *(f"a domain of long name {k}" for k in range(columns)), "up", "down"]
    lines = [[label, *("45.3 ± 1.2 ▼" for _ in range(columns)), "7.2 kB", "7.2 kB"] for label in LABELS]
    parts, legend = fitted(header, lines, 80)
    for part_header, part_lines in parts:
        widths = [max(len(row[k]) for row in [part_header, *part_lines]) for k in range(len(part_header))]
        assert sum(widths) + 3 * len(widths) + 1 <= 80
        assert [line[0] for line in part_lines] == ["zero-shot", "b", "c"]
    shown = [title for part_header, _ in parts for title in part_header[1:]]
    assert shown == [f"c{k + 1}" for k in range(columns)] + ["up", "down"]
    assert f"b = {LABELS[1]}" in legend
    assert "c1 = a domain of long name 0" in legend
    assert sum(len(line) - 1 for _, part_lines in parts for line in part_lines) == len(LABELS) * (columns + 2)


def test_a_table_that_fits_stays_as_it_is() -> None:
    header, lines = ["method", "mean"], [["a method with a rather long name", "1.0"]]
    assert fitted(header, lines, 80) == ([(header, lines)], [])
    assert [letters(number) for number in (0, 25, 26, 27)] == ["a", "z", "aa", "ab"]


def test_a_bench_remarks_a_template_that_is_near_chance() -> None:
    def run(zero_shot: float, accuracy: float) -> BenchRun:
        rows = [Accuracy(1, "a", "trainer", None, "test", accuracy, zero_shot, 10)]
        spec: Any = {"class_names": [f"class {k}" for k in range(50)], "backbone": {"model": "promptfed-tiny"}}
        return BenchRun(
            label="x", seed=0, trial="all", accuracies=rows, rounds=1, costs={}, wall_seconds=0, setup_seconds=0,
            spec=spec,
        )  # fmt: skip

    assert remarks_on([run(0.5, 0.5), run(0.4, 0.5)]) == []
    assert remarks_on([run(0.02, 0.5), run(0.04, 0.5)]) == []  # training showed that it does know them
    [said] = remarks_on([run(0.02, 0.1), run(0.04, 0.1)])
    assert said.startswith(
        "Zero-shot is right in 3.0 %, guessing among 50 classes in 2.0 %: promptfed-tiny hardly knows"
    )


def test_a_bench_remarks_entries_that_rise_fall_or_lose() -> None:
    def run(label: str, accuracies: dict[int, tuple[float, ...]]) -> BenchRun:
        rows = [
            Accuracy(round, f"site-{index}", "trainer", None, "test", value, 0.5, 100)
            for round, values in accuracies.items()
            for index, value in enumerate(values)
        ]
        return BenchRun(
            label=label, seed=0, trial="all", accuracies=rows, rounds=8, costs={}, wall_seconds=0, setup_seconds=0,
            spec={"training": {"learning_rate": 0.1}},
        )  # fmt: skip

    steady = (0.6, 0.6, 0.6)
    assert remarks_on([run("x", {0: (0.5,) * 3, 6: steady, 8: steady})]) == []
    assert remarks_on([run("x", {0: (0.5,) * 3, 8: (0.7,) * 3})]) == []  # nothing tells when it rose
    [said] = remarks_on([run("x", {6: steady, 8: (0.7,) * 3}), run("y", {6: steady, 8: steady})])
    assert said.startswith("x: Still rising: +10.0 points since round 6 of 8.")
    [said] = remarks_on([run("x", {6: (0.4, 0.6, 0.8), 8: (0.4, 0.6, 0.8)})])
    assert said.startswith("x: One site falls: site-0 is 10.0 points below zero-shot")
    [said] = remarks_on([run("x", {6: (0.4,) * 3, 8: (0.4,) * 3})])
    assert said.startswith("x: Below zero-shot by 10.0 points")
