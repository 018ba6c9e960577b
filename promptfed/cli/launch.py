"""`promptfed launch`: the federation of a run file on this machine, in processes or in containers, up to its table."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from promptfed.runtime.gpus import choose_gpus, gpus_of_engine, gpus_of_torch
from promptfed.runtime.processes import Processes, ProcessFailed, interrupt_on_sigterm
from promptfed.runtime.run_file import RunFile, check_trainers, read_run
from promptfed.runtime.services import LocalFederation, Services, Site
from promptfed.sdk import operations
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import new_folder
from promptfed.sdk.follow import follow
from promptfed.sdk.output import console, print_json
from promptfed.sdk.progress import Watcher, result_table
from promptfed.sdk.remarks import remarks
from promptfed.sdk.result import Accuracy, FederationResult
from promptfed.sdk.text import size
from promptfed.shared.spec.spec import FederationSpec

Runtime = Literal["process", "docker"]
KEYS = ("method", "runtime", "rounds", "seconds", "state_hash", "zero_shot", "federated", "bytes_up", "bytes_down")
LOGS = "look at the logs with --keep FOLDER"


@dataclass(frozen=True)
class Launch:
    """How a run file is launched; ``gpus`` is auto, none or a number, ``port`` 0 any free one."""

    runtime: Runtime
    gpus: str = "auto"
    port: int = 0
    keep: Path | None = None
    allow_backbone: bool = False


def run_launch(path: Path, clients: int | None, launch: Launch, as_json: bool) -> None:
    """Run the federation that ``path`` describes and print its result; whatever happens, nothing of it is left running.

    Raises:
        CommandError: one line: a run file, backbone or data that cannot be used, more clients or GPUs asked for than
            there are, a port in use, no Docker engine or image, a service that failed, a federation that did not
            finish.
    """
    interrupt_on_sigterm()
    started = time.monotonic()
    run = read_run(path, clients)
    gpus = choose_gpus(launch.gpus, gpus_of_torch if launch.runtime == "process" else gpus_of_engine)
    check_port(launch.port)
    engine = None
    if launch.runtime == "docker" and os.environ.get("PROMPTFED_BACKBONE_FILE"):
        text = "containers do not see a file of weights here: build an image on top of promptfed's that holds it"
        raise CommandError(f"{text}, or run --runtime process", Exit.BAD_INPUT)
    if launch.runtime == "docker":
        from promptfed.runtime.containers import open_engine

        engine = open_engine()
    spec, initial_state, permitted = _prepared(run, launch.allow_backbone)
    with (
        new_folder(launch.keep, "--keep") as folder,
        Watcher(spec.rounds, quiet=as_json) as watcher,
        _services(launch, engine, folder, watcher) as services,
    ):
        services.permitted = permitted
        result = conduct(services, spec, run.sites, watcher, initial_state, gpus)
    seconds = time.monotonic() - started
    if as_json:
        whole = summary(result, seconds) | {"runtime": launch.runtime, "state_hash": result.federation.state_hash}
        print_json({key: whole[key] for key in KEYS})
    else:
        show(result, spec.method["name"], seconds)
        for remark in remarks(result):
            console.print(remark, highlight=False, markup=False, soft_wrap=True)
        console.print(f"State {result.federation.state_hash}", highlight=False, soft_wrap=True)


def conduct(
    services: Services,
    spec: FederationSpec,
    sites: Sequence[Site],
    watcher: Watcher,
    initial_state: bytes | None = None,
    gpus: Sequence[str] = (),
) -> FederationResult:
    """Run a federation to its end; its result.

    Raises:
        CommandError: the federation did not finish.
        ProcessFailed: a service ended for good.
    """
    federation = services.create(spec, initial_state)
    if services.operator_token is not None:
        watcher.note(f"watch it at {services.api.url}/ with the token in {services.operator_token}")
    evaluators = sum(site.role == "evaluator" for site in sites)
    watcher.say(f"starting {_counted(len(sites) - evaluators, 'client')} and {_counted(evaluators, 'evaluator')}")
    services.enrol(federation, sites, lambda count: watcher.say(f"{count} of {len(sites)} have enrolled"), gpus)
    services.api.send(operations.steer(federation, "start"))
    for snapshot in follow(services.api, federation, between=lambda: _revive(services, watcher)):
        watcher.show(snapshot)
    if snapshot.state != "finished":
        raise CommandError(f"the federation is {snapshot.describe()}: {LOGS}", Exit.FEDERATION_ENDED_BADLY)
    result = services.api.run(operations.accuracies(federation))
    if result.evaluated_round is None:
        raise CommandError(f"no client sent an accuracy: {LOGS}", Exit.FAILED)
    return result


def check_port(port: int) -> None:
    """Say that a port is in use before anything is started.

    Raises:
        CommandError: it is.
    """
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError as error:
            text = f"port {port} cannot be used ({error.strerror}): give --port another, or 0 for any free one"
            raise CommandError(text, Exit.BAD_INPUT) from None


def show(result: FederationResult, method: str, seconds: float) -> None:
    """The result for people."""
    rounds = _counted(result.evaluated_round or 0, "round")
    console.print(result_table(result.final(), f"Accuracy of {method} after {rounds}"))
    up, down = size(result.bytes_up), size(result.bytes_down)
    text = f"{seconds:.0f} s in all; the clients sent {up} up and took {down} down, and not one image."
    console.print(text, highlight=False, soft_wrap=True)


def summary(result: FederationResult, seconds: float) -> dict[str, Any]:
    """The result for programs; splits are named ``client:<name>`` and ``unseen:<domain>``."""
    rows = sorted(result.final(), key=lambda row: (row.role != "trainer", row.client))
    own = {_split(row): row for row in rows if row.split == "test"}
    return {
        "method": result.federation.spec.method["name"],
        "rounds": result.evaluated_round,
        "seconds": round(seconds, 2),
        "zero_shot": {name: row.zero_shot for name, row in own.items() if row.zero_shot is not None},
        "federated": {name: row.accuracy for name, row in own.items()},
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
    }


def _prepared(run: RunFile, allow_backbone: bool) -> tuple[FederationSpec, bytes | None, tuple[str, ...]]:
    """The spec as it will run, the initial state where a backbone must make it, and what clients are to permit."""
    from promptfed.sdk.backbone import resolve, with_backbone

    # Rounds start once everybody is there, so that evaluators see the first evaluation too.
    spec, initial_state = with_backbone(resolve({**run.spec, "start": "manual"}), allow_backbone)
    check_trainers(run.sites, spec.participation.min_clients)
    named = (spec.backbone.model, spec.backbone.pretrained) if allow_backbone else ()
    return spec, initial_state, tuple(name for name in named if name is not None)


@contextmanager
def _services(launch: Launch, engine: Any, folder: Path, watcher: Watcher) -> Iterator[Services]:
    watcher.say("starting the coordinator")
    try:
        if engine is None:
            with Processes(folder) as processes, LocalFederation(processes, folder, launch.port) as local:
                yield local
        else:
            from promptfed.runtime.containers import federation_in_containers

            with federation_in_containers(engine, launch.port, folder if launch.keep else None) as contained:
                yield contained
    except ProcessFailed as error:
        raise CommandError(str(error), Exit.FAILED) from None


def _revive(services: Services, watcher: Watcher) -> None:
    for name in services.watch():
        watcher.say(f"{name} had died and was started again")


def _split(row: Accuracy) -> str:
    return f"client:{row.client}" if row.role == "trainer" else f"unseen:{row.domain or row.client}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
