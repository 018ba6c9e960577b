"""A federation in one process: the very coordinator and the very clients, over an in-process transport.

There is no second implementation of anything: the coordinator's app answers, the client's worker trains. What differs
is what they share: one backbone, one feature cache, each data set opened once, and a bounded pool of threads that
computes for all clients in turn. Since clients take turns, a deadline would measure the queue: it is set to the longest
there is. With the same number of torch threads the final state is, bit for bit, that of the same spec in processes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch

from promptfed.coordinator.app import create_app, lifespan
from promptfed.coordinator.http.tokens import OPERATOR_FILE
from promptfed.coordinator.settings import Settings
from promptfed.experiments.asgi_transport import InProcess
from promptfed.experiments.feature_warmup import warm
from promptfed.experiments.preparation import Plan, Progress, checked, expected_backbone, open_site
from promptfed.experiments.workers import AHEAD, Crew, crew
from promptfed.runtime.services import Site
from promptfed.sdk.backbone import described, open_backbone
from promptfed.sdk.client import CommandError
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.progress import Snapshot
from promptfed.sdk.simulated import Simulated, seconds_of_clients
from promptfed.sdk.simulation_operator import Operator
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import DataError
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.methods import method_for, resolve_spec
from promptfed.shared.tensors import decode

URL = "http://127.0.0.1"  # of a coordinator that no socket leads to
POLL_SECONDS = 0.2
HEAR_SECONDS = 0.5
LEAVE_SECONDS = 10.0  # that an interrupted simulation may take to end


def simulate(
    spec: dict[str, Any],
    sites: Sequence[Site],
    *,
    folder: Path | None = None,
    pool: int = 1,
    backbone: Backbone | None = None,
    features: Path | FeatureCache | None = None,
    sources: SharedSources | None = None,
    device: str = "cpu",
    allow_backbone: bool = False,
    progress: Progress | None = None,
) -> Simulated:
    """Run a federation to its end in this process.

    ``folder`` (new or empty; default: a temporary one) keeps what coordinator and clients keep. ``pool`` clients
    compute at once, each with ``training.threads`` torch threads. ``backbone``, ``features`` and ``sources`` can be
    handed in, to serve several runs; else they are made from the spec, in ``folder`` and from the sites' URIs.
    ``progress`` is called in another thread, where five times a second something has changed: a quick round may pass
    untold. ``simulate`` can be called anywhere, also where an event loop runs; nothing global is left changed.

    Raises:
        CommandError: one line: a spec, data or backbone that cannot be used, a client that failed, a federation that
            did not finish.
    """
    with _torch_put_back(), _folder(folder) as place:
        started = time.monotonic()
        raw, threads = checked(spec, sites, pool)
        model = expected_backbone(raw, backbone) or open_backbone(raw, allow_backbone=allow_backbone, device=device)
        _choose_kernels(raw, model)
        raw, initial = described(raw, model)
        cache = features if isinstance(features, FeatureCache) else FeatureCache(features or place / "features")
        shared = sources or SharedSources()
        clients = tuple(open_site(site, shared) for site in sites)
        plan = Plan(raw, initial, threads, clients, place, pool, model, cache, progress or (lambda snapshot: None))
        try:
            return _in_a_thread(plan, started)
        except OSError as error:
            raise CommandError(f"cannot work in {place}: {error.strerror or error}", Exit.FAILED) from None


@contextmanager
def _torch_put_back() -> Iterator[None]:
    """A block after which torch's global settings are what they were."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def _choose_kernels(raw: dict[str, Any], backbone: Backbone) -> None:
    """Deterministic ones where a GPU needs them, for the whole run: clients switch them for each task, at once."""
    if resolve_spec(raw).training.deterministic and backbone.device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="promptfed-simulation-", ignore_cleanup_errors=True) as made:
            yield Path(made)
        return
    try:
        given.mkdir(parents=True, exist_ok=True)
        if any(given.iterdir()):
            raise CommandError(f"{given} is not empty: give a new folder", Exit.BAD_INPUT)
    except OSError as error:
        raise CommandError(f"cannot use {given}: {error.strerror}", Exit.BAD_INPUT) from None
    yield given


def _in_a_thread(plan: Plan, started: float) -> Simulated:
    """Run the event loop in a thread of its own, since the caller may have one; Ctrl-C ends it from here."""
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Simulated]]] = []
    interrupted = threading.Event()
    result: concurrent.futures.Future[Simulated] = concurrent.futures.Future()

    async def main() -> Simulated:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        if interrupted.is_set():
            raise asyncio.CancelledError
        return await _run(plan, started)

    def target() -> None:
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=target, name="simulation", daemon=True)
    thread.start()
    try:
        while not result.done():
            # Not one long wait: a signal that another thread got is only heard of between two.
            concurrent.futures.wait([result], timeout=HEAR_SECONDS)
        return result.result()
    except KeyboardInterrupt:
        interrupted.set()
        for loop, task in running:
            with suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join(LEAVE_SECONDS)


async def _run(plan: Plan, started: float) -> Simulated:
    settings = _coordinator_settings(plan)
    app = create_app(settings)
    async with lifespan(app), httpx.AsyncClient(transport=InProcess(app), base_url=URL, trust_env=False) as http:
        operator = Operator(http, (settings.data_dir / OPERATOR_FILE).read_text().strip())
        federation = (await operator.post("/v1/federations", plan.spec))["id"]
        path = f"/v1/federations/{federation}"
        if plan.initial_state is not None:
            await operator.call("PUT", f"{path}/initial-state", content=plan.initial_state)
        token = (await operator.post(f"{path}/enrolment-tokens"))["token"]
        await _warm(plan)
        async with crew(plan, http, federation, token) as clients:
            await clients.enrolled()
            begun = time.monotonic()
            await operator.post(f"{path}/start")
            await _follow(plan, operator, path, clients)
            ended = time.monotonic()
            return await _result(plan, operator, path, ended - begun, begun - started)


def _coordinator_settings(plan: Plan) -> Settings:
    """Whatever the environment says of another coordinator's database and first federation."""
    return Settings(
        data_dir=plan.folder / "coordinator",
        database_url=None,
        database_url_file=None,
        bootstrap=None,
        enrolment_token_file=None,
        max_uploads=plan.pool + AHEAD,
    )


async def _warm(plan: Plan) -> None:
    """Compute the features of all images that clients will ask for, where the method lets them be kept."""
    if not method_for(resolve_spec(plan.spec)).needs.cached_features:
        return
    splits = [split for client in plan.clients for split in client.splits()]
    stop = threading.Event()
    job = asyncio.create_task(asyncio.to_thread(warm, plan.features, plan.backbone, splits, plan.threads, stop.is_set))
    try:
        await asyncio.shield(job)
    except DataError as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None
    finally:
        stop.set()
        await asyncio.wait({job})


async def _follow(plan: Plan, operator: Operator, path: str, clients: Crew) -> None:
    """Tell the progress until the federation has finished.

    Raises:
        CommandError: it ended otherwise, or a client failed.
    """
    last = None
    while True:
        found = Snapshot.of(await operator.get(path))
        if found != last:
            plan.progress(found)
            last = found
        if found.state == "finished":
            return
        if found.over:
            why = await _failures(operator, path, found.round)
            raise CommandError(f"the federation is {found.describe()}{why}", Exit.FEDERATION_ENDED_BADLY)
        await clients.wait(POLL_SECONDS)


async def _failures(operator: Operator, path: str, round: int) -> str:
    """What clients said of the tasks that they could not carry out."""
    report = await operator.get(f"{path}/rounds/{round}")
    failed = [one for phase in report["phases"] for one in phase["failed"]]
    told = "; ".join(f"client {one['client']}: {one['type']}: {one['detail']}" for one in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    return f": {told}{more}" if told else ""


def _expect_all_evaluated(reports: list[dict[str, Any]]) -> None:
    """Accuracies without those of clients that could not measure theirs would say something else."""
    for report in reports:
        for one in report["evaluation"]["failed"] if report["evaluation"] else []:
            text = f"client {one['client']} could not evaluate round {report['round']}: {one['type']}: {one['detail']}"
            raise CommandError(text, Exit.FAILED)


async def _result(plan: Plan, operator: Operator, path: str, wall: float, setup: float) -> Simulated:
    federation = await operator.get(path)
    reports = [report async for report in operator.pages(f"{path}/rounds", "rounds")]
    _expect_all_evaluated(reports)
    tensors, _ = decode((await operator.call("GET", f"{path}/prompts")).content)
    return Simulated(
        spec=federation["spec"],
        federation=federation,
        clients=[client async for client in operator.pages(f"{path}/clients", "clients")],
        reports=reports,
        state=tensors,
        state_hash=federation["state_hash"],
        backbone_fingerprint=plan.backbone.fingerprint,
        bytes_up=sum(report["bytes_up"] for report in reports),
        bytes_down=sum(report["bytes_down"] for report in reports),
        client_seconds=seconds_of_clients(reports),
        wall_seconds=wall,
        setup_seconds=setup,
    )
