"""Others' prompts under one's own head: nothing changes where there are none, all but the head where there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.bench.runner import BenchRun
from promptfed.experiments.simulation.simulation import SWAPPED

DATA = "symbols:{domain}?topic=weather&per_class=2&test_per_class=2"
METHODS = "singleset_vpt:head=linear:m=0,singleset_vpt:head=linear:m=2,promptfl:m=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("swapped") / "out"
    spec = out.parent / "spec.yaml"
    spec.write_text("training: {epochs: 1, learning_rate: 0.5}")
    command = ["bench", "personalisation", "--data", DATA, "--domains", "sketch,neon,chalk", "--methods", METHODS]
    found = CliRunner().invoke(
        app, [*command, "--swap-prompts", "--rounds", "1", "--seeds", "0", "--spec", str(spec), "--out", str(out)]
    )
    assert found.exit_code == 0, found.stderr
    return out


def read_runs(folder: Path) -> list[BenchRun]:
    return [BenchRun.model_validate(run) for run in json.loads((folder / "results.json").read_text())["runs"]]


def answers(run: BenchRun, split: str) -> dict[str, list[tuple[float, ...]]]:
    told: dict[str, list[tuple[float, ...]]] = {}
    for one in run.outcomes:
        if one.split == split:
            told.setdefault(one.client, []).append(one.confidence)
    return told


def test_a_head_alone_answers_as_before(folder: Path) -> None:
    run = next(run for run in read_runs(folder) if "m=0" in run.label)
    own, swapped = answers(run, "test"), answers(run, f"test@{SWAPPED}")
    assert {client: len(told) for client, told in swapped.items()} == dict.fromkeys(("sketch", "neon", "chalk"), 2)
    for client, told in swapped.items():
        for one in told:
            assert one == pytest.approx(own[client][0], abs=1e-6)


def test_prompts_are_the_others_and_the_head_is_ones_own(folder: Path) -> None:
    run = next(run for run in read_runs(folder) if "m=2" in run.label and "singleset" in run.label)
    own, swapped = answers(run, "test"), answers(run, f"test@{SWAPPED}")
    for client, told in swapped.items():
        assert told[0] != told[1] != own[client][0]
    rows = {(row["label"], row["split"]) for row in json.loads((folder / "results.json").read_text())["measures"]}
    assert ("singleset_vpt:head=linear:m=2 (prompts of others)", "test") in rows


def test_of_a_shared_method_there_is_nothing_to_swap(folder: Path) -> None:
    run = next(run for run in read_runs(folder) if "promptfl" in run.label)
    assert answers(run, f"test@{SWAPPED}") == {}
