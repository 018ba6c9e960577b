"""Choosing a rate on held-out training images, and what a result says by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.bench.sweep import held_out_sites
from promptfed.runtime.services import Site
from promptfed.sdk.errors import Exit
from promptfed.sdk.remarks import movement, near_chance
from promptfed.shared.data import open_source

RUN = """\
method: {name: promptfl, m: 4}
rounds: 3
training: {batch_size: 8, learning_rate: 0.002}
clients:
  - name: "site-{index}"
    count: 2
    data: "symbols:neon?topic=signs&per_class=8&partition=iid&clients={count}&client={index}"
  - {name: unseen, data: "symbols:sketch?topic=signs", role: evaluator}
"""


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_a_rate_is_chosen_on_training_images_and_written_into_a_new_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    code, output = invoke(
        "tune",
        str(tmp_path / "run.yaml"),
        "--out",
        str(tmp_path / "tuned.yaml"),
        "--rates",
        "0.01,100,0.0001",
        "--json",
    )
    assert code == 0, output
    found = json.loads(output.splitlines()[-1])
    assert list(found["by_rate"]) == ["0.0001", "0.01", "100.0"]
    best = [float(rate) for rate, value in found["by_rate"].items() if value == max(found["by_rate"].values())]
    assert found["chosen"] == best[0]
    assert found["at_edge"] == (found["chosen"] != 0.01)
    text = (tmp_path / "tuned.yaml").read_text()
    tuned, before = yaml.safe_load(text), yaml.safe_load(RUN)
    assert tuned["training"] == {"batch_size": 8, "learning_rate": found["chosen"]}
    assert {key: value for key, value in tuned.items() if key != "training"} == {
        key: value for key, value in before.items() if key != "training"
    }
    assert text.startswith(
        "# training.learning_rate by `promptfed tune`, on 0.25 of the training images held out (0.0001:"
    )
    code, output = invoke("tune", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "tuned.yaml"))
    assert (code, "is there already" in output) == (Exit.BAD_INPUT, True)
    code, output = invoke("tune", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "new"), "--rates", "a")
    assert (code, "--rates 'a'" in output) == (Exit.BAD_INPUT, True)


def test_no_test_image_decides() -> None:
    uri = "digits?partition=iid&clients=2&client=0"
    [site] = held_out_sites([Site("a", uri, tests={"more": "digits"}), Site("b", "digits", "evaluator")], 0.25)
    whole, held = open_source("digits"), open_source(site.data)
    test = {whole.test.digest(row) for row in range(len(whole.test))}
    train = {whole.train.digest(row) for row in range(len(whole.train))}
    tried = {held.test.digest(row) for row in range(len(held.test))}
    assert tried <= train
    assert not tried & {held.train.digest(row) for row in range(len(held.train))}
    assert not tried & test
    assert not site.tests


def test_a_template_near_chance_is_remarked() -> None:
    [said] = near_chance(0.034, 60, "promptfed-tiny")
    assert "right in 3.4 %, guessing among 60 classes in 1.7 %" in said
    assert near_chance(0.034, 10, "x") != []
    assert near_chance(0.3, 60, "x") == []
    assert near_chance(0.48, 4, "x") == []  # nearly twice as good as guessing
    assert near_chance(0.26, 4, "x") != []
    assert near_chance(0.9, 2, "x") == []
    assert near_chance(0.01, None, "x") == []


@pytest.mark.parametrize(
    ("gain", "losses", "says"),
    [
        (0.001, [4.0, 3.99], "Nothing moved in 2 rounds (loss from 4.000 to 3.990)"),
        (0.001, [4.0, 2.0], None),
        (0.02, [4.0, 3.99], None),
        (-0.05, [4.0, 2.0], "Below zero-shot by 5.0 points: try a lower training.learning_rate than 0.002"),
        (0.0, [], None),
    ],
)
def test_what_does_not_move_is_remarked_with_what_to_try(gain: float, losses: list[float], says: str | None) -> None:
    said = movement(gain, losses, 0.002, 2)
    assert (says in said[0]) if says else said == []
    assert not said or "promptfed tune" in said[0]


def test_a_simulation_that_learns_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.replace("0.002", "0.0000001"))
    code, output = invoke("simulate", str(tmp_path / "run.yaml"))
    assert code == 0, output
    assert "Nothing moved in 3 rounds" in output
