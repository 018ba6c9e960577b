"""Processes in which the clients of a simulation compute.

Threads take turns at Python's interpreter, so a second one gains nothing while models are small. These processes are
forked before the simulation starts its threads: they share the memory of the backbone, the opened data and the drawn
images. A task goes to any idle process, with everything that it depends on. The process writes the update into the
client's folder, as a thread does, so that a result has the same bits wherever it is computed.
"""

from __future__ import annotations

import gc
import importlib
import mmap
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from promptfed.client_service.exits import ClientError
from promptfed.client_service.exits import Exit as ClientExit
from promptfed.client_service.privacy.secure import Trained
from promptfed.client_service.training.data import Cancelled, ClientData, split_by
from promptfed.client_service.training.evaluation import ZeroShotResults
from promptfed.client_service.training.images import DEFAULT_BYTES, ImageCache
from promptfed.client_service.training.trainer import TaskWork
from promptfed.runtime.processes import Site
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import Source, Split
from promptfed.shared.data.pixels import Scale
from promptfed.shared.messages import EvaluationRequest, Task
from promptfed.shared.methods import method_for
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.spec.spec import FederationSpec

HEAR_SECONDS = 0.1  # between two looks at whether a task was cancelled
END_SECONDS = 2.0  # for a process to end
MOST_PROCESSES = 8  # more wait for the coordinator, unless training takes long
SENT = ("name", "role", "state", "agreement", "privacy", "rules")  # fields of TaskWork

Sent = Mapping[str, Any]
STEP = 8 * 32  # images that a process takes at a time: whole batches of the cache


@dataclass
class Inherited:
    """What a process has from the simulation. ``cancelled``: whether its present job is to stop."""

    backbone: Backbone
    features: FeatureCache
    clients: Mapping[str, SimulatedClient]
    images: Images | None
    cancelled: Cancelled
    image_bytes: int  # of preprocessed images that are kept
    _data: dict[str, ClientData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kept = ImageCache(self.image_bytes)

    def work(self, sent: Sent, told: list[Outcomes]) -> TaskWork:
        """A client's work. Its answers on test sets go to ``told``."""
        name, terms = sent["name"], sent["agreement"].consent.terms
        if name not in self._data:
            client = self.clients[name]
            source, tests = split_by(terms, client.source, client.tests, sent["role"])
            self._data[name] = ClientData(source, self.backbone, self.features, self.cancelled, tests, self._kept)
        replaced: dict[str, Any] = {"backbone": self.backbone, "data": self._data[name], "predictor": None}
        return TaskWork(**replaced, record=told.append, **sent)


def _train(here: Inherited, sent: Sent, task: Task, payload: bytes | Path) -> dict[str, float]:
    return here.work(sent, []).train(task, payload, here.cancelled)


def _trained(here: Inherited, sent: Sent, task: Task, payload: bytes | Path) -> Trained:
    return here.work(sent, []).trained(task, payload, here.cancelled)


def _evaluate(
    here: Inherited, sent: Sent, zero_shot: ZeroShotResults, task: Task, payload: bytes | Path
) -> tuple[EvaluationRequest, list[Outcomes], ZeroShotResults]:
    outcomes: list[Outcomes] = []
    work = here.work(sent, outcomes)
    work.evaluation.zero_shot = zero_shot
    return work.evaluate(task, payload, here.cancelled), outcomes, work.evaluation.zero_shot


def _fill(here: Inherited, rows: range, patches: bool) -> None:
    assert here.images is not None
    fill(here.features, here.backbone, here.images, rows, here.cancelled, patches)


class Process:
    """One process, which carries out one job after another. It ends with the simulation, however that ends."""

    def __init__(self, inherited: Callable[[Cancelled], Inherited], others: Sequence[Process]):
        fork = multiprocessing.get_context("fork")
        self._connection, theirs = fork.Pipe()
        self._stop = mmap.mmap(-1, 1)  # shared with the process: 1 once its job is to stop
        strange = [self._connection, *(other._connection for other in others)]
        here = inherited(lambda: self._stop[0] == 1)
        self._process = fork.Process(target=_serve, args=(theirs, strange, here), name="clients", daemon=True)
        self._process.start()
        theirs.close()

    def run(self, request: bytes, cancelled: Cancelled) -> Any:
        """The result of a pickled job.

        Raises:
            ClientError: FAILED, the process has ended.
        """
        self._stop[0] = 0
        try:
            self._connection.send_bytes(request)
            while not self._connection.poll(HEAR_SECONDS):
                self._stop[0] = cancelled()
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            self._process.join(END_SECONDS)
            text = f"the process that computed for it ended with exit code {self._process.exitcode}"
            raise ClientError(ClientExit.FAILED, f"{text}: if memory is short, use a smaller pool") from None
        result, error = pickle.loads(answer)  # noqa: S301 (our own process)
        if error is not None:
            raise _made_again(*error)
        return result

    def close(self) -> None:
        """End the process."""
        self._stop[0] = 1
        self._connection.close()
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, strange: Sequence[Connection], here: Inherited) -> None:
    """The process: answer jobs until the simulation closes its end, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the simulation decides what an interrupt ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in strange:  # an open copy would hide from this process or from another that the simulation is gone
        other.close()
    gc.freeze()  # a collection that looked at inherited objects would copy their memory
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            job, arguments = pickle.loads(connection.recv_bytes())  # noqa: S301 (our own simulation)
            try:
                answer = pickle.dumps((job(here, *arguments), None))
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = pickle.dumps((None, _parts(error)))
            connection.send_bytes(answer)


def _parts(error: Exception) -> tuple[type[Exception], tuple[Any, ...], dict[str, Any]]:
    """What `_made_again` takes. Errors themselves cannot be pickled if their class takes other arguments."""
    reduced: Any = error.__reduce__()
    parts = type(error), reduced[1], vars(error)
    try:
        _made_again(*pickle.loads(pickle.dumps(parts)))  # noqa: S301
    except Exception:
        return RuntimeError, (f"{type(error).__name__}: {error}",), {"__notes__": error.__notes__}
    return parts


def _made_again(kind: type[Exception], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *arguments)
    vars(error).update(attributes)
    return error


class Processes:
    """Processes that share the work of a simulation's clients."""

    def __init__(self, count: int, inherited: Callable[[Cancelled], Inherited]):
        self._all: list[Process] = []
        self._idle: queue.LifoQueue[Process] = queue.LifoQueue()
        for _ in range(count):
            self._all.append(Process(inherited, self._all))
            self._idle.put(self._all[-1])

    def run(self, cancelled: Cancelled, job: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``job(inherited, *arguments)`` in an idle process. Called by one thread for each process."""
        request = pickle.dumps((job, arguments))
        process = self._idle.get()
        try:
            return process.run(request, cancelled)
        finally:
            self._idle.put(process)

    def fill(self, images: int, patches: bool, cancelled: Cancelled) -> None:
        """Put the features of all images into the cache on the disk.

        Raises:
            DataError: an image cannot be read.
            OSError: the disk has no room for the patches' features.
        """
        shares = [range(start, min(start + STEP, images)) for start in range(0, images, STEP)]
        with ThreadPoolExecutor(len(self._all)) as threads:
            list(threads.map(lambda rows: self.run(cancelled, _fill, rows, patches), shares))

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.close()


@dataclass
class RemoteWork(TaskWork):
    """A client's work, computed in ``processes``."""

    processes: Processes | None = None

    def train(self, task: Task, payload: bytes | Path, cancelled: Cancelled) -> dict[str, float]:
        """As `TaskWork.train`."""
        metrics: dict[str, float] = self._remotely(cancelled, _train, task, payload)
        return metrics

    def trained(self, task: Task, payload: bytes | Path, cancelled: Cancelled) -> Trained:
        """As `TaskWork.trained`."""
        trained: Trained = self._remotely(cancelled, _trained, task, payload)
        return trained

    def evaluate(self, task: Task, payload: bytes | Path, cancelled: Cancelled) -> EvaluationRequest:
        """As `TaskWork.evaluate`. Noisy counts are drawn here, since they are paid out of a ledger in memory."""
        if self.privacy.counts is not None:
            return super().evaluate(task, payload, cancelled)
        zero_shot = self.evaluation.zero_shot
        answer: EvaluationRequest
        answer, recorded, zero_shot = self._remotely(cancelled, _evaluate, zero_shot, task, payload)
        self.evaluation.zero_shot = zero_shot
        if self.record is not None:
            for outcomes in recorded:
                self.record(outcomes)
        return answer

    def _remotely(self, cancelled: Cancelled, job: Callable[..., Any], *arguments: Any) -> Any:
        assert self.processes is not None
        return self.processes.run(cancelled, job, {name: getattr(self, name) for name in SENT}, *arguments)


def forks(threads: int, device: str) -> bool:
    """Whether clients with so many torch ``threads`` each can compute in forked processes on ``device``.

    Neither a GPU, autograd's threads on a machine that has one, nor OpenMP's threads can be used after a fork.
    """
    return sys.platform == "linux" and threads == 1 and device == "cpu" and not torch.cuda.is_available()


def usual_pool(threads: int, device: str) -> int:
    """One client for each core where processes compute; threads would gain nothing."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if forks(threads, device) else 1


@contextmanager
def computing_processes(
    count: int, spec: FederationSpec, clients: Sequence[SimulatedClient], backbone: Backbone, features: FeatureCache
) -> Iterator[Processes | None]:
    """``count`` processes for a block, but no more than clients; None where one thread or several compute."""
    if count < 2 or not forks(spec.training.threads, backbone.device.type):
        yield None
        return
    count = min(count, len(clients))
    if spec.privacy.level != "none":  # imported once, and not in each process
        for accountant in ("pld", "rdp"):
            importlib.import_module(f"dp_accounting.{accountant}")
    images = images_of(clients) if method_for(spec).needs.cached_features else None
    named = {client.site.name: client for client in clients}
    kept = DEFAULT_BYTES // count
    processes = Processes(count, lambda cancelled: Inherited(backbone, features, named, images, cancelled, kept))
    try:
        yield processes
    finally:
        processes.close()


class _Stopped(Exception):
    pass


@dataclass(frozen=True)
class SimulatedClient:
    """A site with its opened data."""

    site: Site
    source: Source
    tests: dict[str, Source]

    def splits(self) -> list[Split]:
        """The splits whose features the client computes."""
        trained = [self.source.train] if self.site.role == "trainer" else []
        return [*trained, self.source.test, *(other.test for other in self.tests.values())]


class Images:
    """The distinct images of many splits, with the interface that the feature cache expects of a split."""

    def __init__(self, splits: Iterable[Split]):
        places: dict[str, tuple[Split, int]] = {}
        for split in splits:
            for row in range(len(split)):
                places.setdefault(split.digest(row), (split, row))
        self._places = list(places.items())

    def __len__(self) -> int:
        return len(self._places)

    def image(self, index: int) -> Any:
        split, row = self._places[index][1]
        return split.image(row)

    def digest(self, index: int) -> str:
        return self._places[index][0]

    def path(self, index: int) -> Path | None:
        split, row = self._places[index][1]
        return split.path(row)

    def scale(self, index: int) -> Scale | None:
        split, row = self._places[index][1]
        return split.scale(row)


def images_of(clients: Iterable[SimulatedClient]) -> Images:
    """All images whose features the clients compute.

    Raises:
        PromptfedError: an image cannot be read.
    """
    return Images(split for client in clients for split in client.splits())


def fill(
    cache: FeatureCache,
    backbone: Backbone,
    images: Images,
    rows: range,
    stopped: Callable[[], bool],
    patches: bool = False,
) -> None:
    """Put the features of the images at ``rows`` into ``cache``; with ``patches``, those of their patches too.

    Raises:
        DataError: an image cannot be read.
        OSError: the disk has no room for the patches' features.
    """

    def done(count: int) -> None:
        if stopped():
            raise _Stopped

    with suppress(_Stopped):
        done(0)
        cache.features(backbone, images, indices=rows, done=done)
        if patches:
            cache.patches.fill(backbone, images, rows, done)
