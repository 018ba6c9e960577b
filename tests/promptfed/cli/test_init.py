"""`promptfed init`: what it makes runs, and what cannot be made leaves nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.bench.presets import preset_names
from promptfed.runtime.run_file import read_run
from promptfed.shared.methods import resolve_spec
from promptfed.shared.service.reasons import Exit
from tests import ROOT
from tests.docs.warm_commands import warm_commands

PATIENCE = 300


def test_the_folder_runs_as_its_readme_says(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert CliRunner().invoke(app, ["init", str(folder)]).exit_code == 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    said = (folder / "README.md").read_text()
    with warm_commands(tmp_path, "python") as programs:
        for words in (
            ["-m", "promptfed", "simulate", "run.yaml"],
            ["my_method.py"],
            ["-m", "pytest", "-q", "-p", "no:cacheprovider"],
        ):
            assert " ".join(word for word in words if word not in ("-m", "-q", "-p", "no:cacheprovider")) in said
            whole = [programs / "python", *words]
            done = subprocess.run(whole, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "1 passed" in done.stdout or "zero-shot" in done.stdout


@pytest.mark.parametrize(("arguments", "why"), [(["mine", "--from", "paper:fedpgp-offic"], "use one of")])
def test_what_cannot_be_made_leaves_nothing(
    arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", *arguments])
    assert done.exit_code == Exit.BAD_INPUT
    assert why in " ".join(done.output.split())
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("preset", ["paper:fedpgp-office", "paper:plan-pacs", "paper:fedtpg-5-classes"])
def test_settings_are_written_before_their_data_are_there(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "mine", "--from", preset, "--root", "d"])
    assert done.exit_code == 0, done.output
    assert "this table wants below --root d: " in done.output.splitlines()[-1]
    text = Path("mine/run.yaml").read_text()
    assert "# Missing: " in text
    raw = yaml.safe_load(text)
    assert "class_names" not in raw
    assert raw["rounds"] > 1
    assert len(raw["clients"]) > 1
    small = raw | {"backbone": {"model": "promptfed-tiny", "pretrained": "embedded"}}  # the paper's is a download
    Path("mine/run.yaml").write_text(yaml.safe_dump(small))
    refused = CliRunner().invoke(app, ["simulate", "mine/run.yaml"])
    assert refused.exit_code == Exit.BAD_INPUT, refused.output
    assert str(tmp_path / "d") in refused.stderr


def test_data_that_are_there_and_do_not_fit_are_no_missing_data(tmp_path: Path) -> None:
    for domain, kind in (("amazon", "bike"), ("caltech", "bike"), ("dslr", "mug"), ("webcam", "bike")):
        place = tmp_path / "office_caltech_10" / domain / kind
        place.mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (32, 32), (number, 0, 0)).save(place / f"{number}.png")
    arguments = ["init", str(tmp_path / "mine"), "--from", "paper:fedpgp-office", "--root", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == Exit.BAD_INPUT
    assert not (tmp_path / "mine").exists()


def test_a_paper_s_settings_become_a_run_file(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for domain in ("amazon", "caltech", "dslr", "webcam"):
        for kind in ("bike", "mug"):
            place = tmp_path / "data" / "office_caltech_10" / domain / kind
            place.mkdir(parents=True)
            for number in range(10):
                pixels = draws.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
    folder, root = tmp_path / "mine", str(tmp_path / "data")
    done = CliRunner().invoke(app, ["init", str(folder), "--from", "paper:fedpgp-office", "--root", root])
    assert done.exit_code == 0, done.output
    run = read_run(folder / "run.yaml")
    spec = resolve_spec(run.spec)
    assert (spec.name, spec.method["name"], spec.backbone.model) == ("fedpgp-office", "fedpgp", "ViT-B-16")
    assert [site.name for site in run.sites] == ["caltech", "dslr", "webcam"]
    assert all(root in uri for site in run.sites for uri, _ in site.uris())


def test_the_papers_settings_are_listed() -> None:
    done = CliRunner().invoke(app, ["init", "--list"])
    assert all(name in done.output for name in preset_names())
