"""The GPU's benchmark without a GPU: its numbers, its page, and that all parts run on the embedded backbone."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from benchmarks import coordinator_load, gpu, step
from benchmarks import step as benchmark
from benchmarks.gpu import with_words
from benchmarks.step import MOST_DEVIATION, RATE_OF_COMPARISON, Step, Task, make_task, measure
from promptfed.experiments.simulation.preparation import prepare
from promptfed.shared.clip import Backbone, load_backbone
from promptfed.shared.clip.embedded import tiny
from promptfed.shared.clip.towers import dense
from promptfed.shared.data import open_source
from promptfed.shared.methods import METHODS

SIGLIP = {
    "embed_dim": 16, "custom_text": True, "init_logit_bias": -10,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {
        "context_length": 16, "vocab_size": 1000, "hf_tokenizer_name": "nobody/has-this", "width": 24, "heads": 4,
        "layers": 2, "no_causal_mask": True, "proj_bias": True, "pool_type": "last",
    },
}  # fmt: skip


def test_the_distance_of_two_states() -> None:
    same = {"domains": torch.tensor([3e18]), "none": torch.zeros(0)}
    wanted = same | {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.5])}
    state = same | {"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([0.25])}
    assert gpu.distance(state, wanted) == 0.5, "each tensor beside its own largest entry"
    assert gpu.distance(wanted, wanted) == 0
    assert gpu.distance({}, {}) == 0


def test_a_case_that_fails_or_has_no_time_is_told_and_the_others_stay(tmp_path: Path) -> None:
    part = gpu.Part("cpu", gpu.SMALL, time.monotonic() + 300, tmp_path / "figures.jsonl", True, "steps")

    def full() -> dict[str, object]:
        raise torch.OutOfMemoryError("the device is\nfull")

    part.case("well", lambda: {"seconds": 1.0})
    part.case("badly", full)
    part.until = 0.0
    part.case("late", full)
    found = gpu.read(part.out)
    assert found["parts"]["steps"] == {
        "well": {"seconds": 1.0},
        "badly": {"failed": "OutOfMemoryError: the device is full"},
        "late": {"skipped": "no time was left"},
    }


def test_the_seconds_are_those_of_all_calls(tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    for seconds in (500.0, 283.0):
        gpu.append(file, {"about": {"device": "one", "torch": "2"}, "smoke": False})
        gpu.append(file, {"part": "steps", "case": "ViT-B-16 plan 10", "ours, s": seconds})
        gpu.append(file, {"seconds": seconds})
    told = gpu.page(gpu.read(file), gpu.BEGIN + gpu.END)
    assert "783 s, all calls together" in told
    assert "| plan 10 | 283 |" in told


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert "there is no CUDA device here" in capsys.readouterr().err


def test_the_page_is_made_of_the_numbers() -> None:
    text = gpu.PAGE.read_text()
    assert gpu.page(gpu.read(gpu.NUMBERS), text) == text, "python -m benchmarks.gpu --page"


@pytest.mark.parametrize("model", ["promptfed-tiny", "small-siglip"])
def test_each_method_has_a_federation_that_fits(model: str, tmp_path: Path) -> None:
    (tmp_path / "small-siglip.json").write_text(json.dumps(SIGLIP))
    open_clip.add_model_config(tmp_path)
    backbone = with_words(load_backbone(model, "embedded" if model == "promptfed-tiny" else None))
    for name in sorted(METHODS):
        spec, sites = gpu.plan(model, backbone.pretrained or "random", name, 2)
        domains = {open_source(site.data).domain.description for site in sites}
        assert len(domains) == 2
        prepare(spec, sites, 1, backbone, False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_parts_run_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "smoke.jsonl"
    assert gpu.main(["--device", "cpu", "--smoke", "--seconds", "600", "--out", str(out)]) == 0
    found = gpu.read(out)
    assert found is not None
    parts = found["parts"]
    assert set(parts) == set(gpu.PARTS)
    cases = [case for part in parts.values() for case in part.values()]
    assert not [case for case in cases if {"failed", "skipped"} & set(case)]
    model = next(iter(gpu.SMALL))
    for name in METHODS:
        assert parts["methods"][f"{model} {name} cpu"]["distance"] == 0  # the same computation on the same device
    assert parts["clients"][f"{model} pool 4"]["same_state_as_in_turn"]
    hashes = {parts["crews"][f"{model} crews {count}"]["state_hash"] for count in (1, 2)}
    assert hashes == {parts["clients"][f"{model} pool 1"]["state_hash"]}
    assert parts["twice"][f"{model} promptfl"]["same"]
    full = parts["memory"][f"{model} plan"]
    assert full["named"], full["failure"]
    assert full["same_state_after"]


# The benchmark of a training step: every way is the same step, and another step ends the run.


CLASSES, BATCH = 3, 4


def promptfl() -> Task:
    torch.set_num_threads(1)
    return make_task(benchmark.random_backbone(tiny.MODEL), "promptfl", CLASSES, BATCH)


def test_all_ways_are_one_step() -> None:
    measured = measure(promptfl(), repeats=1, steps=2)
    assert {way: len(runs) for way, runs in measured["runs"].items()} == dict.fromkeys(benchmark.COLUMNS, 1)
    assert 0 < measured["seconds"]["cached"] < measured["seconds"]["plain"]
    assert measured["largest_deviation"] <= MOST_DEVIATION


def test_what_moves_otherwise_ends_the_run() -> None:
    task = promptfl()
    step = task.steps("ours", 1, RATE_OF_COMPARISON)
    start, moved = task.payload["context"], step.after["context"]
    assert not torch.equal(start, moved)
    other = Step(0.0, {"context": moved + 1e-3 * (moved - start).abs().max()})
    with pytest.raises(SystemExit, match="The variants differ"):
        benchmark.largest_deviation(other, step, task.payload)


@pytest.fixture(scope="module")
def narrow() -> Backbone:
    torch.set_num_threads(1)
    return step.narrow("ViT-B-16")


@pytest.mark.parametrize("rows", [dense.ROWS, 8], ids=["one sequence", "several sequences"])
@pytest.mark.parametrize(("name", "most"), [("promptfl", 400), ("fedpgp", 600), ("protected", 600)])
def test_a_step_on_a_gpu_s_path_starts_few_operations(
    name: str, most: int, rows: int, narrow: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ViT-B/16's blocks, at any number of classes: with more there are more sequences. There were 2,337."""
    monkeypatch.setattr(dense, "ROWS", rows)
    task = make_task(narrow, "promptfl" if name == "protected" else name, 10, BATCH)
    steps = partial(task.steps, "protected" if name == "protected" else "ours", rate=RATE_OF_COMPARISON)
    assert 200 < step.of_a_step(narrow, "gpu", steps) <= most


def test_the_command_counts_operations(
    narrow: Backbone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "narrow", lambda model: narrow)
    monkeypatch.setattr(step, "METHODS", ("promptfl",))
    options = ["--models", "ViT-B-16", "--classes", "3", "--batch", "4", "--operations", "--protected"]
    monkeypatch.setattr(sys, "argv", ["step", *options])
    benchmark.main()
    plain, protected = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (plain["protected"], protected["protected"]) == (False, True)
    assert 200 < plain["operations"]["gpu"] < plain["operations"]["plain"] < plain["operations"]["cpu"]


def test_a_step_of_the_image_tower_starts_few_more_than_open_clip_s(narrow: Backbone) -> None:
    task = gpu.step_task(narrow, "plan", CLASSES)
    loop = gpu.PlainLoop(task, gpu.PROMPTS["plan"], True, False)
    ours = step.of_a_step(narrow, "gpu", partial(task.steps, "ours", rate=gpu.NO_RATE))
    assert 300 < ours <= 1.2 * step.of_a_step(narrow, "plain", loop.steps)


# The coordinator's benchmark: its table, and a case of each server.


OURS: dict[str, Any] = {
    "kilobytes": 32, "updates": 500, "too_many_uploads": 50,
    "enrolments_per_second": 1234.5, "idle_mb": 500.0, "peak_mb": 580.0, "cpu_ms_per_update": 1.25,
}  # fmt: skip


def case(database: str, clients: int, rate: float) -> dict[str, Any]:
    return OURS | {
        "database": database, "clients": clients, "updates_per_second": rate, "whole_run_updates_per_second": rate / 2,
    }  # fmt: skip


def flower(clients: int, rate: float) -> dict[str, Any]:
    about = {"flwr": "1.41.0", "idle_mb": 70.0, "peak_mb": 90.0, "cpu_ms_per_update": 0.5}
    measured = {"updates_per_second": rate, "whole_run_updates_per_second": rate}
    return {"database": "flower", "kilobytes": 32, "clients": clients, "updates": 500, **about, **measured}


def test_the_table_tells_the_median_of_repeats() -> None:
    cases = [case("sqlite", 100, rate) for rate in (900.0, 600.0, 750.0)]
    assert coordinator_load.medians([*cases, flower(100, 500.0)]).splitlines()[2:] == [
        "| sqlite | 32 | 100 | 375.0 | 750.0 | 1.2 | 1,234.5 | 500.0 | 580.0 |",
        "| flower | 32 | 100 | 500.0 | 500.0 | 0.5 |  | 70.0 | 90.0 |",
    ]


def test_rounds_are_timed_each_and_all_together() -> None:
    times = [
        ("2026-11-27T10:00:00Z", 3.0, "2026-11-27T10:00:03Z"),
        ("2026-11-27T10:00:05Z", 2.0, "2026-11-27T10:00:07Z"),
    ]
    phases = [{"opened_at": begin, "seconds": seconds, "closed_at": end} for begin, seconds, end in times]
    assert coordinator_load.seconds_of(phases) == (5.0, 7.0)


@pytest.mark.slow
def test_a_case_of_ours_has_every_figure() -> None:
    figures = coordinator_load.measure([], 32, 10)
    assert figures["updates"] == 200
    assert figures.keys() == case("sqlite", 10, 1.0).keys() - {"database"}
    assert all(figures[name] > 0 for name in figures.keys() - {"too_many_uploads"})
