"""Watching a task while it is carried out: it is stopped as soon as it is no longer this client's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from promptfed.client_service.exits import ClientError
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.client_service.training.compute import Compute
from promptfed.client_service.training.data import Cancelled
from promptfed.shared.messages import Task

FIRST_SECONDS = 2.0  # before the first question: short tasks are over by then
WATCH_SECONDS = 10  # that a question waits for its answer, and between two if nobody holds them back
SHORTEST_WATCH = 0.5  # seconds from one question to the next
GONE = (401, 403, 404, 410)  # statuses that say the same of the client or its federation
Result = TypeVar("Result")


async def watched(
    coordinator: CoordinatorClient,
    compute: Compute,
    task: Task,
    job: Callable[[Cancelled], Result],
    progress: Callable[[], float | None],
) -> Result:
    """The result of ``job``, which is told to stop as soon as the task is no longer this client's.

    ``progress``: the part of the task's steps that is done, 0 to 1; None where it is not to be told.
    """
    gone = threading.Event()
    watcher = asyncio.create_task(_watch(coordinator, task, gone, progress))
    try:
        return await compute.run(lambda: job(lambda: gone.is_set() or compute.stopped()))
    finally:
        watcher.cancel()


async def _watch(
    coordinator: CoordinatorClient, task: Task, gone: threading.Event, progress: Callable[[], float | None]
) -> None:
    # "No task" is no reason to stop: a paused federation says so too, and takes the updates of open tasks.
    await asyncio.sleep(FIRST_SECONDS)
    while not gone.is_set():
        begun, pause = time.monotonic(), SHORTEST_WATCH
        try:
            current = await coordinator.task(WATCH_SECONDS, retry=False, carrying=task.task_id, progress=progress())
        except Refused as refused:
            if refused.status in GONE or refused.kind == "phase-closed":
                gone.set()
        except (BadAnswer, ClientError):
            pause = WATCH_SECONDS
        else:
            if current is not None and current.task_id != task.task_id:
                gone.set()
        await asyncio.sleep(max(0.0, pause - (time.monotonic() - begun)))
