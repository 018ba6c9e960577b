"""The clock of all crews as a Ray actor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from promptfed.experiments.cluster.common_clock import CommonClock, SharedClock, Watched
from promptfed.experiments.cluster.connection import Cluster, import_ray
from promptfed.experiments.cluster.run_folder import RunFolder
from promptfed.experiments.simulation.virtual_time import Place
from promptfed.runtime.speeds import Speeds

CALLS = 8  # beside those of waiting clients

ClockOf = Callable[[RunFolder, Watched], SharedClock]
"""Starts the clock of a federation, which is kept in the run's folder."""


@dataclass(frozen=True)
class RayClock:
    """The clock of all crews as a Ray actor. If it dies, Ray restarts it, and repeats what it was asked."""

    handle: Any

    def step(self, name: str, place: Place) -> Awaitable[float]:
        """As `CommonClock.step`."""
        seconds: Awaitable[float] = self.handle.step.remote(name, place)
        return seconds

    def hold(self, name: str, place: Place, seconds: float) -> Awaitable[None]:
        """As `CommonClock.hold`."""
        over: Awaitable[None] = self.handle.hold.remote(name, place, seconds)
        return over

    def rounds(self, seconds: float) -> list[float]:
        """As `CommonClock.rounds`."""
        return list(import_ray().get(self.handle.rounds.remote(), timeout=seconds))


@contextmanager
def clocks(cluster: Cluster, speeds: Speeds | None, restarts: int) -> Iterator[ClockOf | None]:
    """What starts the clock of clients with these speeds, which ends with the block; None: real time."""
    if speeds is None:
        yield None
        return
    with ExitStack() as ending:

        def started(folder: RunFolder, watched: Watched) -> SharedClock:
            kept = {"max_restarts": restarts, "max_task_retries": -1, "max_concurrency": len(speeds) + CALLS}
            actor = cluster.ray.remote(CommonClock).options(num_cpus=0, **kept)
            handle = actor.remote(speeds, folder.path, watched)
            ending.callback(cluster.ray.kill, handle)
            return RayClock(handle)

        yield started
