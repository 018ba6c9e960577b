"""A multi-label federation from data to scores: over HTTP and in one process, exported, asked and pooled."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sklearn.metrics import average_precision_score
from typer.testing import CliRunner

import promptfed
from promptfed.cli.main import app
from promptfed.shared.data import open_source

pytestmark = pytest.mark.extended
DATA = "emoji-scenes:flat?count=60&test_count=40&seed={seed}"
SITES = {"one": DATA.format(seed=1), "two": DATA.format(seed=2)}


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def spec() -> dict[str, Any]:
    return {
        "task": "multi_label", "class_names": list(open_source(SITES["one"], "trainer").class_names),
        "training": {"learning_rate": 0.01}, "rounds": 2,
    }  # fmt: skip


@pytest.fixture(scope="module")
def result() -> promptfed.Result:
    return promptfed.run({"name": "promptfl", "m": 4}, SITES, **spec())


@pytest.fixture(scope="module")
def export(result: promptfed.Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return result.export(tmp_path_factory.mktemp("export") / "model")


def test_real_processes_come_to_the_same_state(result: promptfed.Result, tmp_path: Path) -> None:
    clients = [{"name": name, "data": uri} for name, uri in SITES.items()]
    given = spec() | {"name": "promptfl", "method": {"name": "promptfl", "m": 4}, "clients": clients}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    told = json.loads(run("launch", str(tmp_path / "run.yaml"), "--json").stdout.strip().splitlines()[-1])
    assert result.state_hash in json.dumps(told)


def test_accuracies_are_mean_average_precisions_of_the_answers(result: promptfed.Result, export: Path) -> None:
    """Of the exported model's answers to each image, by scikit-learn."""
    source = open_source(SITES["one"], "trainer")
    labels = source.test.labels.numpy()
    answers = [result.predict(source.test.image(row)).probabilities for row in range(len(labels))]
    said = np.array([[answer[name] for name in source.class_names] for answer in answers])
    wanted = np.mean([average_precision_score(labels[:, k] == 1, said[:, k]) for k in range(labels.shape[1])])
    [own] = [row for row in result.accuracies() if row.client == "one"]
    assert own.accuracy == pytest.approx(wanted, abs=1e-6)
    scored = export.parent / "scored"
    run("score", str(export), SITES["one"], "--out", str(scored))
    figures = json.loads((scored / "score.json").read_text())
    assert figures["mean_average_precision"] == pytest.approx(wanted, abs=1e-6)
    assert len(figures["classes"]) == labels.shape[1]


def test_an_export_answers_with_the_classes_that_are_present(export: Path, tmp_path: Path) -> None:
    source = open_source(SITES["two"], "trainer")
    for row in range(3):
        source.test.image(row).save(tmp_path / f"{row}.png")
    run("predict", str(tmp_path), "--export", str(export), "--out", str(tmp_path / "told.csv"))
    rows = list(csv.DictReader((tmp_path / "told.csv").open()))
    assert len(rows) == 3
    for row in rows:
        present = {name for name in row["present"].split("|") if name}
        assert present == {name for name in source.class_names if float(row[name]) > 0.5}


def test_data_of_the_other_kind_are_refused(export: Path, tmp_path: Path) -> None:
    with pytest.raises(promptfed.PromptfedError, match=r"is for any number of labels per image, and .* has one label"):
        promptfed.run("promptfl", {"one": "emoji:flat"}, **spec())
    outcome = CliRunner().invoke(app, ["score", str(export), "emoji:flat", "--out", str(tmp_path / "x")])
    assert outcome.exit_code != 0


def test_the_bench_compares_methods(tmp_path: Path) -> None:
    data = "emoji-scenes:flat?count=60&test_count=30"
    where = ("--data", data, "--partition", "iid", "--clients", "2", "--seeds", "0", "--rounds", "1")
    run("bench", "multi-label", *where, "--methods", "promptfl,fedtaskres", "--out", str(tmp_path / "bench"))
    table = (tmp_path / "bench" / "table.md").read_text()
    assert all(name in table for name in ("zero-shot", "promptfl", "fedtaskres"))
