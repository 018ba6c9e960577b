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
from promptfed.experiments.simulation.simulation import SWAPPED
from promptfed.sdk.client import Exit
from promptfed.sdk.result import Accuracy
from promptfed.shared.data import open_source
from promptfed.shared.metrics import calibration_error

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


# What a finished bench's folder has beside accuracies.


LARGER = "symbols:{domain}?topic=weather&per_class=4&test_per_class=3"


def invoke(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["bench", *arguments])
    return found.exit_code, found.stdout, " ".join(found.stderr.split())


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    code, _, stderr = invoke(
        "personalisation", "--methods", "promptfl,coop", "--data", LARGER, "--domains", "neon,chalk", "--rounds", "1",
        "--m", "2", "--seeds", "1", "--out-of-client", "--out", str(folder),
    )  # fmt: skip
    assert code == 0, stderr
    return folder


def document(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def test_every_answer_is_kept_in_this_process(out: Path) -> None:
    promptfl, _ = document(out)["runs"]
    told = {(one["client"], one["split"]): one for one in promptfl["outcomes"]}
    assert set(told) == {(a, split) for a, b in (("neon", "chalk"), ("chalk", "neon"))
                         for split in ("test", "test@zero-shot", f"of-{b}", f"of-{b}@zero-shot")}  # fmt: skip
    for accuracy in promptfl["accuracies"]:
        if accuracy["round"] == 1:
            one = told[accuracy["client"], accuracy["split"]]
            right = [a == b for a, b in zip(one["labels"], one["predicted"], strict=True)]
            assert sum(right) / len(right) == pytest.approx(accuracy["accuracy"])
            assert all(1 / len(one["class_names"]) - 1e-6 <= sure <= 1 for sure in one["confidence"])
    site = next(client for client in promptfl["clients"] if client["name"] == "neon")
    assert told["neon", "test"]["labels"] == open_source(site["data"]).test.labels.tolist()
    assert told["neon", "test"]["images"] == told["chalk", "of-neon"]["images"]


def test_calibration_and_the_matrix_stand_in_the_document(out: Path) -> None:
    whole = document(out)
    row = next(row for row in whole["measures"] if (row["label"], row["split"]) == ("promptfl", "test"))
    told = [one for one in whole["runs"][0]["outcomes"] if one["split"] == "test"]
    sure = [value for one in told for value in one["confidence"]]
    right = [a == b for one in told for a, b in zip(one["labels"], one["predicted"], strict=True)]
    assert row["ece"] == [pytest.approx(calibration_error(sure, right), abs=1e-12)]
    assert sum(bin[2] for bin in row["reliability"]) == len(right)
    coop = next(matrix for matrix in whole["matrices"] if matrix["label"] == "coop")
    assert coop["clients"] == ["chalk", "neon"]
    shared = next(matrix for matrix in whole["matrices"] if matrix["label"] == "promptfl")["accuracy"]
    assert shared[0] == shared[1], "one classifier for all"
    scores = next(row for row in whole["table"] if row["label"] == "coop")["scores"][0]
    assert scores["elsewhere"] == pytest.approx((coop["accuracy"][0][1] + coop["accuracy"][1][0]) / 2)
    table = (out / "table.md").read_text()
    assert "| method | test set | accuracy | ECE | macro-F1 |" in table
    assert "coop: each client's classifier (row)" in table
    assert (out / "reliability-test.png").exists()


def test_a_bench_needs_a_folder() -> None:
    code, _, stderr = invoke("personalisation", "--data", LARGER)
    assert code == Exit.BAD_INPUT
    assert "needs a folder for its results: give --out" in stderr


# Others' prompts under one's own head: nothing changes where there are none, all but the head where there are.


WEATHER = "symbols:{domain}?topic=weather&per_class=2&test_per_class=2"


OTHERS_MODELS = "singleset_vpt:head=linear:m=0,singleset_vpt:head=linear:m=2,promptfl:m=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("swapped") / "out"
    spec = out.parent / "spec.yaml"
    spec.write_text("training: {epochs: 1, learning_rate: 0.5}")
    command = [
        "bench",
        "personalisation",
        "--data",
        WEATHER,
        "--domains",
        "sketch,neon,chalk",
        "--methods",
        OTHERS_MODELS,
    ]
    found = CliRunner().invoke(
        app, [*command, "--swap-prompts", "--rounds", "1", "--seeds", "0", "--spec", str(spec), "--out", str(out)]
    )
    assert found.exit_code == 0, found.stderr
    return out


def read_runs(folder: Path) -> list[BenchRun]:
    return [BenchRun.model_validate(run) for run in json.loads((folder / "results.json").read_text())["runs"]]


def answers(run: BenchRun, split: str) -> dict[str, list[tuple[float, ...]]]:
    told: dict[str, list[tuple[float, ...]]] = {}
    for one in run.outcomes:
        if one.split == split:
            told.setdefault(one.client, []).append(one.confidence)
    return told


def test_a_head_alone_answers_as_before(folder: Path) -> None:
    run = next(run for run in read_runs(folder) if "m=0" in run.label)
    own, swapped = answers(run, "test"), answers(run, f"test@{SWAPPED}")
    assert {client: len(told) for client, told in swapped.items()} == dict.fromkeys(("sketch", "neon", "chalk"), 2)
    for client, told in swapped.items():
        for one in told:
            assert one == pytest.approx(own[client][0], abs=1e-6)


def test_prompts_are_the_others_and_the_head_is_ones_own(folder: Path) -> None:
    run = next(run for run in read_runs(folder) if "m=2" in run.label and "singleset" in run.label)
    own, swapped = answers(run, "test"), answers(run, f"test@{SWAPPED}")
    for client, told in swapped.items():
        assert told[0] != told[1] != own[client][0]
    rows = {(row["label"], row["split"]) for row in json.loads((folder / "results.json").read_text())["measures"]}
    assert ("singleset_vpt:head=linear:m=2 (prompts of others)", "test") in rows


def test_of_a_shared_method_there_is_nothing_to_swap(folder: Path) -> None:
    run = next(run for run in read_runs(folder) if "promptfl" in run.label)
    assert answers(run, f"test@{SWAPPED}") == {}
