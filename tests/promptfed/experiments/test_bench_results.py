"""A finished bench, compared and verified from the command line; what stands in its document beside accuracies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.sdk.errors import Exit
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


def test_two_rows_are_compared_picture_by_picture(out: Path) -> None:
    code, stdout, stderr = invoke("compare", f"{out}#promptfl", f"{out}#promptfl (zero-shot)", "--json")
    assert code == 0, stderr
    [found] = json.loads(stdout)
    images = len(open_source(DATA.replace("{domain}", "neon")).test)
    assert (found["test_set"], found["pictures"]) == ("test", 2 * images)
    assert found["difference"] == pytest.approx((found["only_a"] - found["only_b"]) / found["pictures"])
    code, stdout, stderr = invoke("compare", str(out), str(out))
    assert code == 0, stderr
    assert "coop - coop, test, " in stdout
    assert "= +0.0 points [95 %: +0.0, +0.0], McNemar p = 1 (0 : 0), bootstrap p = 1" in stdout
    code, _, stderr = invoke("compare", f"{out}#nothing", f"{out}#coop")
    assert (code, "no answers of 'nothing'" in stderr) == (Exit.BAD_INPUT, True)
    code, _, stderr = invoke("compare", str(out))
    assert (code, "takes two of FOLDER[#ROW]" in stderr) == (Exit.BAD_INPUT, True)
    code, _, stderr = invoke("compare", str(out), str(out), "--seeds", "0")
    assert (code, "takes no --seeds" in stderr) == (Exit.BAD_INPUT, True)


def test_a_run_comes_out_again_or_is_said_not_to(out: Path, tmp_path: Path) -> None:
    code, stdout, stderr = invoke("verify", str(out), "--cell", "coop,1", "--json")
    assert code == 0, stderr
    found = json.loads(stdout)
    assert found == {
        "label": "coop", "seed": 1, "trial": "all", "same_backbone": True, "same_data": True, "same_state": True,
        "apart": 0.0, "holds": True,
    }  # fmt: skip
    forged = document(out)
    victim = next(run for run in forged["runs"] if run["label"] == "coop")
    for accuracy in victim["accuracies"]:
        accuracy["accuracy"] = min(1.0, accuracy["accuracy"] + 0.25)
    (tmp_path / "results.json").write_text(json.dumps(forged))
    code, _, stderr = invoke("verify", str(tmp_path), "--cell", "coop,1,all")
    assert code == Exit.FAILED
    assert "coop, seed 1, all did not come out as kept: accuracies up to 25.0 points apart" in stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["verify", "{out}", "--cell", "plan"], "there is no such run; there are: coop, seed 1, trial all"),
        (["verify", "{out}", "--cell", "coop,x"], "write ROW[,SEED[,TRIAL]]"),
        (["verify", "{out}/nowhere"], "cannot be read: there is no such file"),
        (["verify"], "takes one folder of results"),
        (["personalisation", "{out}", "--data", DATA, "--out", "{out}/new"], "bench personalisation takes no"),
        (["personalisation", "--data", DATA], "needs a folder for its results: give --out"),
    ],
)
def test_what_cannot_be_done_is_told(out: Path, arguments: list[str], complaint: str) -> None:
    code, _, stderr = invoke(*(text.replace("{out}", str(out)) for text in arguments))
    assert code == Exit.BAD_INPUT
    assert complaint in stderr
