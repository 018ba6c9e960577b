"""What is done with an export: a folder classified, a score with its confusion."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from promptfed.cli.scoring import _draw, confusion, scores
from promptfed.sdk.client import Exit
from promptfed.shared.metrics import Estimate, pool_estimates
from tests.promptfed.conftest import command
from tests.support.own_images import SHAPES, picture, write_folder


def test_a_folder_of_images_becomes_a_table(exported: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", ("circle", "bar"), seed=9, each=2)
    (tmp_path / "in" / "bar" / "broken.png").write_bytes(b"nothing")
    (tmp_path / "in" / "notes.txt").write_text("no image")
    (tmp_path / "in" / "bar" / "logo.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    done = command("predict", tmp_path / "in", "--export", exported, "--out", tmp_path / "answers.csv")
    assert done.exit_code == 0, done.output
    assert "Wrote 4 answers" in done.stdout
    shown = command("data", "show", f"folder:{tmp_path / 'in'}").output
    for name in ("broken.png", "logo.svg"):
        [told] = [line for line in done.stderr.splitlines() if name in line]
        assert told in shown, "in the words of `data show`"
    text = (tmp_path / "answers.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["image"] for row in rows] == ["bar/0.png", "bar/1.png", "circle/0.png", "circle/1.png"]
    one = command("predict", tmp_path / "in" / "bar" / "0.png", "--export", exported, "--json")
    [answer] = json.loads(one.stdout)
    assert rows[0]["class"] == answer["class_name"]
    # one image and four are multiplied in other orders, and logits are cosines times a hundred
    assert float(rows[0]["probability"]) == pytest.approx(answer["classes"][0]["probability"], abs=5e-5)
    best = max(answer["classes"], key=lambda row: row["zero_shot"])
    assert (rows[0]["zero_shot_class"], float(rows[0]["zero_shot_probability"])) == (
        best["name"],
        pytest.approx(best["zero_shot"], abs=5e-5),
    )
    assert command("predict", tmp_path / "in", "--export", exported).stdout == text
    for more in ((tmp_path / "in", "--json"), (tmp_path / "in" / "bar" / "0.png", "--out", "x"), (tmp_path, tmp_path)):
        assert command("predict", *more, "--export", exported).exit_code == Exit.USAGE
    (tmp_path / "empty").mkdir()
    assert "holds no image" in command("predict", tmp_path / "empty", "--export", exported).stderr


def test_a_score_is_that_of_the_answers(exported: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", ("circle", "bar"), seed=9, each=3)
    done = command("score", exported, f"folder:{tmp_path / 'in'}", "--out", tmp_path / "score", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    table = command("predict", tmp_path / "in", "--export", exported).stdout
    answers = [
        (row["image"].split("/")[0], row["class"], row["zero_shot_class"]) for row in csv.DictReader(io.StringIO(table))
    ]
    assert told["images"] == len(answers) == 6
    assert told["accuracy"] == pytest.approx(sum(label == found for label, found, _ in answers) / 6)
    assert told["zero_shot"]["accuracy"] == pytest.approx(sum(label == found for label, _, found in answers) / 6)
    with (tmp_path / "score" / "confusion.csv").open(newline="") as file:
        matrix = {row["class"]: row for row in csv.DictReader(file)}
    for label in SHAPES:
        for found in SHAPES:
            assert int(matrix[label][found]) == sum(answer[:2] == (label, found) for answer in answers)
    assert (tmp_path / "score" / "confusion.png").stat().st_size > 1000
    assert json.loads((tmp_path / "score" / "score.json").read_text()) == told
    (tmp_path / "in" / "ring").mkdir()
    picture("circle", 1).save(tmp_path / "in" / "ring" / "0.png")
    refused = command("score", exported, f"folder:{tmp_path / 'in'}", "--out", tmp_path / "other")
    assert "does not choose among the classes ring" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_verify_without_a_key_says_what_it_did_not_check(exported: Path, tmp_path: Path) -> None:
    whole = command("verify", exported, "--no-recompute")
    assert whole.exit_code == 0, whole.output
    assert "was not checked: give its --key" in whole.stdout
    shutil.copytree(exported, tmp_path / "changed")
    weights = tmp_path / "changed" / "class_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    refused = command("verify", tmp_path / "changed", "--no-recompute")
    assert refused.exit_code == Exit.BAD_INPUT
    assert "class_weights.safetensors" in refused.stderr


def test_scores_of_several_sites_are_pooled(exported: Path, tmp_path: Path) -> None:
    files = []
    for site, each in (("north", 6), ("south", 4), ("east", 5)):
        write_folder(tmp_path / site, ("circle", "bar"), seed=each, each=each)
        done = command("score", exported, f"folder:{tmp_path / site}", "--out", tmp_path / "scores" / site)
        assert done.exit_code == 0, done.output
        files.append(tmp_path / "scores" / site)
    scored = json.loads((files[0] / "score.json").read_text())
    [bar, circle] = sorted(scored["classes"], key=lambda one: one["name"])
    assert (bar["positives"], bar["negatives"], circle["positives"]) == (6, 6, 6)
    done = command("pool", *files, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    of_sites = [json.loads((file / "score.json").read_text())["accuracy_interval"] for file in files]
    wanted = pool_estimates([Estimate(**one) for one in of_sites])
    assert wanted is not None
    assert told["figures"]["accuracy"]["mean"] == pytest.approx(wanted.mean)
    assert set(told["figures"]) <= {"accuracy", "AUROC of circle", "AUROC of bar"}
    assert "accuracy" in command("pool", *files).output
    other = scored | {"state": "sha256:" + "0" * 64}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "score.json").write_text(json.dumps(other))
    for given, text in (
        ((files[0],), "give two sites or more"),
        ((files[0], tmp_path / "other"), "not scored the same export"),
        ((files[0], tmp_path / "none.json"), "cannot read"),
    ):
        refused = command("pool", *given)
        assert refused.exit_code == Exit.BAD_INPUT
        assert text in refused.stderr.replace("\n", " ")


def test_a_class_named_like_a_formula_is_drawn_as_text() -> None:
    _draw(np.eye(2, dtype=np.int64), ["cost $\\frac$", "b"]).savefig(io.BytesIO())


def test_figures_of_a_score_by_hand() -> None:
    labels, predicted = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])
    found = scores(labels, predicted, torch.tensor([0.9, 0.9, 0.9, 0.9]), ["a", "b", "c"])
    assert found.accuracy == 0.75
    assert found.ece == pytest.approx(0.15)
    assert (found.worst_class, found.worst_class_accuracy) == ("a", 0.5)
    assert found.macro_f1 == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert confusion(labels, predicted, 3).tolist() == [[1, 1, 0], [0, 2, 0], [0, 0, 0]]
