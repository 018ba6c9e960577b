"""A validation federation: sites test one export, the state stays, and the signed report verifies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import promptfed
from promptfed.cli.main import app
from promptfed.sdk.errors import Exit
from promptfed.shared.metrics.disclosure import Range
from tests.support import exports
from tests.support.own_images import SHAPES, write_folder, write_scanned, write_scenes


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    data = {name: f"folder:{write_folder(folder / name, seed=seed, each=4)}" for seed, name in enumerate(("a", "b"))}
    spec = {"name": "promptfl", "m": 2}
    options = {"class_names": list(SHAPES), "backbone": exports.backbone(), "licence": "CC-BY-4.0"}
    promptfed.run(spec, data, rounds=1, **options).export(folder / "export")
    return folder / "export"


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sites")
    each = {"north": 24, "south": 18, "small": 3}
    return {
        n: f"folder:{write_folder(folder / n, seed=7 + k, each=count)}" for k, (n, count) in enumerate(each.items())
    }


def test_sites_test_the_export_and_the_state_stays(exported: Path, sites: dict[str, str]) -> None:
    card = json.loads((exported / "card.json").read_text())
    report = promptfed.validate(exported, sites, backbone=exports.backbone()).report
    assert report.state == card["hashes"]["state"]
    assert report.export is not None
    assert report.export.licence == "CC-BY-4.0"
    assert list(report.sites) == ["north", "small", "south"]
    north, small = report.sites["north"], report.sites["small"]
    assert north is not None
    assert small is not None
    assert {str(each.positives) for each in small.groups[0].classes} == {"<19"}  # two ranges: hits and misses
    assert all(each.auroc is None and each.sensitivity is None for each in small.groups[0].classes)
    assert all(each.auroc is not None for each in north.groups[0].classes)
    pooled = {(each.figure, each.class_name): each for each in report.figures}
    assert set(pooled["auroc", SHAPES[0]].sites) == {"north", "south"}
    assert pooled["auroc", SHAPES[0]].pooled is not None


def test_without_a_floor_figures_are_those_of_score(exported: Path, sites: dict[str, str], tmp_path: Path) -> None:
    own = {name: uri for name, uri in sites.items() if name != "small"}
    report = promptfed.validate(exported, own, floor=1, backbone=exports.backbone()).report
    scored = ["score", str(exported), sites["north"], "--out", str(tmp_path / "score")]
    assert CliRunner().invoke(app, scored).exit_code == 0
    known = json.loads((tmp_path / "score" / "score.json").read_text())
    figures = report.sites["north"]
    assert figures is not None
    [everything] = figures.groups
    assert everything.accuracy is not None
    assert everything.accuracy.model_dump() == pytest.approx(known["accuracy_interval"], abs=1e-9)
    for ours, theirs in zip(everything.classes, known["classes"], strict=True):
        assert ours.positives == Range(low=theirs["positives"], high=theirs["positives"])
        for name in ("auroc", "average_precision", "sensitivity", "specificity"):
            estimate = getattr(ours, name)
            if theirs.get(name) is None:
                assert estimate is None
            else:
                assert estimate.model_dump(exclude_none=True) == pytest.approx(theirs[name], abs=1e-9)
        assert ours.balanced_accuracy == pytest.approx(theirs["balanced_accuracy"], abs=1e-9)


def test_a_report_that_was_changed_does_not_verify(exported: Path, sites: dict[str, str], tmp_path: Path) -> None:
    signed = promptfed.validate(exported, sites, backbone=exports.backbone())
    path = tmp_path / "validation.json"
    path.write_text(signed.model_dump_json())

    def verified(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["verify", *arguments])
        return result.exit_code, result.output

    assert verified(str(path), "--key", signed.public_key)[0] == 0
    code, text = verified(str(tmp_path))
    assert code == 0
    assert "signed by the key that it names" in text
    assert verified(str(path), "--key", "ab" * 32)[0] == Exit.REFUSED
    changed = json.loads(path.read_text())
    changed["report"]["sites"]["north"] = None
    path.write_text(json.dumps(changed))
    assert verified(str(path))[0] == Exit.REFUSED
    path.write_text("{}")
    assert verified(str(path))[0] == Exit.BAD_INPUT


def test_an_export_with_several_labels_is_validated_as_such(tmp_path: Path) -> None:
    data = f"csv:{write_scenes(tmp_path / 'own', 40)}/labels.csv?group=patient&groups=scanner"
    options = {"task": "multi_label", "class_names": list(SHAPES), "backbone": exports.backbone()}
    promptfed.run({"name": "promptfl", "m": 2}, {"a": data}, rounds=1, **options).export(tmp_path / "export")
    report = promptfed.validate(tmp_path / "export", {"a": data}, floor=1, backbone=exports.backbone()).report
    assert report.method["task"] == "multi_label"
    assert {each.figure for each in report.figures} >= {"auroc", "average_precision"}


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("scanned")
    each = {"north": {"old": 14, "new": 16}, "south": {"old": 9, "new": 12, "lent": 5}}
    return {name: write_scanned(folder / name, counts, seed) for seed, (name, counts) in enumerate(each.items())}


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.output} {result.exception}"
    return result.output


@pytest.mark.extended
def test_figures_by_scanner_are_those_of_score(exported: Path, scanned: dict[str, str], tmp_path: Path) -> None:
    """Without a floor they are those of score, which pool averages."""
    signed = promptfed.validate(exported, scanned, floor=1, backbone=exports.backbone())
    for name, uri in scanned.items():
        run("score", exported, uri, "--out", tmp_path / name)
    run("pool", *(tmp_path / name for name in scanned), "--out", tmp_path / "pooled")
    pooled = json.loads((tmp_path / "pooled" / "pooled.json").read_text())
    # Figures of each scanner, pooled over the sites, are those of its images.
    of_old = [each for each in pooled["figures"] if (each["column"], each["value"]) == ("scanner", "old")]
    [accuracy] = [each for each in of_old if each["figure"] == "accuracy"]
    for name in scanned:
        scored = json.loads((tmp_path / name / "score.json").read_text())
        assert (tmp_path / name / "subgroups.png").stat().st_size > 1000
        [old] = [each for each in scored["subgroups"] if each["value"] == "old"]
        assert accuracy["sites"][name] == pytest.approx(old["accuracy_interval"])
        figures = signed.report.sites[name]
        assert figures is not None
        [told] = [group for group in figures.groups if group.value == "old"]
        assert told.accuracy is not None
        assert told.accuracy.model_dump() == pytest.approx(old["accuracy_interval"])
        for ours, theirs in zip(told.classes, old["classes"], strict=True):
            assert ours.auroc is not None
            assert ours.auroc.model_dump(exclude_none=True) == pytest.approx(theirs["auroc"])
    assert {each["value"] for each in pooled["figures"]} == {None, "old", "new", "lent"}
