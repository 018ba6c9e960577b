"""``predict --coverage``: sets by the scores of calibration images, of one site or of several."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import promptfed
from promptfed.cli.main import app
from promptfed.client_service.training.data import ClientData
from promptfed.client_service.training.evaluation import probabilities
from promptfed.export.adapted_model import AdaptedModel
from promptfed.shared.clip import FeatureCache, load_backbone
from promptfed.shared.data import open_source
from promptfed.shared.metrics.conformal import calibration_of, prediction_set

pytestmark = pytest.mark.extended
DATA = "symbols:neon?topic=signs&per_class=8&test_per_class={count}"


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    assert result.exit_code == code or (code and result.exit_code), result.output
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[promptfed.Result, Path]:
    names = list(open_source(DATA.format(count=1)).class_names)
    result = promptfed.run("fedtaskres", {"one": DATA.format(count=10)}, rounds=2, class_names=names)
    folder = tmp_path_factory.mktemp("sets")
    result.export(folder / "export")
    for site, count in (("one", 30), ("two", 20)):
        run("score", str(folder / "export"), DATA.format(count=count), "--out", str(folder / site))
    run("pool", str(folder / "one"), str(folder / "two"), "--out", str(folder / "pooled"))
    return result, folder


def test_the_pooled_histogram_is_that_of_all_images(made: tuple[promptfed.Result, Path], tmp_path: Path) -> None:
    result, folder = made
    model, backbone = AdaptedModel.of(result.taken), load_backbone("promptfed-tiny", "embedded")
    labels, told = [], []
    for count in (30, 20):
        source = open_source(DATA.format(count=count))
        names = source.class_names
        split = ClientData(source, backbone, FeatureCache(tmp_path / str(count))).split("test", names)
        labels.append(split.labels)
        told.append(probabilities(model.serve(backbone, names).classifier, split))
    wanted = calibration_of(torch.cat(labels).numpy(), torch.cat(told).numpy(), names)
    found = json.loads((folder / "pooled" / "pooled.json").read_text())["calibration"]
    assert found == json.loads(wanted.model_dump_json())


@pytest.mark.parametrize("by_class", [False, True])
def test_answers_have_the_set_of_the_definition(
    made: tuple[promptfed.Result, Path], tmp_path: Path, by_class: bool
) -> None:
    result, folder = made
    source = open_source("symbols:neon?topic=signs&per_class=1&test_per_class=2&test_seed=5")
    images = tmp_path / "images"
    images.mkdir()
    for row in range(len(source.test)):
        source.test.image(row).save(images / f"{row}.png")
    calibration = calibration_from(folder / "pooled" / "pooled.json")
    options = ["--coverage", "0.8", "--calibration", str(folder / "pooled" / "pooled.json")]
    options += ["--by-class"] * by_class
    run("predict", str(images), "--export", str(folder / "export"), "--out", str(tmp_path / "told.csv"), *options)
    rows = list(csv.DictReader((tmp_path / "told.csv").open()))
    kinds = set()
    for row in rows:
        answer = result.predict(images / row["image"]).probabilities
        limits = calibration.of(None).thresholds(0.8) if by_class else None
        inside = prediction_set(answer, calibration.of(None).threshold(0.8), limits)
        wanted = "abstains" if len(inside) in (0, len(answer)) else "|".join(inside)
        assert row["set"] == wanted
        kinds.add(len(inside))
    assert len(kinds) > 1  # sets of different sizes
    told = run("predict", str(images / "0.png"), "--export", str(folder / "export"), "--json", *options)
    [first] = json.loads(told.stdout.strip().splitlines()[-1])
    assert first["abstains"] is (len(first["set"]) in (0, len(first["classes"])))


def calibration_from(path: Path) -> Any:
    from promptfed.shared.metrics.conformal import Calibration

    return Calibration.model_validate(json.loads(path.read_text())["calibration"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--coverage", "0.9"], "the export has no calibration scores: give --calibration FILE"),
        (["--by-class"], "belong to --coverage"),
        (["--group", "scanner=old"], "belong to --coverage"),
        (
            ["--coverage", "0.9", "--calibration", "{scores}", "--group", "scanner=old"],
            "there are no calibration scores of scanner=old; subgroups that have some: none",
        ),
        (["--coverage", "0.9", "--calibration", "absent.json"], "cannot read absent.json"),
        (["--coverage", "0.9", "--calibration", "{export}/card.json"], "holds no figures of an export"),
        (["--coverage", "0.9", "--calibration", "{other}"], "has the figures of another export"),
    ],
)
def test_what_cannot_be_used_is_said(
    made: tuple[promptfed.Result, Path], tmp_path: Path, options: list[str], text: str
) -> None:
    _, folder = made
    figures = json.loads((folder / "one" / "score.json").read_text()) | {"state": "sha256:" + "0" * 64}
    (tmp_path / "other.json").write_text(json.dumps(figures))
    open_source(DATA.format(count=1)).test.image(0).save(tmp_path / "image.png")
    files = {"export": folder / "export", "other": tmp_path / "other.json", "scores": folder / "one" / "score.json"}
    given = [option.format(**files) for option in options]
    outcome = run("predict", str(tmp_path / "image.png"), "--export", str(folder / "export"), *given, code=1)
    assert text in str(outcome.exception) + outcome.output
