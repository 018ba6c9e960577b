"""Crews as processes without Ray, which share a device and have a memory limit each; for `benchmarks.gpu`."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from promptfed.client_service.training.trainer import TaskWork
from promptfed.experiments.cluster.crew import Assignment, Share, work
from promptfed.experiments.cluster.run import Conductor
from promptfed.experiments.simulation.preparation import prepare
from promptfed.experiments.simulation.run_folder import RunFolder
from promptfed.runtime.processes import Processes
from promptfed.runtime.services import LocalFederation, Site
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.result import FederationResult
from promptfed.shared.metrics.outcomes import Outcomes

KEY = "a5" * 32
MIB = 1 << 20


@dataclass(frozen=True)
class Limit:
    """Bytes of device memory that a process may allocate. None, for the CPU: every step raises OutOfMemoryError."""

    bytes: int | None

    def apply(self) -> None:
        """Apply the limit to this process."""
        if self.bytes is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(self.bytes / total)
            return

        def fail(*_: object) -> dict[str, float]:
            raise torch.OutOfMemoryError("as if the device were full")

        TaskWork.train = fail  # type: ignore[method-assign, assignment]


def _play(assignment: Assignment, limit: Limit | None, answers: Any) -> None:
    if limit is not None:
        limit.apply()
    try:
        answers.put(work(assignment))
    except CommandError as error:
        answers.put((str(error), error.exit))


@dataclass
class SpawnedCrews:
    """Crews as child processes of this one."""

    limit: Limit | None = None
    _context: Any = field(default_factory=lambda: multiprocessing.get_context("spawn"))
    _processes: list[Any] = field(default_factory=list)
    _outcomes: list[Outcomes] = field(default_factory=list)
    _answered: int = 0

    def begin(self, assignments: Sequence[Assignment]) -> None:
        """Start a process for each assignment."""
        self._answers = self._context.Queue()
        for assignment in assignments:
            process = self._context.Process(target=_play, args=(assignment, self.limit, self._answers), daemon=True)
            process.start()
            self._processes.append(process)

    def check(self) -> None:
        """CommandError if a process has failed or died."""
        while self._processes and not self._answers.empty():
            self._take(self._answers.get())
        dead = [process for process in self._processes if process.exitcode not in (None, 0)]
        if dead:
            raise CommandError(f"a crew's process ended with {dead[0].exitcode}", Exit.FAILED)

    def _take(self, answer: Any) -> None:
        if isinstance(answer, tuple):
            raise CommandError(*answer)
        self._outcomes += answer
        self._answered += 1

    def outcomes(self, seconds: float) -> list[Outcomes]:
        """Wait for all crews, ``seconds`` for each answer; their outcomes."""
        while self._answered < len(self._processes):
            self._take(self._answers.get(timeout=seconds))
        return self._outcomes

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.terminate()
            process.join()


@contextmanager
def _watched(device: str) -> Iterator[list[int]]:
    """A list with the largest memory in MiB that all processes used on the device in the block; empty on a CPU."""
    most: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            free, total = torch.cuda.mem_get_info()
            most[:] = [max([*most, (total - free) // MIB])]

    thread = threading.Thread(target=watch, daemon=True)
    if device != "cpu":
        thread.start()
    try:
        yield most
    finally:
        ended.set()
        if device != "cpu":
            thread.join()


def conducted(
    spec: dict[str, Any], sites: Sequence[Site], crews: int, device: str, folder: Path, limit: Limit | None = None
) -> tuple[FederationResult, int | None]:
    """Run or continue a federation in ``folder``; its result, and the largest device memory in MiB (None on a CPU).

    Raises:
        CommandError: the federation did not finish.
    """
    wanted, initial, _ = prepare(spec, sites, 1, None, allow_backbone=False)
    spawned = SpawnedCrews(limit)
    with (
        Processes(folder) as processes,
        LocalFederation(processes, folder) as local,
        _watched(device) as most,
    ):
        conductor = Conductor(local, spawned, RunFolder(folder, KEY, lasting=True), None, lambda snapshot: None)
        try:
            result = conductor.conduct(wanted, initial, tuple(sites), Share(crews, 1, device, False))
        finally:
            spawned.stop()
    return result, most[0] if most else None
