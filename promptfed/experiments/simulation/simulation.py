"""A federation in one process: the very coordinator and the very clients, over an in-process transport.

There is no second implementation: the coordinator's app answers, and the client's worker trains. The clients share one
backbone, one feature cache, each data set, and a bounded pool of threads or processes that computes for them in turn.
With the same number of torch threads the final state is, bit for bit, that of the same spec with real services.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from sqlalchemy.exc import SQLAlchemyError

from promptfed.console.files import full_disk, new_folder
from promptfed.console.progress import Snapshot, describe_round
from promptfed.coordinator.app import create_app, lifespan
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.backend import CannotOpen
from promptfed.coordinator.store.tokens import OPERATOR_FILE
from promptfed.experiments.simulation.asgi_transport import InProcess
from promptfed.experiments.simulation.preparation import SimulationSetup, open_site, prepare, warm_all
from promptfed.experiments.simulation.processes import computing_processes, usual_pool
from promptfed.experiments.simulation.run_folder import RunFolder, identity, run_folder
from promptfed.experiments.simulation.workers import AHEAD, RunningWorkers, run_workers
from promptfed.runtime.processes import Site
from promptfed.sdk import operations
from promptfed.sdk.client import AsyncCoordinator, Request
from promptfed.sdk.result import FederationResult
from promptfed.shared.api.report_schemas import RoundPage, RoundReport
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.clip.caches import features_in
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.errors import EndedBadly, Failed, PromptfedError
from promptfed.shared.methods import method_for
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import derive_seed
from promptfed.shared.service.reasons import collect_seldom, why
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec

URL = "http://127.0.0.1"  # of a coordinator without a socket
POLL_SECONDS = 0.2
HEAR_SECONDS = 0.5
GOES_ON = "then give the same command again: it goes on from there"
LEAVE_SECONDS = 10.0  # for an interrupted simulation to end

ProgressCallback = Callable[[Snapshot], None]


def simulate(
    spec: FederationSpec | Mapping[str, Any],
    sites: Sequence[Site],
    *,
    folder: Path | None = None,
    lasting: bool = False,
    pool: int | None = 1,
    backbone: Backbone | None = None,
    features: Path | FeatureCache | None = None,
    sources: SharedSources | None = None,
    device: str = "cpu",
    allow_backbone: AllowedBackbones = False,
    progress: ProgressCallback | None = None,
    initial: bytes | None = None,
    new_data: bool = False,
) -> FederationResult:
    """Run a federation to its end in this process.

    ``folder`` (new or empty; default: a temporary one) keeps the state of coordinator and clients; a ``lasting`` one
    may be that of the same run, which goes on where it was interrupted, with other data if ``new_data``.
    ``pool`` clients compute at once (None: one for
    each core, if processes can compute), each with ``training.threads`` torch threads; more than one in forked
    processes, if possible. ``backbone``, ``features`` and ``sources`` can be given to share them among runs; by default
    they are made from the spec, in ``folder`` and from the sites' URIs.
    ``progress`` is called in another thread, at most five times a second and only after a change: it may miss a quick
    round. ``simulate`` can be called while an event loop runs, and restores the global settings of torch and
    of the garbage collector.

    Raises:
        PromptfedError: one line: a spec, data or backbone that cannot be used, a client that failed, a federation that
            did not finish.
    """
    with ExitStack() as stack:
        stack.enter_context(_settings_put_back())
        started = time.monotonic()
        resolved, made, backbone = prepare(spec, sites, pool, backbone, allow_backbone, device)
        once = folder is None or not lasting
        kept = _for_once(folder) if once else run_folder(folder, identity(resolved, sites), "--out", new_data)
        run = stack.enter_context(kept)
        place, disk = run.path, stack.enter_context(FullDisk())
        pool = pool or usual_pool(resolved.training.threads, backbone.device.type)
        shared = sources or SharedSources()
        clients = tuple(open_site(site, shared) for site in sites)
        run.expect_data((client.site.name, client.source, client.tests) for client in clients)
        if isinstance(features, FeatureCache):
            cache = features
        else:
            uris = [uri for site in sites for uri, _ in site.uris()]
            cache = features_in(features, place / "features", uris, method_for(resolved).needs.patch_tokens)
        latest: dict[tuple[str, str], Outcomes] = {}

        def record(outcomes: Outcomes) -> None:
            latest[outcomes.client, outcomes.split] = outcomes

        try:
            with computing_processes(pool, resolved, clients, backbone, cache) as processes:
                secret = run.secret if run.lasting else None
                setup = SimulationSetup(resolved, clients, place, pool, backbone, cache, record, processes, secret)
                show = progress or (lambda snapshot: None)
                playing = _run(setup, initial or made, show, started)
                result = _in_a_thread(disk.watch(playing))
        except (OSError, SQLAlchemyError, CannotOpen, PromptfedError) as error:
            if disk.full or FullDisk.is_meant(error):
                raise full_disk(place, GOES_ON if run.lasting else "") from None
            if isinstance(error, PromptfedError):
                raise
            raise Failed(f"cannot work in {place}: {why(error)}") from None
        return replace(result, outcomes=tuple(latest[key] for key in sorted(latest)))


@contextmanager
def _for_once(folder: Path | None) -> Iterator[RunFolder]:
    with new_folder(folder) as place:
        yield RunFolder(place, secrets.token_hex(32), lasting=False)


class FullDisk(logging.Handler):
    """Hears within the block that a service found the disk full: it would wait, and say so again and again."""

    full = False

    def __enter__(self) -> FullDisk:
        logging.getLogger("promptfed").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("promptfed").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of an error that says so."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and self.is_meant(error):
            self.full = record.heard = True

    @staticmethod
    def is_meant(error: BaseException) -> bool:
        """Whether ``error`` says that a disk is full, also through a database or as the cause of another."""
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(error):
            return True
        return error.__cause__ is not None and FullDisk.is_meant(error.__cause__)

    async def watch(self, run: Coroutine[Any, Any, FederationResult]) -> FederationResult:
        """The result of ``run``, which is cancelled once the disk is full. Raises OSError then."""
        task = asyncio.ensure_future(run)
        try:
            while not task.done() and not self.full:
                await asyncio.wait({task}, timeout=POLL_SECONDS)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=LEAVE_SECONDS)
        if self.full:
            if task.done() and not task.cancelled():
                task.exception()  # else asyncio would print it
            raise OSError(errno.ENOSPC, "the disk is full")
        return task.result()


@contextmanager
def _settings_put_back() -> Iterator[None]:
    """Restore torch's global settings and the garbage collector's after the block, which needs few collections."""
    garbage = gc.get_threshold()
    collect_seldom()
    threads, products, convolutions = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )
    try:
        yield
    finally:
        gc.set_threshold(*garbage)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def _in_a_thread(run: Coroutine[Any, Any, FederationResult]) -> FederationResult:
    """Run on an event loop in a thread of its own, since the caller may have a loop. Ctrl-C cancels the run."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(run)

    ended = threading.Event()

    def target() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(asyncio.wait({task}))
        finally:
            ended.set()

    threading.Thread(target=target, name="simulation", daemon=True).start()
    try:
        # Short waits: a signal that arrives in another thread is handled only between two of them. Not Thread.join:
        # Python 3.11 takes a thread for ended if a signal arrives in it.
        while not ended.wait(HEAR_SECONDS):
            pass
    except KeyboardInterrupt:
        with suppress(RuntimeError):  # the loop has just ended
            loop.call_soon_threadsafe(task.cancel)
        ended.wait(LEAVE_SECONDS)
        raise
    return task.result()


async def _run(
    setup: SimulationSetup, initial: bytes | None, progress: ProgressCallback, started: float
) -> FederationResult:
    """The result, without outcomes."""
    settings = _coordinator_settings(setup)
    app = create_app(settings)
    app.state.noise = SeededNoise(derive_seed(setup.spec.seed, "coordinator's noise"))
    async with lifespan(app), httpx.AsyncClient(transport=InProcess(app), base_url=URL, trust_env=False) as http:
        api = AsyncCoordinator(http, (settings.data_dir / OPERATOR_FILE).read_text().strip())
        federation, state = await _federation(api, setup, initial)
        token = (await api.send(operations.mint_token(federation, len(setup.clients)))).view.token
        await warm_all(setup)
        async with run_workers(setup, http, federation, token) as clients:
            if state == "enrolling":
                await clients.enrolled()
            begun = time.monotonic()
            if state in ("enrolling", "paused"):
                await api.send(operations.steer(federation, "start" if state == "enrolling" else "resume"))
            await _follow(progress, api, federation, clients)
            ended = time.monotonic()
            result = await api.run(operations.take(federation))
            expect_all_evaluated(result.reports)
            return replace(result, wall_seconds=ended - begun, setup_seconds=begun - started)


async def _federation(api: AsyncCoordinator, setup: SimulationSetup, initial: bytes | None) -> tuple[str, str]:
    """The id and state of the folder's federation, or of a new one if there is none or it has never started."""
    for page in await api.run(operations.list_federations()):
        for federation in page.view.federations:
            if federation.state != "enrolling":
                return federation.id, federation.state
            await api.send(operations.delete_federation(federation.id))
            for kept in (*setup.folder.glob("client-*"), *setup.folder.glob("ledger-*")):
                shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
    return str((await api.run(operations.create(setup.spec, initial))).json["id"]), "enrolling"


def _coordinator_settings(setup: SimulationSetup) -> Settings:
    """Settings that ignore another coordinator's database and first federation in the environment."""
    return Settings(
        data_dir=setup.folder / "coordinator",
        database_url=None,
        database_url_file=None,
        bootstrap=None,
        enrolment_token_file=None,
        max_uploads=setup.pool + AHEAD,
    )


async def _follow(progress: ProgressCallback, api: AsyncCoordinator, federation: str, clients: RunningWorkers) -> None:
    """Report the progress until the federation has finished.

    Raises:
        PromptfedError: it ended otherwise, or a client failed.
    """
    last, ended = None, ""
    while True:
        snapshot = Snapshot.of((await api.send(operations.get_federation(federation))).view)
        if last is None or (snapshot.round, snapshot.state) != (last.round, last.state):
            over = snapshot.round - (snapshot.state != "finished")
            page = (await api.send(operations.get_rounds(federation, str(over - 1) if over > 0 else None))).view
            ended = next((describe_round(one) for one in page.rounds if one.round == over and one.ended_at), ended)
        snapshot = replace(snapshot, ended=ended)
        if snapshot != last:
            progress(snapshot)
            last = snapshot
        if snapshot.state == "finished":
            return
        if snapshot.over:
            raise ended_badly(snapshot, (await api.send(last_rounds(federation, snapshot))).view.rounds)
        await clients.wait(POLL_SECONDS)


def last_rounds(federation: str, snapshot: Snapshot) -> Request[RoundPage]:
    """Asks for the report of the last round; of a federation that ended before it began there is none."""
    return operations.get_rounds(federation, after=str(snapshot.round - 1) if snapshot.round else None)


def ended_badly(snapshot: Snapshot, reports: Sequence[RoundReport]) -> PromptfedError:
    """The error of a federation that did not finish, with the failures that clients reported in its last round."""
    last = [report for report in reports if report.round == snapshot.round]
    failed = [failure for report in last for phase in report.phases for failure in phase.failed]
    text = "; ".join(f"client {failure.client}: {failure.type}: {failure.detail}" for failure in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    why = f": {text}{more}" if text else ""
    return EndedBadly(f"the federation is {snapshot.describe()}{why}")


def expect_all_evaluated(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise PromptfedError if a client could not evaluate: means over the other clients would mislead."""
    for report in reports:
        for failure in report["evaluation"]["failed"] if report["evaluation"] else []:
            why = f"{failure['type']}: {failure['detail']}"
            text = f"client {failure['client']} could not evaluate round {report['round']}: {why}"
            raise Failed(text)
