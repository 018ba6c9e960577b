"""The clients of a simulation: the real workers on one event loop, which compute in turn in a bounded pool."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.parts import Parts, PrivacyParts
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.settings import Settings, make_settings
from promptfed.client_service.training.trainer import TaskWork
from promptfed.client_service.worker import Worker
from promptfed.coordinator.domain.run_state import EVALUATION
from promptfed.experiments.simulation.preparation import SimulationSetup
from promptfed.experiments.simulation.processes import RemoteWork
from promptfed.runtime.processes import Site
from promptfed.shared import errors
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import derive_seed
from promptfed.shared.service.reasons import NAME_PATTERN

ENDS: dict[int, type[errors.PromptfedError]] = {
    Exit.USAGE: errors.Misused,
    Exit.BAD_INPUT: errors.BadInput,
    Exit.UNREACHABLE: errors.Unreachable,
    Exit.NOT_ALLOWED: errors.NotAllowed,
    Exit.REFUSED: errors.Refused,
    Exit.FEDERATION_ENDED_BADLY: errors.EndedBadly,
}
"""The error of a simulation one of whose clients ended with this code; of all others, `Failed`."""
AHEAD = 2  # clients that fetch or send while those of the pool compute


@dataclass
class RunningWorkers:
    """The workers, running."""

    awaited: int  # clients that have not enrolled yet
    tasks: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    everybody_enrolled: asyncio.Event = field(default_factory=asyncio.Event)
    workers: list[Worker] = field(default_factory=list)
    unevaluated: list[str] = field(default_factory=list)  # failed evaluations: means over the others would mislead

    def hear(self, name: str, event: str, facts: Mapping[str, Any]) -> None:
        """Take note of an event of the client ``name``."""
        if event == "failed" and facts["phase"] == EVALUATION:
            text = f"client {name} could not evaluate round {facts['round']}: {facts['type']}: {facts['detail']}"
            self.unevaluated.append(text)
        elif event == "enrolled":
            self.awaited -= 1
            if not self.awaited:
                self.everybody_enrolled.set()

    async def enrolled(self) -> None:
        """Return once all have enrolled. Raises PromptfedError if one has failed."""
        enrolled = asyncio.create_task(self.everybody_enrolled.wait())
        try:
            await asyncio.wait({enrolled, *self.tasks}, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            await enrolled
        finally:
            enrolled.cancel()

    async def wait(self, seconds: float | None = None) -> None:
        """Return once all have ended, or after ``seconds``. Raises PromptfedError once one has failed."""
        await asyncio.wait(self.tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        self.check()

    def check(self) -> None:
        """Raise the error that ended a client, or that of an evaluation."""
        if self.unevaluated:
            raise errors.Failed(self.unevaluated[0])
        for task, name in self.tasks.items():
            error = task.exception() if task.done() and not task.cancelled() else None
            if isinstance(error, ClientError):
                raise ENDS.get(error.exit, errors.Failed)(f"client {name}: {error}") from None
            if error is not None:
                text = f"client {name} failed: {type(error).__name__}: {error}"
                raise errors.Failed(text) from error


@asynccontextmanager
async def run_workers(
    setup: SimulationSetup, http: httpx.AsyncClient, federation: str, token: str
) -> AsyncIterator[RunningWorkers]:
    """Run all clients; they end with the block."""
    executor = ThreadPoolExecutor(setup.pool, "clients", initializer=torch.set_num_threads, initargs=(setup.threads,))
    turns = asyncio.Semaphore(setup.pool + AHEAD)
    running = RunningWorkers(len(setup.clients))
    work = TaskWork if setup.processes is None else partial(RemoteWork, processes=setup.processes)
    noise = SeededNoise(derive_seed(setup.spec.seed, "noise"))
    running.workers += (
        Worker(
            settings,
            Parts(
                backbone=setup.backbone,
                source=client.source,
                tests=client.tests,
                features=setup.features,
                enrolment_token=token,
                secret=None if setup.secret is None else setup.secret(client.site.name),
                record=setup.record,
                privacy=PrivacyParts(noise, Ledger(_ledger(setup, client.site)), True, client.site.floor),
                work=work,
            ),
            http=http,
            executor=executor,
            turns=turns,
            ephemeral=True,
            synced=setup.synced,
            hook=partial(running.hear, client.site.name),
        )
        for client, settings in zip(setup.clients, _settings(setup, str(http.base_url), federation), strict=True)
    )
    running.tasks |= {asyncio.create_task(worker.run()): worker.settings.name for worker in running.workers}
    try:
        yield running
    finally:
        for worker in running.workers:
            worker.stop()
        await asyncio.gather(*running.tasks, return_exceptions=True)
        executor.shutdown(wait=False, cancel_futures=True)


def _ledger(setup: SimulationSetup, site: Site) -> Path | None:
    """The client's ledger, in memory where nobody continues."""
    return None if setup.secret is None else setup.folder / f"ledger-{site.name}"


def _settings(setup: SimulationSetup, url: str, federation: str) -> Iterator[Settings]:
    """Each client's. The environment is read for the first one, and for a name that is to be refused: it takes long."""
    first = None
    for site in (client.site for client in setup.clients):
        state_dir = setup.folder / f"client-{site.name}"
        fields = {"name": site.name, "role": site.role, "data": site.data, "state_dir": state_dir}
        if first is not None and re.fullmatch(NAME_PATTERN, site.name):
            yield first.model_copy(update=fields)
            continue
        try:
            first = make_settings(
                coordinator=url,
                federation=federation,
                test=[],
                max_epsilon=1000.0,  # no real budget: a simulation may use any
                give_up_after=setup.patience,
                new_data=True,  # the run's folder knows its data
                **fields,
            )
        except ClientError as error:
            raise errors.BadInput(f"client {site.name}: {error}") from None
        yield first
