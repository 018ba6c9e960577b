"""A validation federation: sites test one export, the state stays, and the signed report verifies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import promptfed
from promptfed.cli.main import app
from promptfed.sdk.errors import Exit
from promptfed.shared.api.validation_report import scores_of
from promptfed.shared.metrics.conformal import Calibration
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
        for name in ("auroc", "average_precision", "sensitivity", "specificity", "ppv", "npv"):
            estimate = getattr(ours, name)
            if theirs.get(name) is None:
                assert estimate is None
            else:
                assert estimate.model_dump(exclude_none=True) == pytest.approx(theirs[name], abs=1e-9)
        for name in ("brier", "ece", "balanced_accuracy", "f1"):
            assert getattr(ours, name) == pytest.approx(theirs[name], abs=1e-9)


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
    for pair in (False, True):
        made = promptfed.run({"name": "promptfl", "m": 2, "pair": pair}, {"a": data}, rounds=1, **options)
        made.export(tmp_path / f"export-{pair}")
        report = promptfed.validate(
            tmp_path / f"export-{pair}", {"a": data}, floor=1, backbone=exports.backbone()
        ).report
        assert report.method["task"] == "multi_label"
        assert {each.figure for each in report.figures} >= {"auroc", "average_precision"}


SCANNED = {"bins": 1000, "by_class": True, "column": "scanner", "values": ["old", "new"]}


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
def test_sites_count_calibration_scores_by_class_and_scanner(
    exported: Path, scanned: dict[str, str], tmp_path: Path
) -> None:
    """Without a floor they are those of score, of which pool makes the sum; predict takes either."""
    signed = promptfed.validate(exported, scanned, floor=1, calibration=SCANNED, backbone=exports.backbone())
    for name, uri in scanned.items():
        run("score", exported, uri, "--out", tmp_path / name)
    run("pool", *(tmp_path / name for name in scanned), "--out", tmp_path / "pooled")
    pooled = json.loads((tmp_path / "pooled" / "pooled.json").read_text())
    known, sums = Calibration.model_validate(pooled["calibration"]), scores_of(signed.report)
    assert sums is not None
    assert (sums.sites, sums.slack) == (2, 0)
    for value in ("old", "new"):
        group = ("scanner", value)
        assert sums.of(group).counts.tolist() == known.of(group).counts.tolist()
        assert sums.of(group).thresholds(0.9) == known.of(group).thresholds(0.9)
    (tmp_path / "validation.json").write_text(signed.model_dump_json())
    path = scanned["north"].partition("?")[0].removeprefix("csv:")
    image = Path(path).parent / "images" / "old-cross-0.png"
    options = ["predict", image, "--export", exported, "--json", "--coverage", "0.8", "--group", "scanner=old"]
    answers = [
        json.loads(run(*options, "--calibration", tmp_path / file).strip().splitlines()[-1])[0]
        for file in ("validation.json", "pooled/pooled.json")
    ]
    assert answers[0] == answers[1]
    assert answers[0]["set"]
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


@pytest.mark.extended
def test_with_a_floor_counts_of_scores_are_multiples_and_thresholds_only_rise(exported: Path, tmp_path: Path) -> None:
    data = {name: write_scanned(tmp_path / name, {"new": 60}, seed) for seed, name in enumerate(("north", "south"))}
    asked = {"bins": 5}
    exact, told = (
        promptfed.validate(exported, data, floor=floor, calibration=asked, backbone=exports.backbone())
        for floor in (1, 10)
    )
    assert told.report.state == json.loads((exported / "card.json").read_text())["hashes"]["state"]
    by_floor = [scores_of(signed.report) for signed in (exact, told)]
    assert by_floor[0] is not None
    assert by_floor[1] is not None
    assert by_floor[1].slack == 18
    for figures in told.report.sites.values():
        assert figures is not None
        assert figures.scores is not None
        assert all(count % 10 == 0 for row in figures.scores for count in row)
    for coverage in (0.5, 0.7, 0.9):
        assert by_floor[1].threshold(coverage) >= by_floor[0].threshold(coverage)
    changed = json.loads(told.model_dump_json())
    changed["report"]["sites"]["north"]["scores"][0][0] += 10
    (tmp_path / "validation.json").write_text(json.dumps(changed))
    options = ["predict", str(tmp_path), "--export", str(exported), "--coverage", "0.9"]
    refused = CliRunner().invoke(app, [*options, "--calibration", str(tmp_path / "validation.json")])
    assert refused.exit_code == Exit.REFUSED
    without = promptfed.validate(exported, data, backbone=exports.backbone())
    (tmp_path / "validation.json").write_text(without.model_dump_json())
    refused = CliRunner().invoke(app, [*options, "--calibration", str(tmp_path / "validation.json")])
    assert "of a validation without `calibration`" in f"{refused.output} {refused.exception}"
