"""The benchmark of a training step: every way is the same step, and another step ends the run."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import step
from benchmarks import step as benchmark
from benchmarks.step import MOST_DEVIATION, OPTIONS, RATE_OF_COMPARISON, WITHOUT_EFFECT, Step, Task, make_task, measure
from promptfed.shared.clip import Backbone, tiny
from promptfed.shared.clip.towers import dense

CLASSES, BATCH = 3, 4
FIRST = ("promptfl", "pfedmoap", "fedotp")  # a group of parameters of its own, patch features


def task_of(name: str, folder: Path) -> Task:
    torch.set_num_threads(1)
    return make_task(benchmark.random_backbone(tiny.MODEL), name, CLASSES, BATCH, folder)


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(x, marks=pytest.mark.slow) for x in OPTIONS if x not in FIRST)]
)
def test_all_ways_are_one_step(name: str, tmp_path: Path) -> None:
    measured = measure(task_of(name, tmp_path), repeats=1, steps=2)
    ways = {"plain", "cached", "short", "ours"} if name == "promptfl" else {"plain", "cached", "ours"}
    assert {way: len(runs) for way, runs in measured["runs"].items()} == dict.fromkeys(ways, 1)
    assert 0 < measured["seconds"]["cached"] < measured["seconds"]["plain"]
    assert measured["largest_deviation"] <= MOST_DEVIATION


def test_chunks_of_classes_are_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CHUNK", 2)
    task = task_of("promptfl", tmp_path)
    backbones: list[benchmark.SlowBackbone] = []
    made = benchmark.SlowBackbone

    def noted(*given: object) -> benchmark.SlowBackbone:
        backbones.append(made(*given))
        return backbones[-1]

    monkeypatch.setattr(benchmark, "SlowBackbone", noted)
    measured = measure(task, repeats=1, steps=1)
    assert measured["largest_deviation"] <= MOST_DEVIATION
    assert any(backbone.untimed > 0 for backbone in backbones)


def test_what_moves_otherwise_ends_the_run(tmp_path: Path) -> None:
    task = task_of("pfedmoap", tmp_path)
    start = task.start()
    step = task.steps("ours", 1, RATE_OF_COMPARISON)
    assert set(start) == set(step.after) > {"context", "own_context", "gate.key.bias"}
    moved_all = [not torch.equal(value, start[name]) for name, value in step.after.items()
                 if not name.endswith(WITHOUT_EFFECT)]  # fmt: skip
    assert all(moved_all)
    name = "gate.value.weight"
    moved = step.after[name]
    other = Step(0.0, step.after | {name: moved + 1e-3 * (moved - start[name]).abs().max()})
    with pytest.raises(SystemExit, match="The variants differ"):
        benchmark.largest_deviation(other, step, start)


def test_the_command_prints_a_table_and_writes_all_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--models", "promptfed-tiny", "--classes", "3", "--batch", "4", "--repeats", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["step", *options, "--protected", "--json", str(tmp_path / "step.json")])
    benchmark.main()
    assert "| promptfed-tiny | `promptfl` | 3 |" in capsys.readouterr().out
    report = json.loads((tmp_path / "step.json").read_text())
    [result] = report["results"]
    assert set(result["seconds"]) == {"plain", "cached", "short", "ours", "protected"}
    assert report["provenance"]["threads"] == 1


@pytest.fixture(scope="module")
def narrow() -> Backbone:
    torch.set_num_threads(1)
    return step.narrow("ViT-B-16")


@pytest.mark.parametrize("rows", [dense.ROWS, 8], ids=["one sequence", "several sequences"])
@pytest.mark.parametrize(("name", "most"), [("promptfl", 400), ("fedpgp", 600), ("protected", 600)])
def test_a_step_on_a_gpu_s_path_starts_few_operations(
    name: str, most: int, rows: int, narrow: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ViT-B/16's blocks, at any number of classes: with more there are more sequences. There were 2,337."""
    monkeypatch.setattr(dense, "ROWS", rows)
    task = make_task(narrow, "promptfl" if name == "protected" else name, 10, BATCH, tmp_path)
    steps = partial(task.steps, "protected" if name == "protected" else "ours", rate=RATE_OF_COMPARISON)
    assert 200 < step.of_a_step(narrow, "gpu", steps) <= most


def test_the_command_counts_operations(
    narrow: Backbone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "narrow", lambda *given: narrow)
    options = ["--models", "ViT-B-16", "--classes", "3", "--batch", "4", "--operations", "--protected"]
    monkeypatch.setattr(sys, "argv", ["step", *options])
    benchmark.main()
    plain, protected = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (plain["protected"], protected["protected"]) == (False, True)
    assert 200 < plain["operations"]["gpu"] < plain["operations"]["plain"] < plain["operations"]["cpu"]


@pytest.mark.parametrize(
    "name", ["plan", *(pytest.param(x, marks=pytest.mark.slow) for x in benchmark.IMAGES if x != "plan")]
)
def test_a_step_of_the_image_tower_starts_few_more_than_open_clip_s(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--models", "ViT-B-16", "--classes", "3", "--batch", "4", "--operations", "--methods", name]
    monkeypatch.setattr(sys, "argv", ["step", *options])
    benchmark.main()
    counted = json.loads(capsys.readouterr().out)["operations"]
    assert 300 < counted["gpu"] <= 1.2 * counted["open_clip"]


def test_images_are_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["step", "--methods", "plan"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "only their --operations are counted" in capsys.readouterr().err
