"""The embedded benchmark: its presets can be run, and every method stands in one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.bench import presets, runner
from promptfed.experiments.bench.presets import SEEDS, embedded_presets
from promptfed.experiments.bench.runner import commit, provenance
from promptfed.shared.methods import METHODS, resolve_spec
from tests import ROOT

SMALL = """
title: Two styles
protocol: leave-one-domain-out
setting:
  data: ["symbols:{domain}?topic=weather&per_class=2&test_per_class=2"]
  domains: [neon, chalk]
reduced_targets: [chalk]
m: 2
spec: {rounds: 1, training: {epochs: 1}}
methods:
  ours: promptfl
  the same again: promptfl:m=2
notes: Nothing to be read in one round.
"""


@pytest.mark.parametrize("name", embedded_presets())
def test_a_preset_can_be_run(name: str) -> None:
    preset = embedded_presets()[name]
    whole, reduced = preset.bench(SEEDS).jobs(), preset.bench((0,), reduced=True).jobs()
    assert len(reduced) <= len(whole) / len(SEEDS)
    assert {job.entry.label for job in reduced} == set(preset.methods)
    for job in reduced:
        assert resolve_spec(job.spec).method["name"] == preset.methods[job.entry.label].split(":")[0]


def test_every_method_stands_in_some_table() -> None:
    """The template's accuracy is a row of every table."""
    compared = {text.split(":")[0] for preset in embedded_presets().values() for text in preset.methods.values()}
    assert compared == set(METHODS.own()) - {"zero_shot"}


def test_the_commit_is_this_checkouts() -> None:
    command = ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True)
    top, _, head = asked.stdout.partition("\n")
    if asked.returncode or Path(top).resolve() != ROOT.resolve():
        pytest.skip("no checkout")
    commit.cache_clear()  # a commit may have come since this process asked
    found = provenance().commit
    assert found is not None
    assert head.startswith(found.removesuffix("-dirty"))


def test_it_runs_reduced_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "presets", tmp_path / "out"
    folder.mkdir()
    (folder / "1-small.yaml").write_text(SMALL)
    monkeypatch.setattr(presets, "EMBEDDED", folder)
    asked: list[str] = []
    simulate = runner.simulate
    monkeypatch.setattr(runner, "simulate", lambda *args, **more: asked.append("run") or simulate(*args, **more))
    command = ["bench", "embedded", "--reduced", "--json", "--out", str(out)]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.stderr
    assert asked == ["run"], "one target and one seed; two labels of the same spec share their run"
    found = json.loads(first.stdout.splitlines()[-1])
    rows = {row["label"]: row for row in found["1-small"]["table"]}
    assert set(rows) == {"zero-shot", "ours", "the same again"}
    assert rows["ours"]["scores"] == rows["the same again"]["scores"]
    assert set(rows["ours"]["scores"][0]) == {"chalk", "mean", "clients"}
    again = CliRunner().invoke(app, command)
    assert (again.exit_code, asked) == (0, ["run"])
