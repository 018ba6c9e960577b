"""The embedded benchmark: its panels can be run, every method stands in one, and its document is made of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments import benchmark
from promptfed.experiments import runner as bench_module
from promptfed.experiments.benchmark import SEEDS, document, panels
from promptfed.shared.methods import METHODS, resolve_spec
from tests import ROOT

DOCS = ROOT / "docs"
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
reading: Nothing to be read in one round.
"""


@pytest.mark.parametrize("name", panels())
def test_a_panel_can_be_run(name: str) -> None:
    panel = panels()[name]
    whole, reduced = panel.bench(SEEDS, False).jobs(), panel.bench((0,), True).jobs()
    assert len(reduced) <= len(whole) / len(SEEDS)
    assert {job.entry.label for job in reduced} == set(panel.methods)
    for job in reduced:
        assert resolve_spec(job.spec).method["name"] == panel.methods[job.entry.label].split(":")[0]


def test_every_method_stands_in_some_panel() -> None:
    """The template's accuracy is a row of every table."""
    compared = {text.split(":")[0] for panel in panels().values() for text in panel.methods.values()}
    assert compared == set(METHODS) - {"zero_shot"}


def test_the_document_is_made_of_its_results() -> None:
    found = json.loads((DOCS / "benchmark.json").read_text())
    assert set(found["panels"]) == set(panels())
    assert (DOCS / "benchmark.md").read_text() == document(found, panels())


def test_it_runs_reduced_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "panels", tmp_path / "out"
    folder.mkdir()
    (folder / "1-small.yaml").write_text(SMALL)
    monkeypatch.setattr(benchmark, "FOLDER", folder)
    asked: list[str] = []
    simulate = bench_module.simulate
    monkeypatch.setattr(bench_module, "simulate", lambda *args, **more: asked.append("run") or simulate(*args, **more))
    command = ["bench", "embedded", "--reduced", "--json", "--out", str(out)]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.stderr
    assert asked == ["run"], "one target and one seed; two labels of the same spec share their run"
    found = json.loads(first.stdout.splitlines()[-1])
    assert found == json.loads((out / "benchmark.json").read_text())
    rows = {row["label"]: row for row in found["panels"]["1-small"]["table"]}
    assert set(rows) == {"zero-shot", "ours", "the same again"}
    assert rows["ours"]["scores"] == rows["the same again"]["scores"]
    assert set(rows["ours"]["scores"][0]) == {"chalk", "mean", "clients"}
    text = (out / "benchmark.md").read_text()
    assert text == document(found, panels())
    assert "Nothing to be read in one round." in text
    assert "the same again = `promptfl:m=2`" in text
    again = CliRunner().invoke(app, command)
    assert (again.exit_code, asked) == (0, ["run"])
    assert (out / "benchmark.md").read_text() == text
