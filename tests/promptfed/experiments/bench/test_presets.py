"""The papers' settings: every preset is whole, says what its paper says, and runs, shrunk, on made-up images."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from PIL import Image
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.bench.presets import preset_names, read_preset
from promptfed.experiments.bench.protocols import PROTOCOLS
from promptfed.experiments.bench.tables import TableRow, interleaved
from promptfed.shared.data import Source, open_source, public_sets
from promptfed.shared.data.options import Options
from promptfed.shared.errors import PromptfedError
from promptfed.shared.methods import METHODS, make_method, resolve_spec
from promptfed.shared.service.reasons import Exit
from promptfed.shared.spec.spec import TrainingSpec

CLASSES = ("bird", "feather", "headphones", "ice cream", "teapot", "tiger", "whale", "windmill", "wine glass", "zebra")
SHRUNK = """
backbone: {model: promptfed-tiny, pretrained: embedded}
training: {epochs: 1, batch_size: 8}
"""


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_describes_a_table_that_can_be_run(name: str) -> None:
    preset = read_preset(name)
    protocol = PROTOCOLS[preset.protocol]
    assert set(preset.paper) == set(preset.panels())
    for panel in preset.panels():
        bench = preset.bench((0,), panel=panel, root="/data")
        assert set(preset.columns) <= set(protocol.columns(bench.setting))
        assert "{" not in "".join(bench.setting.data).replace("{domain}", "").replace("{}", "")
        labels = {entry.label for entry in bench.entries}
        assert set(preset.paper[panel]) & labels, "nothing of ours to compare with"
        for entry in bench.entries:
            named = {"name": "x", "class_names": ["a", "b"], **preset.spec}  # as the protocols give them
            resolved = resolve_spec(entry.spec(named, preset.m))
            assert resolved.training.epochs == preset.spec["training"]["epochs"]
        for row in preset.figures(panel):
            assert all(0 < value <= 1 for value in row.scores[0].values())


@pytest.mark.parametrize("name", [name for name in preset_names() if len(read_preset(name).columns) > 1])
def test_printed_means_are_those_of_their_rows_or_left_out_and_told(name: str) -> None:
    """A figure that was copied wrongly shows itself in its mean; the papers' own slips are left out."""
    preset = read_preset(name)
    harmonic = "harmonic mean" in preset.columns
    parts = slice(0, 3) if harmonic else slice(1 if preset.protocol == "cross-dataset" else 0, -1)
    for panel, figures in preset.paper.items():
        for label, row in figures.items():
            numbers, printed = [value for value in row[parts] if value is not None], row[-1]
            if printed is None and len(numbers) == len(row[parts]):
                assert "left out" in preset.notes, (panel, label)
            elif printed is not None:
                expected = 3 / sum(1 / value for value in numbers) if harmonic else fmean(numbers)
                assert abs(expected - printed) <= 0.02, (panel, label)


PINNED = {"m", "start"}  # hyperparameters that say where training starts


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_says_what_our_defaults_may_change(name: str) -> None:
    preset = read_preset(name)
    for entry in preset.bench((0,), panel=preset.panels()[0]).entries:
        given = entry.spec({"name": "x", "class_names": ["a", "b"], **preset.spec}, preset.m)
        assert {"epochs", "batch_size", "learning_rate", "schedule"} <= set(given["training"]), entry.label
        assert "rounds" in given
        fields = METHODS[given["method"]["name"]].Hyper.model_fields
        starts = {option for option in PINNED & set(fields) if option == "start" or fields[option].default is None}
        assert starts <= set(given["method"]) or given["method"]["name"] == "fedtpg", entry.label


@pytest.mark.parametrize("name", [name for name in preset_names() if "one-domain-out" in read_preset(name).protocol])
def test_an_unseen_domain_is_tested_whole_and_has_words(name: str) -> None:
    preset = read_preset(name)
    assert preset.setting.target_images == "all"
    if any(make_method(entry.method).needs.domain_descriptions for entry in preset.bench((0,)).entries):
        assert preset.setting.words.keys() == set(preset.setting.domains)
        assert len(set(preset.setting.words.values())) == len(preset.setting.domains)
        assert all(words.count("{}") == 1 for words in preset.setting.words.values())


def test_words_of_a_preset_reach_clients_and_evaluator(tmp_path: Path) -> None:
    made_up(tmp_path, "paper:fastpt-vlcs")
    trial = read_preset("paper:fastpt-vlcs").bench((0,), root=str(tmp_path)).jobs()[0].trial
    assert {site.name: site.domain for site in trial.sites} == {
        "LABELME": "a photo of a {} in a street or a room", "SUN": "a photo of a scene with a {}",
        "PASCAL": "an everyday photo of a {}", "target-CALTECH": "a photo of a single {}",
    }  # fmt: skip
    assert "test_on=all" in trial.sites[-1].data


def test_what_a_preset_lays_down_is_the_papers() -> None:
    plan = read_preset("paper:plan-pacs")
    spec = resolve_spec(plan.bench((0,), root="/data").entries[-1].spec({"name": "x", **plan.spec}, plan.m))
    assert (spec.method["name"], spec.method["m"], spec.rounds) == ("plan", 8, 20)
    assert (spec.training.learning_rate, spec.training.batch_size, spec.training.epochs) == (0.0015, 32, 1)
    cifar = read_preset("paper:fedpgp-cifar")
    assert (cifar.setting.clients, cifar.setting.alpha, cifar.spec["rounds"]) == (100, 0.3, 150)
    assert list(read_preset("paper:pfedpg-dermoscopic").methods)[-1] == "pfedpg:m=3"
    with pytest.raises(PromptfedError, match="there is no preset 'paper:nothing'"):
        read_preset("paper:nothing")
    with pytest.raises(PromptfedError, match="there is no preset"):
        read_preset("paper:../papers/plan-pacs")


def trainings(method: str) -> list[tuple[str, TrainingSpec]]:
    """How each row of ``method`` is trained, by its preset's name."""
    found = []
    for name in preset_names():
        preset = read_preset(name)
        for entry in preset.bench((0,), panel=preset.panels()[0], root="/data").entries:
            if entry.method["name"] == method:
                named = {"name": "x", "class_names": ["a", "b"], **preset.spec}
                found.append((name, resolve_spec(entry.spec(named, preset.m)).training))
    assert found
    return found


def test_programs_that_crop_and_flip_do_so_here() -> None:
    """``random_resized_crop`` and ``random_flip`` in the released configurations of FL2oRA."""
    for name, training in trainings("fedlora"):
        assert training.augmentation == "crop_flip", name


def test_fedclip_has_its_released_rate_and_decay() -> None:
    for name, training in trainings("fedclip"):
        used = (training.optimizer, training.learning_rate, training.weight_decay, training.schedule)
        assert used == ("adam", 5e-5, 0.2, "constant"), name


@pytest.mark.parametrize("method", ["pfedmoap", "promptfolio"])
def test_a_released_cosine_from_two_thousandths_has_a_mean_of_one(method: str) -> None:
    for name, training in trainings(method):
        mean = training.learning_rate / (2 if training.schedule == "cosine" else 1)
        assert mean == pytest.approx(0.001), name


def test_every_client_of_fedtpg_s_cross_dataset_trains_over_its_own_names() -> None:
    preset = read_preset("paper:fedtpg-cross-dataset")
    for entry in preset.bench((0,), root="/data").entries:
        assert resolve_spec(entry.spec({"name": "x", **preset.spec}, preset.m)).method["label_space"] == "client"


@pytest.mark.parametrize("name", ["paper:fedtpg-nine-datasets", "paper:fedtpg-cross-dataset"])
def test_fedtpg_words_each_data_set_as_table_5_does(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = {
        "Caltech101": "a photo of a {}.", "Flowers102": "a photo of a {}, a type of flower.",
        "FGVCAircraft": "a photo of a {}, a type of aircraft.", "ucf101": "a photo of a person doing {}.",
        "OxfordIIITPet": "a photo of a {}, a type of pet.", "Food101": "a photo of a {}, a type of food.",
        "DTD": "a photo of a {}, a type of texture.", "StanfordCars": "a photo of a {}.", "SUN397": "a photo of a {}.",
        "EuroSAT": "a centered satellite photo of {}.", "ImageNet": "a photo of a {}.",
    }  # fmt: skip
    small = open_source("digits?shots=2")

    def opened(body: str, options: Options) -> Source:
        return replace(small, template=public_sets.TEMPLATES.get(body, public_sets.TEMPLATE))

    monkeypatch.setattr(public_sets, "open_torchvision", opened)
    class_folders(tmp_path / "ucf101")
    data = read_preset(name).setting_of("all", str(tmp_path)).data
    found = {re.split("[:/]", uri.partition("?")[0])[-1]: open_source(uri).template for uri in data}
    assert found == {key: wanted[key] for key in found}
    assert len(found) == (11 if "cross" in name else 9)


def test_the_papers_rows_stand_behind_ours() -> None:
    ours = [TableRow("zero-shot", ({"mean": 0.1},)), TableRow("plan", ({"mean": 0.2},))]
    paper = [TableRow("FedPR (paper)", ({"mean": 0.4},)), TableRow("plan (paper)", ({"mean": 0.3},))]
    labels = [row.label for row in interleaved(ours, paper)]
    assert labels == ["zero-shot", "plan", "plan (paper)", "FedPR (paper)"]


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), (shade % 256, shade * 7 % 256, shade * 31 % 256)).save(path)


def class_folders(root: Path) -> None:
    for number, name in enumerate(CLASSES):
        for index in range(3):
            picture(root / name / f"{index}.png", len(str(root)) + 13 * number + index)


def made_up(root: Path, name: str) -> None:
    """The layouts that the presets' URIs look for."""
    preset = read_preset(name)
    for panel in preset.panels():
        for uri in preset.setting_of(panel, str(root)).data:
            if uri.startswith("folder:"):
                folder = Path(uri.removeprefix("folder:").partition("?")[0])
                places = [folder / domain for domain in preset.setting.domains] if "{domain}" in uri else [folder]
                for place in places:
                    if not place.exists():
                        class_folders(place)


@pytest.mark.parametrize("name", ["fedpgp-office", pytest.param("plan-pacs", marks=pytest.mark.slow)])
def test_a_preset_runs_shrunk(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = read_preset(f"paper:{name}")
    domains = (*full.setting.domains[:2], full.setting.domains[-1])
    targets = domains[:1] if full.protocol == "leave-one-domain-out" else ()
    setting = replace(full.setting, domains=domains, targets=targets)
    small = full.model_copy(update={"setting": setting, "m": 2 if full.m else None})
    monkeypatch.setattr("promptfed.cli.bench.read_preset", lambda asked: small)
    made_up(tmp_path / "data", f"paper:{name}")
    spec = tmp_path / "shrunk.yaml"
    spec.write_text(f"rounds: 2{SHRUNK}")
    out = tmp_path / "out"
    arguments = ["bench", f"paper:{name}", "--root", str(tmp_path / "data"), "--seeds", "0", "--spec", str(spec)]
    found = CliRunner().invoke(app, [*arguments, "--out", str(out), "--json"])
    assert found.exit_code == 0, found.stderr
    for panel in small.panels():
        folder = out / panel if len(small.panels()) > 1 else out
        whole = json.loads((folder / "results.json").read_text())
        assert {run["label"] for run in whole["runs"]} == set(small.methods)
        assert all(run["rounds"] == 2 for run in whole["runs"])
        table = (folder / "table.md").read_text()
        assert all(f"{label} (paper)" in table for label in small.paper[panel])


@pytest.mark.parametrize("name", ["paper:plan-pacs", "paper:fedpgp-pathological"])
def test_data_that_are_missing_are_told_with_their_layout_and_source(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["bench", name, "--root", str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exit_code == Exit.BAD_INPUT
    text = " ".join(result.stderr.split())
    assert f"this table wants below --root {tmp_path}" in text
    wanted = {
        "paper:plan-pacs": (f"{tmp_path}/pacs/DOMAIN/CLASS/*.jpg (each of art_painting,", "DomainBed"),
        "paper:fedpgp-pathological": (f"Flowers102('{tmp_path}', download=True)", "torchvision"),
    }[name]
    assert all(part in text for part in wanted)
