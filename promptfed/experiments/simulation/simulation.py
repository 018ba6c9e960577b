"""A federation in one process: the very coordinator and the very clients, over an in-process transport.

There is no second implementation: the coordinator's app answers, and the client's worker trains. The clients share one
backbone, one feature cache, each data set, and a bounded pool of threads or processes that computes for them in turn.
With the same number of torch threads the final state is, bit for bit, that of the same spec with real services.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from promptfed.coordinator.app import create_app, lifespan
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.tokens import OPERATOR_FILE
from promptfed.experiments.simulation.asgi_transport import InProcess
from promptfed.experiments.simulation.other_prompts import swapped_outcomes
from promptfed.experiments.simulation.preparation import (
    SimulationSetup,
    open_site,
    prepare,
    warm_all,
)
from promptfed.experiments.simulation.processes import computing_processes, usual_pool
from promptfed.experiments.simulation.workers import AHEAD, RunningWorkers, run_workers
from promptfed.runtime.services import Site
from promptfed.sdk import operations
from promptfed.sdk.client import AsyncCoordinator, Request
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import new_folder
from promptfed.sdk.follow import Snapshot
from promptfed.sdk.result import FederationResult
from promptfed.shared.api.report_schemas import RoundPage, RoundReport
from promptfed.shared.clip import Backbone, FeatureCache, SharedStarts
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import derive_seed
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec

URL = "http://127.0.0.1"  # of a coordinator without a socket
POLL_SECONDS = 0.2
HEAR_SECONDS = 0.5
LEAVE_SECONDS = 10.0  # for an interrupted simulation to end

ProgressCallback = Callable[[Snapshot], None]


@dataclass(frozen=True)
class SimulationOptions:
    """What few simulations need.

    With ``swap_prompts`` the outcomes include each client's answers with the others' prompts and its own head.
    ``initial``: the state to start from; by default the method's.
    """

    swap_prompts: bool = False
    initial: bytes | None = None


DEFAULTS = SimulationOptions()


def simulate(
    spec: FederationSpec | Mapping[str, Any],
    sites: Sequence[Site],
    *,
    folder: Path | None = None,
    pool: int | None = 1,
    backbone: Backbone | None = None,
    features: Path | FeatureCache | None = None,
    sources: SharedSources | None = None,
    device: str = "cpu",
    allow_backbone: AllowedBackbones = False,
    progress: ProgressCallback | None = None,
    options: SimulationOptions = DEFAULTS,
) -> FederationResult:
    """Run a federation to its end in this process.

    ``folder`` (new or empty; default: a temporary one) keeps the state of coordinator and clients. ``pool`` clients
    compute at once (None: one for each core, if processes can compute), each with ``training.threads`` torch
    threads; more than one in forked processes, if possible. ``backbone``, ``features`` and ``sources`` can be given
    to share them among runs; by default they are made from the spec, in ``folder`` and from the sites' URIs.
    ``progress`` is called in another thread, at most five times a second and only after a change: it may miss a quick
    round. ``simulate`` can be called while an event loop runs, and restores torch's global settings.

    Raises:
        CommandError: one line: a spec, data or backbone that cannot be used, a client that failed, a federation that
            did not finish.
    """
    with _torch_put_back(), new_folder(folder) as place:
        started = time.monotonic()
        wanted, made, backbone = prepare(spec, sites, pool, backbone, allow_backbone, device)
        pool = pool or usual_pool(wanted.training.threads, backbone.device.type)
        cache = features if isinstance(features, FeatureCache) else FeatureCache(features or place / "features")
        shared = sources or SharedSources()
        clients = tuple(open_site(site, shared) for site in sites)
        latest: dict[tuple[str, str], Outcomes] = {}

        def record(outcomes: Outcomes) -> None:
            latest[outcomes.client, outcomes.split] = outcomes

        try:
            with _starts_shared(backbone), computing_processes(pool, wanted, clients, backbone, cache) as processes:
                setup = SimulationSetup(wanted, clients, place, pool, backbone, cache, record, processes)
                told = progress or (lambda snapshot: None)
                result = _in_a_thread(_run(setup, options.initial or made, told, options.swap_prompts, started))
        except OSError as error:
            raise CommandError(f"cannot work in {place}: {why(error)}", Exit.FAILED) from None
        return replace(result, outcomes=(*(latest[key] for key in sorted(latest)), *result.outcomes))


@contextmanager
def _starts_shared(backbone: Backbone) -> Iterator[None]:
    """Clients that start from the same context share one forward pass within the block, on the CPU.

    A GPU's memory is shorter, and its bits may differ from pass to pass.
    """
    if backbone.device.type == "cpu" and backbone.starts is None:
        backbone.starts = SharedStarts()
        try:
            yield
        finally:
            backbone.starts = None
    else:
        yield


@contextmanager
def _torch_put_back() -> Iterator[None]:
    """Restore torch's global settings after the block."""
    threads, products, convolutions = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )
    try:
        yield
    finally:
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
    setup: SimulationSetup,
    initial: bytes | None,
    progress: ProgressCallback,
    swap_prompts: bool,
    started: float,
) -> FederationResult:
    """The result. Its outcomes are only those with other clients' prompts."""
    settings = _coordinator_settings(setup)
    app = create_app(settings)
    app.state.noise = SeededNoise(derive_seed(setup.spec.seed, "coordinator's noise"))
    async with lifespan(app), httpx.AsyncClient(transport=InProcess(app), base_url=URL, trust_env=False) as http:
        api = AsyncCoordinator(http, (settings.data_dir / OPERATOR_FILE).read_text().strip())
        federation = str((await api.run(operations.create(setup.spec, initial))).json["id"])
        token = (await api.send(operations.mint_token(federation, len(setup.clients)))).view.token
        await warm_all(setup)
        async with run_workers(setup, http, federation, token) as clients:
            await clients.enrolled()
            begun = time.monotonic()
            await api.send(operations.steer(federation, "start"))
            await _follow(progress, api, federation, clients)
            ended = time.monotonic()
            last = None if setup.spec.selection is not None else setup.spec.rounds
            result = await api.run(operations.take(federation, last))
            expect_all_evaluated(result.reports)
            swapped = await asyncio.to_thread(swapped_outcomes, clients.works()) if swap_prompts else []
            wall, setup_seconds = ended - begun, begun - started
            result = replace(result, wall_seconds=wall, setup_seconds=setup_seconds)
            return replace(result, outcomes=tuple(swapped))


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
        CommandError: it ended otherwise, or a client failed.
    """
    last = None
    while True:
        snapshot = Snapshot.of((await api.send(operations.get_summary(federation))).view)
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


def ended_badly(snapshot: Snapshot, reports: Sequence[RoundReport]) -> CommandError:
    """The error of a federation that did not finish, with the failures that clients reported in its last round."""
    last = [report for report in reports if report.round == snapshot.round]
    failed = [failure for report in last for phase in report.phases for failure in phase.failed]
    text = "; ".join(f"client {failure.client}: {failure.type}: {failure.detail}" for failure in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    why = f": {text}{more}" if text else ""
    return CommandError(f"the federation is {snapshot.describe()}{why}", Exit.FEDERATION_ENDED_BADLY)


def expect_all_evaluated(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise CommandError if a client could not evaluate: means over the other clients would mislead."""
    for report in reports:
        for failure in report["evaluation"]["failed"] if report["evaluation"] else []:
            why = f"{failure['type']}: {failure['detail']}"
            text = f"client {failure['client']} could not evaluate round {report['round']}: {why}"
            raise CommandError(text, Exit.FAILED)
