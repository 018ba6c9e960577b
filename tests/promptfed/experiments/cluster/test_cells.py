"""A bench's cells as tasks, without Ray: a Ray of this process runs each task at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from promptfed.cli.bench import make_bench
from promptfed.cli.main import app
from promptfed.experiments.bench.bench_folder import claim
from promptfed.experiments.bench.runner import Bench, Job, Runner
from promptfed.experiments.cluster.cells import RayRunner, run_cell
from promptfed.experiments.cluster.connection import Node
from promptfed.experiments.cluster.run import versions
from promptfed.experiments.protocols.setting import Setting
from promptfed.sdk.errors import CommandError, Exit

DATA = "symbols:painting?topic=faces&per_class=2&test_per_class=1"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def small(seeds: str = "0,1") -> Bench:
    setting = Setting(data=(DATA,), clients=2, partition="iid")
    return make_bench("personalisation", "zero_shot", setting, seeds, None, None, None)


@dataclass
class AtOnce:
    """What is used of Ray: tasks that run when they are asked for."""

    resources: list[tuple[float, float]] = field(default_factory=list)
    cancelled: int = 0
    exceptions: Any = field(default_factory=lambda: SimpleNamespace(RayError=RuntimeError))

    def remote(self, function: Callable[..., Any]) -> Any:
        def options(num_cpus: float, num_gpus: float, max_retries: int) -> Any:
            self.resources.append((num_cpus, num_gpus))
            return SimpleNamespace(remote=lambda *arguments: _Result(function(*arguments)))

        return SimpleNamespace(options=options)

    def wait(self, references: Sequence[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return list(references[-num_returns:]), list(references[:-num_returns])

    def get(self, reference: _Result) -> Any:
        return reference.value

    def cancel(self, reference: _Result, force: bool) -> None:
        self.cancelled += 1


@dataclass(eq=False)
class _Result:
    value: Any


def runner(out: Path, ray: AtOnce, cpus: float = 2.0) -> RayRunner:
    cluster = SimpleNamespace(ray=ray, nodes=lambda: [Node("192.0.2.1", cpus, 0.0)])
    return RayRunner(out, cluster=lambda: cluster)


def test_the_runs_are_those_of_this_process_and_progress_is_told(tmp_path: Path) -> None:
    bench, ray, there = small("0"), AtOnce(), tmp_path / "there"
    told: list[tuple[int, int]] = []

    def shown(done: int, total: int, job: Job) -> None:
        told.append((done, total))

    claim(there, bench)
    found = runner(there, ray).run_all(bench.jobs(), shown)
    wanted = Runner(tmp_path / "here").run_all(bench.jobs(), lambda *_: None)
    timed = {"wall_seconds", "setup_seconds", "provenance"}
    assert [one.model_dump(exclude=timed) for one in found] == [one.model_dump(exclude=timed) for one in wanted]
    assert ray.resources == [(1, 0.0)] * len(wanted)
    assert [total for _, total in told] == [len(wanted)] * len(told)
    # Again: nothing is left to do, and no Ray is asked.
    again = AtOnce()
    assert runner(there, again).run_all(bench.jobs(), shown) == found
    assert again.resources == []


def test_a_cell_that_cannot_be_run_ends_the_bench_with_its_words_and_the_others_are_cancelled(tmp_path: Path) -> None:
    ray, jobs = AtOnce(), small().jobs()  # nobody has claimed the folder: it is not the bench's
    with pytest.raises(CommandError, match=r"does not see .*: give --out a folder that all nodes see"):
        runner(tmp_path, ray).run_each(jobs, lambda *_: None)
    assert ray.cancelled == len(jobs) - 1


def test_a_node_of_another_version_is_refused(tmp_path: Path) -> None:
    [job, *_] = small().jobs()
    failed = run_cell((tmp_path, 1, "cpu", False), job, {**versions(), "torch": "0.1"})
    assert failed is not None
    assert "instead of 0.1: install the same on all of them" in failed.text
    assert failed.exit == Exit.BAD_INPUT


def test_no_room_for_a_single_cell_is_told_before_any_runs(tmp_path: Path) -> None:
    ray = AtOnce()
    with pytest.raises(CommandError, match="no room for 1 cell of 1 CPU: it holds 0"):
        runner(tmp_path, ray, cpus=0.5).run_each(small().jobs(), lambda *_: None)
    assert ray.resources == []


def test_options_of_ray_without_it_are_refused(tmp_path: Path) -> None:
    arguments = ["bench", "personalisation", "--data", DATA, "--methods", "zero_shot", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--gpus-per-cell", "1"])
    assert done.exit_code == Exit.BAD_INPUT
    assert "--gpus-per-cell: for --engine ray; add it, or leave them out" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()
