"""Virtual time of clients in several crews: one clock at which all of them wait, and which outlives its process.

The clock looks at the coordinator as an operator does. It keeps its state in the run's folder, and a client that asks
again, since its crew or the clock was started again, gets the same answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from promptfed.client_service.training.trainer import TaskWork
from promptfed.experiments.simulation.virtual_time import Look, Place, Turn, VirtualClock, seconds_of
from promptfed.runtime.speeds import Speeds
from promptfed.sdk import operations
from promptfed.sdk.client import AsyncCoordinator
from promptfed.sdk.errors import CommandError
from promptfed.sdk.summary import FederationSummary
from promptfed.shared.files import write_whole
from promptfed.shared.messages import ENDED, Task

LOOK_SECONDS = 0.02  # between two looks at the coordinator
AWAY_SECONDS = 0.5  # after a look that it did not answer, since it is being started again
FILE = "clock.json"

log = logging.getLogger("promptfed.crew")


@dataclass(frozen=True)
class Watched:
    """The federation that a clock looks at. ``authority``: the coordinator's certificate in PEM; None: plain HTTP."""

    federation: str
    url: str
    authority: str | None
    viewer_token: str = field(repr=False)


class CommonClock:
    """The clock. All methods run on one event loop; with the first call, time begins to pass."""

    def __init__(self, speeds: Speeds, folder: Path, watched: Watched):
        self._clock, self._file, self._watched = VirtualClock(speeds), folder / FILE, watched
        if self._file.exists():
            self._load(json.loads(self._file.read_bytes()))
        self._looking: asyncio.Task[None] | None = None

    async def step(self, name: str, place: Place) -> float:
        """As `VirtualClock.step`."""
        self._begin()
        return self._clock.step(name, place)

    async def hold(self, name: str, place: Place, seconds: float) -> None:
        """As `VirtualClock.hold`."""
        self._begin()
        self._clock.step(name, place)  # This may be another process than the one that was asked for it.
        await self._clock.hold(name, place, seconds)

    async def rounds(self) -> list[float]:
        """Once the federation has ended: the virtual seconds at which each round was over."""
        await self._begin()
        return self._clock.rounds

    def _begin(self) -> asyncio.Task[None]:
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return self._looking

    async def _look(self) -> None:
        watched = self._watched
        verify: ssl.SSLContext | bool = True
        if watched.authority is not None:
            verify = ssl.create_default_context(cadata=watched.authority)
        async with httpx.AsyncClient(base_url=watched.url, verify=verify, trust_env=False) as http:
            api, ended = AsyncCoordinator(http, watched.viewer_token), False
            while not ended:
                pause = LOOK_SECONDS
                try:
                    seen = look_at((await api.send(operations.get_summary(watched.federation))).view)
                except (httpx.TransportError, CommandError) as error:
                    log.warning("the clock cannot look at the coordinator: %s", error or type(error).__name__)
                    pause = AWAY_SECONDS
                else:
                    ended = seen.state in ENDED
                    if self._clock.advance(seen):
                        self._keep()
                await asyncio.sleep(pause)

    def _keep(self) -> None:
        turns = {
            name: [*turn.place, turn.number, turn.seconds, turn.ready, turn.over]
            for name, turn in self._clock.turns.items()
        }
        kept = {"now": self._clock.now, "rounds": self._clock.rounds, "turns": turns}
        write_whole(self._file, json.dumps(kept).encode(), synced=False)

    def _load(self, kept: dict[str, Any]) -> None:
        self._clock.now, self._clock.rounds = kept["now"], kept["rounds"]
        for name, (round, phase, *others) in kept["turns"].items():
            turn = self._clock.turns[name] = Turn((round, phase), *others)
            if turn.over:
                turn.let_go.set()


def look_at(seen: FederationSummary) -> Look:
    """What an operator sees of a federation, for a clock. Only an open training phase tells of all its clients."""
    stage = seen.stage
    over = seen.round if seen.state == "finished" else seen.round - 1
    if stage is None or stage.closing:
        return Look(seen.state, over, {}, settled=False, all_known=False)
    places = {one.name: (one.round or stage.round, stage.phase) for one in seen.awaited}
    return Look(seen.state, over, places, settled=True, all_known=stage.kind == "train")


class SharedClock(Protocol):
    """A `CommonClock` in another process."""

    def step(self, name: str, place: Place) -> Awaitable[float]:
        """As `CommonClock.step`."""

    def hold(self, name: str, place: Place, seconds: float) -> Awaitable[None]:
        """As `CommonClock.hold`."""

    def rounds(self, seconds: float) -> list[float]:
        """As `CommonClock.rounds`, within so many seconds."""


async def wait_at(clock: SharedClock, work: TaskWork, task: Task) -> None:
    """As `VirtualClock.wait`."""
    if task.kind == "train":
        place = task.round, task.phase
        step = await clock.step(work.name, place)
        await clock.hold(work.name, place, seconds_of(work, task, step))
