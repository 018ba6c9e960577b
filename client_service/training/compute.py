"""The thread that computes, one job at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

STOP_SECONDS = 2.5  # how long a stop waits for the running job to notice
Result = TypeVar("Result")


class Compute:
    """Runs jobs in ``executor``, or in one thread of its own. Jobs ask `stopped` between their steps.

    Clients that share an executor share ``turns`` too: who has none neither fetches a payload nor watches its task.
    """

    def __init__(self, executor: Executor | None = None, turns: asyncio.Semaphore | None = None):
        self._own = ThreadPoolExecutor(1, "compute") if executor is None else None
        self._executor = executor or self._own
        self._stop = threading.Event()
        self._job: asyncio.Future[Any] | None = None
        self._turns = turns

    def turn(self) -> AbstractAsyncContextManager[object]:
        """A block that carries out one task; it begins when it is this client's turn."""
        return self._turns or nullcontext()

    async def run(self, job: Callable[[], Result]) -> Result:
        """The job's result. Cancelling waits a little for the job to notice that it is to stop."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, job)
        self._job = future
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future}, timeout=STOP_SECONDS)
            if future.done() and not future.cancelled():
                future.exception()  # looked at, so that asyncio does not warn of it
            raise

    def stop(self) -> None:
        """Tell the running job to end; call it before cancelling `run`."""
        self._stop.set()

    def stopped(self) -> bool:
        """Whether jobs are to end."""
        return self._stop.is_set()

    @property
    def busy(self) -> bool:
        """Whether a job still runs that a stop could not wait for."""
        return self._job is not None and not self._job.done()

    def close(self) -> None:
        """No further job; a thread of our own ends after the one that runs."""
        self.stop()
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
