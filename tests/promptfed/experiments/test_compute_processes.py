"""Processes that compute for simulated clients: their errors, their end, and what they share."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from promptfed.client_service.exits import ClientError, Exit, Failure
from promptfed.experiments.simulation.asgi_transport import InProcess
from promptfed.experiments.simulation.preparation import open_site
from promptfed.experiments.simulation.processes import Inherited, Processes, computing_processes, images_of, usual_pool
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone
from promptfed.shared.clip.embedded import tiny
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.errors import PromptfedError
from promptfed.shared.messages import Peer
from promptfed.shared.methods import resolve_spec
from promptfed.shared.methods.core.interface import ClientContext, MethodError, TrainResult
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.tensors import Tensors

DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=3&client={}"


SITES = [Site(f"site-{k}", DATA.format(k)) for k in range(3)]


SPEC = {"name": "simulated", "method": {"name": "promptfl", "m": 2}, "rounds": 1}


def raise_error(here: Inherited, number: int) -> None:
    errors = [
        MethodError("the loss is not finite"), Failure("data-changed", "4 records instead of 5"),
        ClientError(Exit.WITHDRAWN, "withdrawn"), OSError(28, "no room", "somewhere"), KeyError("name"),
        TaskCancelled(),
    ]  # fmt: skip
    raise errors[number]


def raise_odd_error(here: Inherited) -> None:
    Peer.model_validate(3)


def wait_for_cancel(here: Inherited) -> int:
    while not here.cancelled():
        pass
    return os.getpid()


def pid(here: Inherited) -> int:
    return os.getpid()


def end(here: Inherited) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def processes(backbone: Backbone, tmp_path: Path) -> Iterator[Processes]:
    shared = SharedSources()
    clients = [open_site(site, shared) for site in SITES]
    with computing_processes(2, resolve_spec(SPEC), clients, backbone, FeatureCache(tmp_path)) as made:
        assert made is not None
        yield made
    assert multiprocessing.active_children() == []


def never() -> bool:
    return False


@pytest.mark.parametrize(("number", "kind", "text"), [
    (0, MethodError, "the loss is not finite"), (1, Failure, "4 records instead of 5"), (2, ClientError, "withdrawn"),
    (3, OSError, "[Errno 28] no room: 'somewhere'"), (4, KeyError, "'name'"), (5, TaskCancelled, ""),
])  # fmt: skip
def test_an_error_is_the_one_that_was_raised_with_its_traceback(
    number: int, kind: type[Exception], text: str, processes: Processes
) -> None:
    with pytest.raises(kind) as caught:
        processes.run(never, raise_error, number)
    assert type(caught.value) is kind
    assert str(caught.value) == text
    assert "in raise_error" in caught.value.__notes__[0]
    assert getattr(caught.value, "kind", "") == ("data-changed" if kind is Failure else "")
    assert getattr(caught.value, "exit", Exit.WITHDRAWN) == Exit.WITHDRAWN


def test_an_error_that_cannot_be_made_again_is_named(processes: Processes) -> None:
    with pytest.raises(RuntimeError, match="ValidationError: 1 validation error") as caught:
        processes.run(never, raise_odd_error)
    assert "in raise_odd_error" in caught.value.__notes__[0]


def test_a_job_hears_that_it_is_cancelled_and_the_next_one_does_not(processes: Processes) -> None:
    first = processes.run(lambda: True, wait_for_cancel)
    assert first != os.getpid()
    assert processes.run(never, pid) == first


def test_a_process_that_is_killed_ends_the_simulation_in_one_line(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: PromptFL, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    monkeypatch.setattr(PromptFL, "train", killed)
    with pytest.raises(
        PromptfedError, match=r"client site-\d: the process that computed for it ended with exit code -9"
    ):
        simulate(SPEC, SITES, pool=2, backbone=backbone, features=tmp_path)
    assert multiprocessing.active_children() == []


def test_processes_compute_the_features_that_one_thread_computes(
    backbone: Backbone, processes: Processes, tmp_path: Path
) -> None:
    shared = SharedSources()
    images = images_of(open_site(site, shared) for site in SITES)
    processes.fill(len(images), False, never)
    own, other = FeatureCache(tmp_path), FeatureCache(tmp_path / "other")
    assert torch.equal(own.features(backbone, images), other.features(backbone, images))
    assert own.images_computed == 0
    assert other.images_computed == len(images)


@pytest.mark.parametrize(
    ("threads", "device", "gpu", "pool"), [(1, "cpu", False, 2), (2, "cpu", False, 1), (1, "cuda", True, 1)]
)
def test_a_pool_has_a_client_for_each_core_where_processes_compute(
    threads: int, device: str, gpu: bool, pool: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert usual_pool(threads, device) == pool


URL = "http://127.0.0.1"


@pytest.fixture
def app() -> FastAPI:
    made = FastAPI()

    @made.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError

    @made.get("/half")
    async def half() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"a"
            raise ZeroDivisionError

        return StreamingResponse(parts())

    @made.get("/slow")
    async def slow(request: Request) -> None:
        await asyncio.sleep(60)

    return made


def run(app: FastAPI, call: Any) -> Any:
    async def main() -> Any:
        async with httpx.AsyncClient(transport=InProcess(app), base_url=URL) as http:
            found: Awaitable[Any] = call(http)
            return await found

    return asyncio.run(main())


def test_what_breaks_is_a_500_or_breaks_off(app: FastAPI) -> None:
    assert run(app, lambda http: http.get("/broken")).status_code == 500
    with pytest.raises(httpx.RemoteProtocolError):
        run(app, lambda http: http.get("/half"))


def test_a_request_can_be_given_up(app: FastAPI) -> None:
    async def call(http: httpx.AsyncClient) -> None:
        async with asyncio.timeout(0.05):
            await http.get("/slow")

    with pytest.raises(TimeoutError):
        run(app, call)


# Whole clients protected in a simulation: the same bits again, said to be seeded, in the result and on the card.


PRIVATE = {
    "name": "simulated", "method": {"name": "promptfl", "m": 4}, "rounds": 2,
    "training": {"learning_rate": 0.02, "batch_size": 4},
    "participation": {"min_clients": 3, "fraction": 0.7, "sampling": "poisson"},
    "aggregation": {"weighting": "uniform"},
    "privacy": {"level": "client", "clip": 0.5, "noise_multiplier": 1.0, "accept_noise": True, "evaluation": "plain"},
    "evaluation": {"every": 2},
}  # fmt: skip


@pytest.mark.extended
def test_no_loss_and_no_accuracy_of_a_protected_client_leaves_it_unless_somebody_asks(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    spec = PRIVATE | {"rounds": 1, "participation": {"min_clients": 3}}
    spec["privacy"] = {key: value for key, value in PRIVATE["privacy"].items() if key != "evaluation"}
    done = simulate(spec, SITES, backbone=load_backbone(tiny.MODEL, tiny.PRETRAINED), features=FeatureCache(tmp_path))
    updates = [update for report in done.round_reports for phase in report.phases for update in phase.updates]
    assert [set(update.metrics) for update in updates] == [{"trained_parameters"}] * 3
    stages = [report.evaluation for report in done.round_reports if report.evaluation is not None]
    told = [client for stage in stages for client in stage.clients.values()]
    assert len(told) == 6
    assert all((one.splits, one.zero_shot, one.metrics, one.withheld) == ({}, {}, {}, True) for one in told)
