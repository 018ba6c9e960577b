"""Choosing a rate on held-out training images, and what a result says by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.bench.trials import held_out_sites
from promptfed.experiments.bench.tuning import rates_of
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.runtime.run_file import read_run
from promptfed.shared.api.report_schemas import movement, near_chance
from promptfed.shared.data import open_source
from promptfed.shared.errors import PromptfedError

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


def test_a_method_and_a_rate_are_chosen_on_training_images_and_written_into_a_new_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    tune = ("tune", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "tuned.yaml"))
    code, output = invoke(*tune, "--methods", "fedtaskres,pfedpg", "--seeds", "2", "--json")
    assert code == 0, output
    found = json.loads(output.splitlines()[-1])
    assert found["default"] == {"method": "promptfl", "rate": 0.002}
    last = [row for row in found["tried"] if row["rounds"] == 3]
    assert found["accuracy"] == max(row["accuracy"] for row in last)
    [default] = [row for row in last if row["candidate"] == found["default"]]
    assert found["winner"]["method"] == "fedtaskres"
    assert found["accuracy"] - default["accuracy"] == pytest.approx(found["default_gain"]["mean"])
    assert 0 < found["default_gain"]["mean"] <= found["default_gain"]["high"]
    rates = [row["candidate"]["rate"] for row in last if row["candidate"]["method"] == "fedtaskres"]
    assert min(rates) < found["winner"]["rate"] < max(rates)
    assert not found["at_edge"]
    assert "classifier for evaluators" in found["refused"]["pfedpg"]
    text = (tmp_path / "tuned.yaml").read_text()
    tuned, before = yaml.safe_load(text), yaml.safe_load(RUN)
    assert tuned["method"] == {"name": "fedtaskres"}
    assert tuned["training"] == {"batch_size": 8, "learning_rate": found["winner"]["rate"]}
    assert len(tuned["class_names"]) == 13  # fedtaskres has a row for each
    assert (tuned["rounds"], tuned["clients"]) == (before["rounds"], before["clients"])
    assert text.startswith("# By `promptfed tune` on 0.25 of the training images held out: fedtaskres, rate ")


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
    [other] = held_out_sites([Site("a", uri)], 0.25, seed=1)
    again = open_source(other.data)
    others = {again.test.digest(row) for row in range(len(again.test))}
    assert others <= train
    assert others != tried


def test_a_template_near_chance_is_remarked() -> None:
    [said] = near_chance(0.034, [60], "promptfed-tiny")
    assert "right in 3.4 %, guessing among 60 classes in 1.7 %" in said
    assert near_chance(0.034, [10], "x") != []
    assert near_chance(0.3, [60], "x") == []
    assert near_chance(0.48, [4], "x") == []  # nearly twice as good as guessing
    assert near_chance(0.26, [4], "x") != []
    assert near_chance(0.9, [2], "x") == []
    assert near_chance(0.01, [], "x") == []


@pytest.mark.parametrize(("gain", "losses", "says"), [
    (0.001, [4.0, 3.99], "Nothing moved in 2 rounds (loss from 4.000 to 3.990)"),
    (0.001, [4.0, 2.0], None),
    (0.02, [4.0, 3.99], None),
    (-0.05, [4.0, 2.0], "Below zero-shot by 5.0 points: try a lower training.learning_rate than 0.002"),
    (0.0, [], None),
])  # fmt: skip
def test_what_does_not_move_is_remarked_with_what_to_try(gain: float, losses: list[float], says: str | None) -> None:
    said = movement(gain, losses, 0.002, 2)
    assert (says in said[0]) if says else said == []
    assert not said or "promptfed tune" in said[0]


def test_a_simulation_that_learns_nothing_says_so(tmp_path: Path) -> None:
    # Without m the start is zero-shot itself; with it, random numbers move the sites before anything is learned.
    (tmp_path / "run.yaml").write_text(RUN.replace("0.002", "0.0000001").replace(", m: 4", ""))
    code, output = invoke("simulate", str(tmp_path / "run.yaml"))
    assert code == 0, output
    assert "Nothing moved in 3 rounds" in output


SEED = 12  # of `--seeds 1`


SCENES = """\
method: {name: promptfl, m: 2}
task: multi_label
class_names: [asian dish, building, celebration, clothing, flower, fruit, land vehicle, mammal, meal,
  sport equipment, weather]
rounds: 2
training: {batch_size: 16, learning_rate: 0.002}
clients:
  - name: "site-{index}"
    count: 2
    data: "emoji-scenes:?count=120&test_count=20&partition=iid&clients={count}&client={index}"
"""


@pytest.mark.extended
def test_methods_for_several_labels_are_chosen_by_mean_average_precision(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SCENES)
    tune = ("tune", str(tmp_path / "run.yaml"), "--methods", "fedtaskres,fedlp", "--seeds", "1", "--rates", "0.2")
    code, output = invoke(*tune, "--out", str(tmp_path / "tuned.yaml"), "--json")
    assert code == 0, output
    found = json.loads(output.splitlines()[-1])
    assert "does not train on images with several labels" in found["refused"]["fedlp"]
    run = read_run(tmp_path / "run.yaml")
    sites = held_out_sites(run.sites, 0.25, SEED)
    told = {}
    for method, rate in (({"name": "promptfl", "m": 2}, 0.002), ({"name": "fedtaskres"}, 0.2)):
        changes = {"method": method, "training": {"batch_size": 16, "learning_rate": rate}}
        result = simulate(run.spec | changes | {"seed": SEED, "evaluation": {"every": 2}}, sites)
        told[method["name"], rate] = result.accuracies(2)
    scores = {(row["candidate"]["method"], row["candidate"]["rate"]): row["accuracy"] for row in found["tried"]}
    for candidate, rows in told.items():
        assert scores[candidate] == pytest.approx(sum(row.accuracy for row in rows) / len(rows))
    zero = [row.zero_shot for row in told["promptfl", 0.002] if row.zero_shot is not None]
    assert found["zero_shot"] == pytest.approx(sum(zero) / 2)


@pytest.mark.parametrize("text", ["", "a", "0.1,0.1", "0,1", "-1", "nan", "inf"])
def test_rates_that_cannot_be_tried_are_refused(text: str) -> None:
    with pytest.raises(PromptfedError, match="write different rates above 0"):
        rates_of(text)
