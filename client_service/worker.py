"""The worker: one client of one federation, from joining to the end; and the process around it."""

from __future__ import annotations

import asyncio
import logging
import signal
from concurrent.futures import Executor
from dataclasses import replace

import httpx

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.bodies import SentLog
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient, open_http
from promptfed.client_service.joining.consent import Terminal, noted
from promptfed.client_service.joining.joining import FederationEnded, Joining
from promptfed.client_service.joining.offer import explain
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.monitor import Hook, Monitor, Status
from promptfed.client_service.serving.api import create_app
from promptfed.client_service.serving.prediction import Predictor
from promptfed.client_service.serving.server import running_api
from promptfed.client_service.settings import Settings, read_token
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.state.site_log import SiteLog
from promptfed.client_service.task_loop import TaskLoop
from promptfed.client_service.training.compute import Compute
from promptfed.client_service.training.trainer import TaskWork
from promptfed.shared.machine import on_signals
from promptfed.shared.service.streams import leave

log = logging.getLogger("promptfed.client")


class Worker:
    """One client of one federation. It changes nothing global but torch's number of threads.

    Args:
        settings: of this client.
        parts: objects that exist already; the others are made from the settings.
        http: an HTTP client that stays open.
        executor: where tensor work runs, one job of this worker at a time.
        turns: limits how many of the workers that share it carry out a task at the same time.
        ephemeral: the worker is not restarted after a crash, and serves no predictions.
        synced: the files of an ephemeral worker are synced all the same, so that it can be started again.
        sent: the record of what leaves; by default one of its own, unless it is ephemeral.
        hook: called with every event and its facts: enrolled, trained, sending, accepted, evaluated, discarded,
            refused, failed, cancelled, ended.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Parts | None = None,
        *,
        http: httpx.AsyncClient | None = None,
        executor: Executor | None = None,
        turns: asyncio.Semaphore | None = None,
        ephemeral: bool = False,
        synced: bool = False,
        sent: SentLog | None = None,
        hook: Hook | None = None,
    ):
        self.settings = settings
        status = Status(settings.name, settings.role, settings.federation, settings.coordinator)
        self.monitor = Monitor(status, hook)
        self.predictor = Predictor()
        self.compute = Compute(executor, turns)
        self.api_url: str | None = None  # written into the state folder, for other programs to find
        self._http = http
        self._ephemeral, self._synced = ephemeral, synced
        self._parts = parts or Parts()
        self._sent = sent
        self._running: asyncio.Task[None] | None = None
        self.work: TaskWork | None = None  # once it has joined

    async def run(self) -> Exit:
        """Take part until the federation ends or `stop` is called; OK in both cases.

        Raises:
            ClientError: what else ended the client; its text is one line.
        """
        try:
            if not self.compute.stopped():
                self._running = asyncio.ensure_future(self._take_part())
                await self._running
            self.monitor.stage("ended")
        except asyncio.CancelledError:
            if not self.compute.stopped():
                raise
            self.monitor.stage("stopped")
        except ClientError as error:
            self.monitor.stage("failed")
            self.monitor.status.last_error = str(error)
            raise
        finally:
            self.compute.close()
        return Exit.OK

    def stop(self) -> None:
        """End soon, wherever the worker is; from its state folder it can go on later. Call it in the event loop."""
        self.compute.stop()
        if self._running is not None:
            self._running.cancel()

    async def _take_part(self) -> None:
        settings = self.settings
        http = self._http or open_http(settings)
        state = PrivateState(settings.state_dir, self._ephemeral, self._synced)
        predictor = None if self._ephemeral else self.predictor
        if self.api_url is not None:
            state.write_note("api.url", self.api_url)
        coordinator = CoordinatorClient(http, settings.coordinator, settings.federation, settings.give_up_after)
        coordinator.sent = self._sent
        if not self._ephemeral:
            site = SiteLog(settings.state_dir)
            self.monitor.record = site.note
            coordinator.sent = self._sent or SentLog(site.note)
            self._parts = replace(self._parts, consent=noted(self._parts.consent, site))
        try:
            joining = Joining(settings, self._parts, state, coordinator, self.compute, self.monitor, predictor)
            self.work = work = await joining.join()
            await TaskLoop(coordinator, work, self.compute, self.monitor).take_part()
        except FederationEnded:
            self.monitor.tell("ended", federation=settings.federation)
        except Refused as refused:
            if refused.status != 410:
                raise explain(refused, settings) from None
            self.monitor.tell("ended", federation=settings.federation, detail=refused.detail)
        except BadAnswer as error:
            raise ClientError(Exit.PROTOCOL, str(error)) from None
        finally:
            if http is not self._http:
                await http.aclose()
            if not self.compute.busy:  # else a job that was left behind may still write: the process's end unlocks
                state.close()


async def serve(worker: Worker) -> Exit:
    """Run a worker with its API and signal handlers, and with ``serve`` go on after the federation's end."""
    settings, stopped, interrupted = worker.settings, asyncio.Event(), False

    def stop(number: int) -> None:
        nonlocal interrupted
        interrupted = number == signal.SIGINT
        stopped.set()
        worker.stop()

    loop = asyncio.get_running_loop()
    on_signals(loop, stop)
    token = read_token(settings.api_token_file, "API token") if settings.api_token_file is not None else None
    app = create_app(worker.monitor, worker.predictor, token, settings.api_host)
    async with running_api(app, settings.api_host, settings.api_port) as url:
        log.info("this client's page and API: %s", url)
        worker.api_url = url
        exit = await worker.run()
        if settings.serve and not stopped.is_set():
            log.info("serving predictions at %s until stopped", url)
            await stopped.wait()
    if interrupted and worker.monitor.status.stage == "stopped":
        log.info("interrupted: the same command goes on where this one was")
    return Exit.INTERRUPTED if interrupted else exit


def run(settings: Settings) -> int:
    """Run a client process to its end; the exit code (`promptfed.client_service.exits`).

    Where a stop could not wait for a computation, the process ends here: what is on disk stands a kill at any instant.
    """
    terminal = Terminal(settings.log_format, not settings.yes, settings.agree)
    worker = Worker(settings, Parts(consent=terminal.consent))
    try:
        code = asyncio.run(serve(worker))
    except ClientError as error:
        log.log(logging.INFO if error.exit is Exit.DECLINED else logging.ERROR, "%s", error)  # a decision is no error
        code = error.exit
    except Exception:
        log.exception("the client failed")
        code = Exit.FAILED
    if worker.compute.busy:
        leave(code)
    return int(code)
