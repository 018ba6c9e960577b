"""The benchmark of FedOTP's step: both ways are the same step, and what is kept on disk is counted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import random_backbone
from benchmarks.patch_step import Patches, Task, make_task, measure, step
from promptfed.shared.clip import tiny
from tests.support.equality import assert_gradients


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    torch.set_num_threads(1)
    return make_task(random_backbone(tiny.MODEL), 3, batch=4, m=2, folder=tmp_path_factory.mktemp("patches"))


def test_both_ways_are_one_step(task: Task) -> None:
    plain, kept = (step(task, split, path)[1] for split, path in ((task.plain, "plain"), (task.kept, "auto")))
    assert plain.shape == (2, 2, task.backbone.d_t)
    assert float(plain.abs().sum()) > 0
    assert_gradients(kept, plain)


def test_ways_are_interleaved_and_held_against_each_other(task: Task) -> None:
    found = measure(task, plain_repeats=2, fast_repeats=3)
    assert {way: len(runs) for way, runs in found["runs"].items()} == {"plain": 2, "kept": 6}
    assert found["speedup"] == found["seconds"]["plain"] / found["seconds"]["kept"]
    in_a_file = task.kept.read(torch.tensor([0])).numel() * 2
    assert in_a_file <= found["bytes_per_image"] <= in_a_file + 1000  # and the file's head


def test_another_gradient_ends_the_run(task: Task) -> None:
    other = Patches(task.kept.labels.roll(1), task.kept.read)
    with pytest.raises(SystemExit, match="The ways differ"):
        measure(Task(task.backbone, task.prompts, task.start, task.plain, other, task.bytes), 1, 1)
