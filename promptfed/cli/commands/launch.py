"""`promptfed launch`: the federation of a run file on this machine, in processes or in containers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from promptfed.cli.app import app
from promptfed.cli.common import AllowBackbone, Json, RunFilePath, Trainers
from promptfed.runtime.gpus import choose_gpus, gpus_of_engine, gpus_of_torch
from promptfed.runtime.processes import Processes, interrupt_on_sigterm
from promptfed.runtime.run_file import RunFile, check_trainers, read_run, with_own_classes
from promptfed.runtime.services import LocalFederation, Services, Site
from promptfed.sdk import operations
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import new_folder
from promptfed.sdk.follow import follow
from promptfed.sdk.output import console, print_json, say
from promptfed.sdk.progress import Watcher, result_table
from promptfed.sdk.remarks import remarks
from promptfed.sdk.result import Accuracy, FederationResult
from promptfed.sdk.text import size
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec

KEYS = ("method", "runtime", "rounds", "seconds", "state_hash", "zero_shot", "federated", "bytes_up", "bytes_down")
LOGS = "look at the logs with --keep FOLDER"


@app.add(section="Try and simulate")
def launch(
    spec: RunFilePath,
    allow_backbone: AllowBackbone,
    runtime: Annotated[Literal["process", "docker"], typer.Option(help="processes, or containers")] = "process",
    clients: Trainers = None,
    gpus: Annotated[str, typer.Option(help="auto, none or a number: GPUs that clients get in turn")] = "auto",
    port: Annotated[int, typer.Option(min=0, max=65535, help="the coordinator's, on loopback; 0: any free one")] = 0,
    keep: Annotated[Path | None, typer.Option(help="keep logs (and the processes' folders) here")] = None,
    as_json: Json = False,
) -> None:
    """Run the federation of a run file on this machine, in processes or containers, and remove them at the end."""
    interrupt_on_sigterm()
    started = time.monotonic()
    run = read_run(spec, clients)
    chosen_gpus = choose_gpus(gpus, gpus_of_torch if runtime == "process" else gpus_of_engine)
    check_port(port)
    engine = None
    if runtime == "docker" and os.environ.get("PROMPTFED_BACKBONE_FILE"):
        text = "containers do not see a file of weights here: build an image on top of promptfed's that holds it"
        raise CommandError(f"{text}, or run --runtime process", Exit.BAD_INPUT)
    if runtime == "docker":
        from promptfed.runtime.containers import open_engine

        engine = open_engine()
    prepared, initial_state = _prepared(run, allow_backbone)
    with (
        new_folder(keep, "--keep") as folder,
        Watcher(prepared.rounds, quiet=as_json) as watcher,
        started_services(engine, port, folder, keep is not None, watcher) as services,
    ):
        services.permitted = tuple(allow_backbone)
        result = conduct(services, prepared, run.sites, watcher, initial_state, chosen_gpus)
    seconds = time.monotonic() - started
    if as_json:
        whole = summary(result, seconds) | {"runtime": runtime, "state_hash": result.federation.state_hash}
        print_json({key: whole[key] for key in KEYS})
    else:
        show_result(result, seconds)
        for remark in remarks(result):
            say(remark)
        say(f"State {result.federation.state_hash}")


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
    """Check, before anything is started, that a port is free.

    Raises:
        CommandError: it is in use.
    """
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError as error:
            text = f"port {port} cannot be used ({error.strerror}): give --port another, or 0 for any free one"
            raise CommandError(text, Exit.BAD_INPUT) from None


def show_result(result: FederationResult, seconds: float) -> None:
    """Print the result for people."""
    spec = result.federation.spec
    rounds = _counted(result.evaluated_round or 0, "round")
    console.print(result_table(result.final(), f"{spec.figure} of {spec.method['name']} after {rounds}"))
    up, down = size(result.bytes_up), size(result.bytes_down)
    say(f"{seconds:.0f} s in all; the clients sent {up} up and took {down} down, and not one image.")


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


def _prepared(run: RunFile, allow_backbone: AllowedBackbones) -> tuple[FederationSpec, bytes | None]:
    """The resolved spec, and the initial state if a backbone must make it."""
    from promptfed.sdk.backbone import resolve, with_backbone

    # Rounds start once everybody is there, so that evaluators see the first evaluation too.
    prepared = with_backbone(with_own_classes(resolve({**run.spec, "start": "manual"}), run.sites), allow_backbone)
    check_trainers(run.sites, prepared[0].participation.min_clients)
    return prepared


@contextmanager
def started_services(engine: Any, port: int, folder: Path, keep: bool, watcher: Watcher) -> Iterator[Services]:
    """A running coordinator, in containers of ``engine`` or, if it is None, in a process.

    Raises:
        ProcessFailed: a service ended for good.
    """
    watcher.say("starting the coordinator")
    if engine is None:
        with Processes(folder) as processes, LocalFederation(processes, folder, port) as local:
            yield local
    else:
        from promptfed.runtime.containers import federation_in_containers

        with federation_in_containers(engine, port, folder if keep else None) as contained:
            yield contained


def _revive(services: Services, watcher: Watcher) -> None:
    for name in services.watch():
        watcher.say(f"{name} had died and was started again")


def _split(row: Accuracy) -> str:
    return f"client:{row.client}" if row.role == "trainer" else f"unseen:{row.domain or row.client}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
