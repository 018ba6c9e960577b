"""The benchmark of the text-side methods' steps: with nothing kept and on kept features a step is the same step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import text_steps
from benchmarks.harness import MOST_DEVIATION, RATE_OF_COMPARISON, Step, largest_deviation, random_backbone
from benchmarks.text_steps import OPTIONS, make_task, measure, our_steps, start_of
from promptfed.shared.clip import tiny

CLASSES, BATCH = 3, 4


FIRST = ("pfedmoap", "fedplot")  # a group of parameters of its own, patch features


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(x, marks=pytest.mark.slow) for x in OPTIONS if x not in FIRST)]
)
def test_both_ways_are_one_step(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    backbone = random_backbone(tiny.MODEL)
    task = make_task(backbone, name, CLASSES, BATCH, tmp_path)
    found = measure(task, backbone, repeats=1, steps=2)
    assert {way: len(runs) for way, runs in found["runs"].items()} == {"plain": 1, "ours": 1}
    assert found["largest_deviation"] <= MOST_DEVIATION


def test_what_moves_otherwise_ends_the_run(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    backbone = random_backbone(tiny.MODEL)
    task = make_task(backbone, "pfedmoap", CLASSES, BATCH, tmp_path)
    start = start_of(task, backbone)
    step = our_steps(task, backbone, 1, RATE_OF_COMPARISON)
    assert set(start) == set(step.after) > {"context", "own_context", "gate.key.bias"}
    assert all(
        not torch.equal(value, start[name])
        for name, value in step.after.items()
        if not name.endswith(text_steps.WITHOUT_EFFECT)
    )
    moved = step.after["gate.value.weight"]
    other = Step(
        0.0, step.after | {"gate.value.weight": moved + 1e-3 * (moved - start["gate.value.weight"]).abs().max()}
    )
    with pytest.raises(SystemExit, match="The ways differ"):
        largest_deviation(other, step, start, text_steps.WITHOUT_EFFECT)
