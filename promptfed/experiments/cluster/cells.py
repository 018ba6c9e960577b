"""A bench whose cells (a method with a seed in one trial) are Ray tasks. The folder of results is the same.

Each task runs one federation in its process and writes its file into the bench's folder. An interrupted bench continues
with the cells that have no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from promptfed.experiments.bench.bench_folder import BENCH_FILE
from promptfed.experiments.bench.results import BenchRun
from promptfed.experiments.bench.runner import Job, Progress, Runner
from promptfed.experiments.cluster.connection import Cluster, RemoteFailure, caught, connected, expect_room, result_of
from promptfed.experiments.cluster.run import expect_same, versions
from promptfed.sdk.errors import CommandError, Exit

RETRIES = 5  # of a cell whose process or node dies
SEEN_SECONDS = 60.0  # until a file of another node must be visible here


@contextmanager
def connected_later(address: str | None) -> Iterator[Callable[[], Cluster]]:
    """A function that connects as `connected` does when it is first called; the block closes the connection."""
    with ExitStack() as stack:
        yield cache(lambda: stack.enter_context(connected(address)))


@dataclass(kw_only=True)
class RayRunner(Runner):
    """Runs jobs as Ray tasks, each with one CPU for each torch thread and ``gpus_per_cell`` GPUs."""

    cluster: Callable[[], Cluster]
    gpus_per_cell: float = 0.0

    def run_each(self, jobs: Sequence[Job], progress: Progress) -> list[BenchRun]:
        """As `Runner.run_each`, with as many jobs at once as the cluster has room for.

        Raises:
            CommandError: a job cannot be run, or the cluster has no room. Finished runs stay in the folder.
        """
        missing = {self.path(job): job for job in jobs if not self.path(job).exists()}
        if missing:
            self._run_all(list(missing.values()), jobs, progress)
        runs = []
        for done, job in enumerate(jobs):
            if not missing:
                progress(done, len(jobs), job)
            _until_seen(self.path(job))
            runs.append(self.run(job))
        return runs

    def _run_all(self, missing: list[Job], jobs: Sequence[Job], progress: Progress) -> None:
        cluster = self.cluster()
        for cpus in {self._cpus(job) for job in missing}:
            expect_room(cluster.nodes(), "cell", 1, cpus, self.gpus_per_cell)
        remote = cluster.ray.remote(run_cell)
        device = "cuda" if self.gpus_per_cell else self.device
        how = (self.out.absolute(), self.pool, device, self.allow_backbone)
        running = {
            remote.options(num_cpus=self._cpus(job), num_gpus=self.gpus_per_cell, max_retries=RETRIES).remote(
                how, job, versions()
            ): job
            for job in missing
        }
        try:
            while running:
                done = sum(self.path(job).exists() for job in jobs)
                progress(min(done, len(jobs) - 1), len(jobs), next(iter(running.values())))
                [ended], _ = cluster.ray.wait(list(running), num_returns=1)
                job = running.pop(ended)
                result_of(cluster.ray, ended, f"{job.title}: its process ended")
        finally:
            for task in running:
                cluster.ray.cancel(task, force=True)

    def _cpus(self, job: Job) -> int:
        return self.pool * job.resolved.training.threads


def _until_seen(path: Path) -> None:
    deadline = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            text = f"{path} was written on another node of the Ray cluster and is not seen here"
            raise CommandError(f"{text}: give --out a folder that all nodes see", Exit.FAILED)
        time.sleep(0.1)


def run_cell(how: tuple[Path, int, str, bool], job: Job, theirs: dict[str, str]) -> RemoteFailure | None:
    """Run one cell in this process and write its file; None, or why it cannot be run.

    ``how`` are the arguments of `Runner`.
    """

    def run() -> None:
        expect_same(versions(), theirs)
        runner = _runner(*how)
        if not (runner.out / BENCH_FILE).exists():
            text = f"a node of the Ray cluster does not see {runner.out}: give --out a folder that all nodes see"
            raise CommandError(text, Exit.BAD_INPUT)
        runner.run(job)

    return caught(run)


_runner = cache(Runner)  # one for all cells that this process runs, with one backbone
