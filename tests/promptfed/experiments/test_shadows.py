"""Shadow federations: coins are fair, attacks take what they may, and what is known beforehand comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from promptfed.cli.attacking import served
from promptfed.cli.main import app
from promptfed.experiments.attacks.membership import attack, clopper_pearson, epsilon_bound, interval
from promptfed.experiments.attacks.shadows import Shadow, ShadowPlan, Shadows, logistic, mislabelled, run_shadows
from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.clip import FeatureCache, load_backbone, tiny
from promptfed.shared.data import open_source

DATA = "symbols:neon?topic=weather&per_class=6&test_per_class=2"
SPEC: dict[str, Any] = {
    "name": "shadowed",
    "method": {"name": "promptfl", "m": 2},
    "rounds": 1,
    "seed": 3,
    "training": {"batch_size": 16},
    "evaluation": {"every": 1},
}


def made_up(runs: int, images: int, canaries: int, gap: float, seed: int = 0) -> Shadows:
    """Scores of a normal distribution, ``gap`` standard deviations higher for members."""
    draws = np.random.default_rng(seed)
    wrong = np.arange(images) < canaries
    coins = draws.integers(0, 2, (runs, images)).astype(bool)
    hard = draws.normal(size=images) * 3  # what makes an image likely whether it was in or not
    found = []
    for present in coins:
        own = draws.normal(size=images) + gap * present
        odds = own + hard
        found.append(Shadow(present, odds, odds, own, np.column_stack([odds, hard]), None))
    return Shadows("a", wrong, tuple(found))


def test_references_take_out_what_makes_an_image_easy() -> None:
    found = {one.name: one for one in made_up(12, 400, 0, 2.0).attacks(1e-5)}
    assert set(found) == {"loss", "gained", "lira", "features"}
    assert 0.6 < found["loss"].auc < 0.75  # Φ(2/(√2·√10)) = 0.67: most of the spread is the images' own
    assert abs(found["lira"].auc - 0.897) < 0.02  # Φ(2/√(2·(1 + 1/4)))
    assert abs(found["gained"].auc - 0.921) < 0.02  # Φ(2/√2)
    assert found["features"].auc > 0.9, "the regression takes the images' own part out, as it is told of it"


def test_without_a_difference_no_attack_finds_one() -> None:
    for one in made_up(12, 600, 300, 0.0, seed=1).attacks(1e-5):
        assert abs(one.auc - 0.5) < 0.03, one.name
        assert one.epsilon == 0.0, one.name


def test_few_runs_have_no_likelihood_ratio() -> None:
    assert [one.name for one in made_up(4, 40, 0, 1.0).attacks(1e-5)] == ["loss", "gained", "features"]
    assert [one.name for one in made_up(2, 40, 20, 1.0).attacks(1e-5)] == [
        "loss",
        "gained",
        "loss on canaries",
        "gained on canaries",
    ]


def test_canaries_that_are_told_apart_show_a_large_epsilon() -> None:
    assert made_up(4, 400, 400, 50.0).epsilon(1e-5) > 3.0
    assert made_up(4, 400, 400, 0.0).epsilon(1e-5) == 0.0
    assert made_up(4, 400, 0, 50.0).epsilon(1e-5) == 0.0


def test_labels_of_canaries_are_wrong_and_all_others_right() -> None:
    source = open_source(DATA)
    labels, wrong = mislabelled(source, 10, np.random.default_rng(0))
    assert wrong.sum() == 10
    assert torch.equal(labels != source.train.labels, torch.from_numpy(wrong))
    assert labels.min() >= 0
    assert labels.max() < len(source.class_names)


def test_a_logistic_regression_is_the_one_that_minimises_its_objective() -> None:
    draws = np.random.default_rng(0)
    rows = draws.normal(size=(200, 3))
    labels = rows @ [2.0, -1.0, 0.0] + draws.normal(size=200) > 0
    found = logistic(rows, labels, rows)
    assert np.mean((found > 0) == labels) > 0.85
    from sklearn.linear_model import LogisticRegression

    scaled = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    known = LogisticRegression(C=1.0, tol=1e-8).fit(scaled, labels).decision_function(scaled)
    assert np.allclose(found, known, atol=1e-3)


def test_runs_are_of_the_real_federation_with_other_images_each_time(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    backbone, cache = load_backbone(tiny.MODEL, tiny.PRETRAINED), FeatureCache(tmp_path)
    spec = SPEC | {"privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 4.0}}
    plan = ShadowPlan(spec, (Site("a", DATA),), "a", 4, 6)
    shadows = run_shadows(plan, served, backbone, cache)
    present = np.stack([run.present for run in shadows.runs])
    assert 0.3 < present.mean() < 0.7
    assert shadows.canaries.sum() == 6
    assert shadows.claimed is not None
    assert 0 < shadows.claimed < 10
    assert len({run.loss.tobytes() for run in shadows.runs}) == 4, "other images and another seed each time"
    again = run_shadows(ShadowPlan(spec, (Site("a", DATA),), "a", 4, 6), served, backbone, cache)
    assert all(np.array_equal(one.loss, other.loss) for one, other in zip(shadows.runs, again.runs, strict=True))
    with pytest.raises(CommandError, match="no trainer of the run file is called 'b'"):
        run_shadows(ShadowPlan(SPEC, (Site("a", DATA),), "b", 4, 0), served, backbone, cache)
    with pytest.raises(CommandError, match="canaries of"):
        run_shadows(ShadowPlan(SPEC, (Site("a", DATA),), "a", 4, 10_000), served, backbone, cache)


def test_the_command_tells_what_it_found(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(SPEC | {"clients": [{"name": "a", "data": DATA}]}))
    told = CliRunner().invoke(app, ["audit", "run", str(run), "--seeds", "2", "--canaries", "8", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout.splitlines()[-1])
    assert (found["client"], found["runs"], found["canaries"], found["epsilon_claimed"]) == ("a", 2, 8, None)
    assert {one["name"] for one in found["attacks"]} >= {"loss", "loss on canaries"}
    over = CliRunner().invoke(app, ["audit", "run", str(run), "--seeds", "2", "--max-auc", "0.01"])
    assert (over.exit_code, "has an AUC of" in over.stderr) == (Exit.BAD_INPUT, True)


@pytest.mark.slow
def test_intervals_cover_what_they_should() -> None:
    """Of 200 toys each at least 93 %; the bound on ε of a randomised response stays below its ε as often."""
    draws, covered, below = np.random.default_rng(0), 0, 0
    truth = 0.7602  # Φ(1/√2)
    for number in range(200):
        members, others = draws.normal(1, 1, 100), draws.normal(0, 1, 100)
        low, high = interval(members, others, seed=number)
        covered += low <= truth <= high
        answers = [
            np.where(draws.random(400) < share, 1.0, 0.0) + 1e-9 * draws.random(400) for share in (0.75, 0.25)
        ]  # ε = ln 3
        below += epsilon_bound(answers[0], answers[1], 0.0) <= np.log(3)
    assert covered >= 0.93 * 200, covered
    assert below >= 0.93 * 200, below
    rates = [clopper_pearson(int(draws.binomial(50, 0.1)), 50) for _ in range(400)]
    assert sum(low <= 0.1 <= high for low, high in rates) >= 0.93 * 400


@pytest.mark.slow
def test_untrained_prompts_tell_nothing_and_long_unprotected_training_tells_canaries(tmp_path: Path) -> None:
    """AUC 0.5 ± 0.03 before training, above 0.9 on canaries after a long one without protection."""
    torch.set_num_threads(1)
    backbone, cache = load_backbone(tiny.MODEL, tiny.PRETRAINED), FeatureCache(tmp_path)
    data = "symbols:neon?topic=weather&per_class=60&test_per_class=2"
    short = {"epochs": 1, "learning_rate": 1e-9, "batch_size": 64}
    idle = run_shadows(ShadowPlan(SPEC | {"training": short}, (Site("a", data),), "a", 8, 240), served, backbone, cache)
    for one in idle.attacks(1e-5):
        if one.name != "features":  # fitted on few rows: its spread is larger than the bound
            assert abs(one.auc - 0.5) < 0.03, (one.name, one.auc)
    long = {"epochs": 60, "learning_rate": 3e-3, "optimizer": "adam", "weight_decay": 0.0, "batch_size": 32}
    spec = SPEC | {"method": {"name": "fedclip"}, "training": long, "rounds": 2}
    told = {
        one.name: one.auc
        for one in run_shadows(ShadowPlan(spec, (Site("a", data),), "a", 4, 100), served, backbone, cache).attacks(1e-5)
    }
    assert told["gained on canaries"] > 0.9, told


def test_figures_of_attacks_are_what_they_say() -> None:
    found = attack("loss", np.array([3.0, 2.0, 1.0]), np.array([0.0, -1.0, 2.5]))
    assert found.auc == pytest.approx(7 / 9)
