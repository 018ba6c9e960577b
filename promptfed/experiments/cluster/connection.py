"""The connection to Ray, which is started here or is a running cluster, and a check of its resources."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from promptfed.shared import get_extra
from promptfed.shared.errors import BadInput, Failed, PromptfedError, Unreachable
from promptfed.shared.service.addresses import is_loopback

OBJECT_STORE_BYTES = 200 << 20  # of a Ray started here: assignments and results are small
CONNECT_SECONDS = 5.0
STARTS = 3
LONGEST_TEMP_DIR = 40  # characters: Ray's socket paths below it have at most 107
LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLE = "RAY_ADDRESS"


log = logging.getLogger("promptfed.crew")

T = TypeVar("T")


@dataclass(frozen=True)
class Node:
    """A machine of the cluster and its resources for tasks and actors."""

    address: str
    cpus: float
    gpus: float

    def holds(self, cpus: float, gpus: float) -> int:
        """How many crews with ``cpus`` and ``gpus`` each fit."""
        by_cpu = self.cpus / cpus if cpus else math.inf
        by_gpu = self.gpus / gpus if gpus else math.inf
        return math.floor(min(by_cpu, by_gpu) + 1e-9)


@dataclass(frozen=True)
class Cluster:
    """A connection. ``ray`` is the package; ``here`` is this machine's address in the cluster."""

    ray: Any
    here: str

    def nodes(self) -> list[Node]:
        """The machines that are alive."""
        return [
            Node(node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def free(self) -> str:
        """The free resources in words."""
        resources = self.ray.available_resources()
        return _words(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def expect_room(nodes: Sequence[Node], count: int, cpus: float, gpus: float) -> None:
    """Check that the nodes have room for ``count`` crews with ``cpus`` and ``gpus`` each.

    Raises:
        PromptfedError: there is room for fewer. The text lists the nodes.
    """
    room = sum(node.holds(cpus, gpus) for node in nodes)
    if room >= count:
        return
    there = "; ".join(f"{node.address}: {_words(node.cpus, node.gpus)}" for node in nodes) or "no node"
    crews = f"{count} crew{'s' if count > 1 else ''} of {_words(cpus, gpus)}" + (" each" if count > 1 else "")
    text = f"the Ray cluster has no room for {crews}: it holds {room} ({there})"
    fewer = f"--crews {room}" if room else "fewer torch threads, a smaller --pool or share of a GPU"
    raise BadInput(f"{text}; give {fewer}, or a larger cluster with --address")


@dataclass(frozen=True)
class RemoteFailure:
    """An error as the result of a task: raised in the task, it would become another one."""

    error: PromptfedError


def caught(function: Callable[[], T]) -> T | RemoteFailure:
    """What ``function`` returns, or the PromptfedError that it raises."""
    try:
        return function()
    except PromptfedError as error:
        return RemoteFailure(error)


def result_of(ray: Any, reference: Any, ended: str) -> Any:
    """What a task returned.

    Raises:
        PromptfedError: the task failed, or its process ended, which ``ended`` says in words.
    """
    try:
        result = ray.get(reference)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        text = f"{ended} ({type(error).__name__}: {reason}): Ray's own logs say more"
        raise Failed(text) from None
    if isinstance(result, RemoteFailure):
        raise result.error
    return result


def import_ray() -> Any:
    """The package, with its usage statistics switched off.

    Raises:
        PromptfedError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise BadInput(f"ray is not installed: {get_extra('ray')}") from None
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[Cluster]:
    """Connect to the cluster at ``address`` (``auto`` or HOST:PORT), or start Ray here for the block (None).

    Raises:
        PromptfedError: Ray is not installed or does not start, or no cluster answers.
    """
    ray = import_ray()
    if address is not None:
        _expect_answer(address, ray.util.get_node_ip_address())
    if ray.is_initialized():
        raise BadInput("this process is connected to Ray already: call ray.shutdown() first")
    temporary = _temporary_folder() if address is None else None
    options: dict[str, object] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if temporary is not None:
        # On loopback alone, without a dashboard, for this command.
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        options |= {"_temp_dir": str(temporary), "_node_ip_address": LOOPBACK}
    else:
        options |= {"address": address}
    try:
        _initialise(ray, options, address)
        yield Cluster(ray, LOOPBACK if temporary is not None else ray.util.get_node_ip_address())
    finally:
        ray.shutdown()
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _initialise(ray: Any, options: dict[str, object], address: str | None) -> None:
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        started(lambda: ray.init(**options), ray.shutdown, 1 if address is not None else STARTS)
    except Exception as error:  # Ray raises nothing narrower where a node does not come up
        reason = " ".join(str(error).split())[:300]
        if address is None:
            raise Failed(f"Ray does not start here: {reason}") from None
        raise Unreachable(_unreachable(address, reason)) from None
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)  # Ray puts its own in the place of ours, which ends all in order


def started(start: Callable[[], T], undo: Callable[[], object], times: int = STARTS) -> T:
    """What ``start`` returns, with ``times`` attempts: on a busy machine a node may need longer than Ray's 30 s.

    Raises:
        Exception: the last attempt's.
    """
    for _ in range(times - 1):
        try:
            return start()
        except Exception as error:
            log.warning("Ray has not started (%s): once more", " ".join(str(error).split())[:300])
            undo()
    return start()


def _expect_answer(address: str, here: str) -> None:
    """Connect once, since Ray would never stop trying. Ray replaces a loopback address by this machine's, ``here``."""
    if "://" in address:
        text = f"--address {address} is a remote client's: run the command on a machine of the cluster"
        raise BadInput(f"{text} (or submit it there as a job) with --address auto")
    cluster = os.environ.get(ADDRESS_VARIABLE, address) if address == "auto" else address
    if cluster == "auto":
        return  # Ray finds its own by a file
    host, _, port = cluster.rpartition(":")
    if not host or not port.isdecimal():
        text = f"--address {cluster!r} is not known: write auto on a machine of the cluster, or its HOST:PORT"
        raise BadInput(f"{text}, as `ray start --head` prints it")
    host = here if is_loopback(host) else host
    cluster = f"{host}:{port}"
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise Unreachable(_unreachable(cluster, error.strerror or str(error))) from None


def _unreachable(address: str, reason: str) -> str:
    remedy = "start one with `ray start --head`, or leave --address out to start Ray here"
    return f"no Ray cluster answers at {address} ({reason}): {remedy}"


def _temporary_folder() -> Path:
    usual = tempfile.gettempdir()
    folder = usual if len(usual) <= LONGEST_TEMP_DIR else "/tmp"  # noqa: S108 (mkdtemp makes it ours alone)
    return Path(tempfile.mkdtemp(prefix="pf-ray-", dir=folder))


def _words(cpus: float, gpus: float) -> str:
    parts = [f"{value:g} {name}{'' if value == 1 else 's'}" for value, name in ((cpus, "CPU"), (gpus, "GPU")) if value]
    return " and ".join(parts) or "nothing"
