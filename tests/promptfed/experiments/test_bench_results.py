"""What a finished bench's folder has beside accuracies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.sdk.client import Exit
from promptfed.shared.data import open_source
from promptfed.shared.metrics import calibration_error

DATA = "symbols:{domain}?topic=weather&per_class=4&test_per_class=3"


def invoke(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["bench", *arguments])
    return found.exit_code, found.stdout, " ".join(found.stderr.split())


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    code, _, stderr = invoke(
        "personalisation", "--methods", "promptfl,coop", "--data", DATA, "--domains", "neon,chalk", "--rounds", "1",
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
    code, _, stderr = invoke("personalisation", "--data", DATA)
    assert code == Exit.BAD_INPUT
    assert "needs a folder for its results: give --out" in stderr
