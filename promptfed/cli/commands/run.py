"""Whole federations: `promptfed demo`, `simulate`, `launch`; and `track`, which sends their metrics to trackers."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from promptfed.cli.app import Made, app
from promptfed.cli.common import (
    AllowBackbone,
    Api,
    Device,
    Engine,
    Federation,
    Json,
    NewData,
    RayAddress,
    RunFilePath,
    SimulationPool,
    Trainers,
    Written,
    refuse,
)
from promptfed.console import progress
from promptfed.console.files import new_folder, write_file
from promptfed.console.output import console, note, points, print_json, remarks, say, tell
from promptfed.console.progress import (
    Snapshot,
    Watcher,
    follow,
    measured,
    open_tracker,
    record,
    result_table,
    why_this_round,
)
from promptfed.runtime.processes import LocalFederation, Processes, Services, Site, interrupt_on_sigterm
from promptfed.runtime.run_file import RunFile, check_trainers, read_run, with_own_classes
from promptfed.sdk import operations
from promptfed.sdk.result import Accuracy, FederationReports, FederationResult, interval_of, margin_of
from promptfed.shared import get_extra
from promptfed.shared.data.demo import DEMOS, Demo
from promptfed.shared.errors import BadInput, EndedBadly, Failed, Refused
from promptfed.shared.methods import resolve_spec
from promptfed.shared.plain_text import counted, percent, plain, size, with_interval
from promptfed.shared.service.addresses import bind
from promptfed.shared.service.reasons import Exit
from promptfed.shared.service.streams import leave
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec, SpecError

MOST_ROWS = 12  # clients that a table shows one by one
RESULT_FILE, PROMPTS_FILE = "result.json", "prompts.safetensors"
RUN_FOLDER = "run"  # of a run that was interrupted, which the same command goes on with
KEYS = ("method", "runtime", "rounds", "seconds", "state_hash", "zero_shot", "federated", "bytes_up", "bytes_down")
LOGS = "look at the logs with --keep FOLDER"
PATIENTS, IMAGES_EACH = 30, 6


@dataclass(frozen=True)
class RoleSummary:
    """The clients of one role on one of their test sets: accuracies as fractions, ``sd`` and ``worst`` over clients.

    ``interval`` (95 %) is the mean's and ``gain_margin`` half of the mean gain's, where counts are exact.
    """

    role: str
    split: str
    clients: int
    zero_shot: float | None
    mean: float
    sd: float | None
    worst: float
    interval: tuple[float, float] | None
    gain_margin: float | None


@dataclass(frozen=True)
class Cluster:
    """Whether clients compute on a Ray cluster, and how they are shared out over it."""

    engine: Engine = None
    crews: Annotated[int, typer.Option(min=1, help="--engine ray: processes that share the clients")] = 1
    address: RayAddress = None
    gpus_per_crew: Annotated[float, typer.Option(min=0, help="--engine ray: as 0.25, for four crews on one GPU")] = 0
    storage: Annotated[
        Path | None, typer.Option(help="--engine ray: folder that all nodes see; an interrupted run goes on from it")
    ] = None


@app.add(section="Try and simulate")
def simulate(
    spec: RunFilePath,
    cluster: Annotated[Cluster, Made(Cluster)],
    written: Written,
    allow_backbone: AllowBackbone,
    clients: Trainers = None,
    pool: SimulationPool = None,
    out: Annotated[
        Path | None, typer.Option(help="keep the result and the prompts here; an interrupted run goes on from it")
    ] = None,
    new_data: NewData = False,
    track: Annotated[list[str] | None, typer.Option(help="tensorboard:FOLDER or mlflow:URI, repeatable")] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Run the federation of a run file in this one process: the same services without sockets, for hundreds of clients.

    With --engine ray the clients are divided over processes of a cluster; the same spec and seed give the same state.
    """
    if cluster.engine is None:
        ray_only = {"crews", "address", "gpus_per_crew", "storage"}
        refuse(written & ray_only, "for --engine ray; add it, or leave them out")
    interrupt_on_sigterm()
    started = time.monotonic()
    run = read_run(spec, clients)

    resolved = resolve_spec(run.spec)
    options: dict[str, Any] = {
        "pool": pool, "device": device, "allow_backbone": allow_backbone, "new_data": new_data,
    }  # fmt: skip
    try:
        with (
            ExitStack() as open_trackers,
            results_folder(out) as folder,
            Watcher(resolved.rounds, quiet=as_json) as watcher,
        ):
            progress = [open_trackers.enter_context(open_tracker(where)) for where in track or ()]
            if run.chosen is not None:
                watcher.note(run.chosen)
            watcher.say(f"{counted(len(run.sites), 'client')}: their images and features")
            if out is not None and cluster.engine is None:
                options |= {"folder": folder / RUN_FOLDER, "lasting": True}
            result = _result(resolved, run, cluster, progress=watcher.show, **options)
            if out is not None:
                _keep(result, folder)
                shutil.rmtree(folder / RUN_FOLDER, ignore_errors=True)
            for tracker in progress:
                record(tracker, result)
    except KeyboardInterrupt:
        # The interpreter would wait for the thread that computes.
        kept = out is not None and (out / RUN_FOLDER).is_dir()
        note("promptfed: interrupted" + (f"; the same command goes on with the rounds in {out}" if kept else ""))
        leave(Exit.INTERRUPTED)
    seconds = time.monotonic() - started
    if as_json:
        print_json(_summary_json(result, seconds))
    else:
        _show(result, seconds, out)


@contextmanager
def results_folder(out: Path | None) -> Iterator[Path]:
    """``out``, which is new, empty, or holds a run that was interrupted; a temporary folder if it is None.

    Raises:
        PromptfedError: the folder cannot be used.
    """
    if out is not None and out.is_dir() and [entry.name for entry in out.iterdir()] == [RUN_FOLDER]:
        yield out
        return
    with new_folder(out, "--out") as folder:
        yield folder


def _result(spec: FederationSpec, run: RunFile, cluster: Cluster, **options: Any) -> FederationResult:
    from promptfed.experiments.cluster.run import OnRay, simulate_on_ray
    from promptfed.experiments.simulation import simulation

    if cluster.engine is None:
        return simulation.simulate(spec, run.sites, **options)
    on_ray = OnRay(cluster.crews, cluster.address, cluster.gpus_per_crew, cluster.storage)
    return simulate_on_ray(spec, run.sites, on_ray, **options | {"pool": options["pool"] or 1})


def summaries(accuracies: Sequence[Accuracy]) -> list[RoleSummary]:
    """One for each role and test set, trainers and their own test images first."""
    groups: dict[tuple[str, str], list[Accuracy]] = {}
    for accuracy in accuracies:
        groups.setdefault((accuracy.role, accuracy.split), []).append(accuracy)
    order = sorted(groups, key=lambda key: (key[0] != "trainer", key[1] != "test", key[1]))
    return [_summary(*key, groups[key]) for key in order]


def _summary(role: str, split: str, members: list[Accuracy]) -> RoleSummary:
    values = [member.accuracy for member in members]
    zero_shot = [member.zero_shot for member in members if member.zero_shot is not None]
    return RoleSummary(
        role=role,
        split=split,
        clients=len(members),
        zero_shot=fmean(zero_shot) if zero_shot else None,
        mean=fmean(values),
        sd=stdev(values) if len(values) > 1 else None,
        worst=min(values),
        interval=interval_of(members),
        gain_margin=margin_of(members),
    )


def _summary_json(result: FederationResult, seconds: float) -> dict[str, Any]:
    counts = result.federation.clients
    return {
        "name": result.federation.name,
        "method": result.federation.spec.method["name"],
        "rounds": result.round,
        "clients": counts.trainers + counts.evaluators,
        "accuracy": [asdict(summary) for summary in summaries(result.final())],
        "remarks": remarks(result),
        "state_hash": result.state_hash,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "client_seconds": round(result.client_seconds, 3),
        "wall_seconds": round(result.wall_seconds, 3),
        "setup_seconds": round(result.setup_seconds, 3),
        "seconds": round(seconds, 3),
    }


def _keep(result: FederationResult, folder: Path) -> None:
    from promptfed.experiments.bench.runner import provenance

    kept = _summary_json(result, result.setup_seconds + result.wall_seconds) | {
        "accuracies": [asdict(accuracy) for accuracy in result.accuracies()],
        "by_round": [_round(report) for report in result.reports],
        "spec": result.spec,
        "backbone_fingerprint": result.federation.backbone.fingerprint,
        "provenance": provenance().model_dump(),
    }
    write_file(folder / RESULT_FILE, (json.dumps(kept, indent=1, ensure_ascii=False) + "\n").encode())
    write_file(folder / PROMPTS_FILE, result.body)


def _round(report: Mapping[str, Any]) -> dict[str, Any]:
    phases = [
        {key: phase[key] for key in ("phase", "seconds", "sample_size", "asked", "metrics")}
        | {"counted": [update["client"] for update in phase["counted"]]}
        for phase in report["phases"]
    ]
    return {key: report[key] for key in ("round", "seconds", "state_hash", "bytes_up", "bytes_down")} | {
        "phases": phases
    }


def _show(result: FederationResult, seconds: float, out: Path | None) -> None:
    spec = result.federation.spec
    title = f"{spec.figure} of {spec.method['name']} after {counted(result.round, 'round')}"
    console.print(_table(result.final(), title))
    for line in (*why_this_round(result.federation), *remarks(result)):
        say(line)
    parts = [
        f"{seconds:.0f} s in all",
        f"the clients computed for {result.client_seconds:.0f} s",
        f"sent {size(result.bytes_up)} up and took {size(result.bytes_down)} down",
    ]
    say("; ".join(parts) + ".")
    say(f"State {result.state_hash}")
    if out is not None:
        say(f"Wrote {RESULT_FILE} and {PROMPTS_FILE} in {out}.")


def _table(final: Sequence[Accuracy], title: str) -> Table:
    if len(final) <= MOST_ROWS and all(accuracy.split == "test" for accuracy in final):
        return result_table(final, title)
    columns = ["clients", "n", "test set", "zero-shot", "federated", "sd", "worst", "gain"]
    return measured(title, columns, [_cells(summary) for summary in summaries(final)], final)


def _cells(group: RoleSummary) -> list[str]:
    sd = "-" if group.sd is None else f"{100 * group.sd:.1f}"
    who = "trainers" if group.role == "trainer" else "evaluators"
    federated = with_interval(group.mean, group.interval)
    gain = points(group.zero_shot, group.mean, group.gain_margin)
    adapted = [percent(group.zero_shot), federated, sd, percent(group.worst), gain]
    return [who, str(group.clients), group.split, *adapted]


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
    from promptfed.runtime.containers import choose_gpus, gpus_of_engine, gpus_of_torch

    chosen_gpus = choose_gpus(gpus, gpus_of_torch if runtime == "process" else gpus_of_engine)
    check_port(port)
    engine = None
    if runtime == "docker" and os.environ.get("PROMPTFED_BACKBONE_FILE"):
        text = "containers do not see a file of weights here: build an image on top of promptfed's that holds it"
        raise BadInput(f"{text}, or run --runtime process")
    if runtime == "docker":
        from promptfed.runtime.containers import open_engine

        engine = open_engine()
    prepared, initial_state = _prepared(run, allow_backbone)
    with (
        new_folder(keep, "--keep") as folder,
        Watcher(prepared.rounds, quiet=as_json) as watcher,
        started_services(engine, port, folder, keep is not None, watcher, fork=not chosen_gpus) as services,
    ):
        if run.chosen is not None:
            watcher.note(run.chosen)
        services.permitted = tuple(allow_backbone)
        result = conduct(services, prepared, run.sites, watcher, initial_state, chosen_gpus)
        noticed = services.api.send(operations.get_remarks(result.federation.id)).view.remarks
    seconds = time.monotonic() - started
    if as_json:
        whole = summary(result, seconds) | {"runtime": runtime}
        print_json({key: whole[key] for key in KEYS})
    else:
        show_result(result, seconds)
        for remark in noticed:
            say(plain(remark))


def conduct(
    services: Services,
    spec: FederationSpec,
    sites: Sequence[Site],
    watcher: Watcher,
    initial_state: bytes | None = None,
    gpus: Sequence[str] = (),
) -> FederationReports:
    """Run a federation to its end; its result.

    Raises:
        PromptfedError: the federation did not finish.
        ProcessFailed: a service ended for good.
    """
    federation = services.create(spec, initial_state)
    if services.operator_token is not None:
        watcher.note(f"watch it at {services.api.url}/ with the token in {services.operator_token}")
    evaluators = sum(site.role == "evaluator" for site in sites)
    watcher.say(f"starting {counted(len(sites) - evaluators, 'client')} and {counted(evaluators, 'evaluator')}")
    services.enrol(federation, sites, lambda count: watcher.say(f"{count} of {len(sites)} have enrolled"), gpus)
    services.api.send(operations.steer(federation, "start"))
    for snapshot in follow(services.api, federation, between=lambda: _revive(services, watcher)):
        watcher.show(snapshot)
    if snapshot.state != "finished":
        raise EndedBadly(f"the federation is {snapshot.describe()}: {LOGS}")
    result = services.api.run(operations.accuracies(federation))
    if result.evaluated_round is None:
        raise Failed(f"no client sent an accuracy: {LOGS}")
    return result


def check_port(port: int) -> None:
    """Check, before anything is started, that a port is free.

    Raises:
        PromptfedError: it is in use.
    """
    try:
        bind("127.0.0.1", port).close()
    except OSError as error:
        text = f"port {port} cannot be used ({error.strerror}): give --port another, or 0 for any free one"
        raise BadInput(text) from None


def show_result(result: FederationReports, seconds: float) -> None:
    """Print the result for people."""
    spec = result.federation.spec
    rounds = counted(result.evaluated_round or 0, "round")
    console.print(result_table(result.final(), f"{spec.figure} of {spec.method['name']} after {rounds}"))
    up, down = size(result.bytes_up), size(result.bytes_down)
    say(f"{seconds:.0f} s in all; the clients sent {up} up and took {down} down, and not one image.")
    for line in why_this_round(result.federation):
        say(line)
    say(f"State {result.result_hash}")


def summary(result: FederationReports, seconds: float) -> dict[str, Any]:
    """The result for programs; splits are named ``client:<name>`` and ``unseen:<domain>``."""
    rows = sorted(result.final(), key=lambda row: (row.role != "trainer", row.client))
    test_rows = {_split(row): row for row in rows if row.split == "test"}
    return {
        "method": result.federation.spec.method["name"],
        "rounds": result.evaluated_round,
        "seconds": round(seconds, 2),
        "zero_shot": {name: row.zero_shot for name, row in test_rows.items() if row.zero_shot is not None},
        "federated": {name: row.accuracy for name, row in test_rows.items()},
        "intervals": {name: [row.low, row.high] for name, row in test_rows.items() if row.low is not None},
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "state_hash": result.result_hash,
    }


def _prepared(run: RunFile, allow_backbone: AllowedBackbones) -> tuple[FederationSpec, bytes | None]:
    """The resolved spec, and the initial state if a backbone must make it."""
    from promptfed.shared.methods.core.spec_backbone import with_backbone

    # Rounds start once everybody is there, so that evaluators see the first evaluation too.
    prepared = with_backbone(with_own_classes(resolve_spec({**run.spec, "start": "manual"}), run.sites), allow_backbone)
    check_trainers(run.sites, prepared[0].participation.min_clients)
    return prepared


@contextmanager
def started_services(
    engine: Any, port: int, folder: Path, keep: bool, watcher: Watcher, *, fork: bool = True
) -> Iterator[Services]:
    """A running coordinator, in containers of ``engine`` or, if it is None, in a process.

    ``fork``: clients compute on the CPU, so that one process can import torch for all of them.

    Raises:
        ProcessFailed: a service ended for good.
    """
    watcher.say("starting the coordinator")
    if engine is None:
        with Processes(folder) as processes:
            if fork:
                processes.fork_clients()
            with LocalFederation(processes, folder, port) as local:
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


@app.add(section="Try and simulate")
def demo(
    method: Annotated[
        str | None, typer.Option(help="a method of `promptfed methods`; default: what suits the data")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="rounds; default: what suits the data")] = None,
    data: Annotated[str, typer.Option(help="symbols, emoji, digits, dicom or solar")] = "symbols",
    seed: Annotated[int, typer.Option(min=0, help="of all random draws")] = 0,
    keep: Annotated[Path | None, typer.Option(help="keep the services' folders and logs here")] = None,
    as_json: Json = False,
) -> None:
    """Run a whole federation on this machine without any download: a coordinator, three clients, an unseen domain."""
    interrupt_on_sigterm()
    started = time.monotonic()
    if data not in DEMOS:
        raise BadInput(f"there is no demo {data!r}: use {' or '.join(sorted(DEMOS))}")
    method = method or DEMOS[data].method
    spec = demo_spec(DEMOS[data], method, rounds, seed)
    with new_folder(keep, "--keep") as folder, Watcher(spec.rounds, quiet=as_json) as watcher:
        sites = demo_sites(DEMOS[data], spec, folder / "scans")
        _draw_scans(DEMOS[data].scans, folder / "scans")
        if all(site.role == "trainer" for site in sites):
            watcher.say(f"{method} classifies with what each client trains: no unseen domain is shown")
        with started_services(None, 0, folder, keep is not None, watcher) as services:
            result = conduct(services, spec, sites, watcher)
    seconds = time.monotonic() - started
    if as_json:
        print_json(summary(result, seconds))
    else:
        show_result(result, seconds)
        others = {name: gain for name, gain in DEMOS[data].others.items() if name != method}
        if others and rounds is None:
            gains = " and ".join(f"--method {name} (about {gain:+d} points)" for name, gain in others.items())
            say(f"Try also {gains}.")


def demo_spec(demo: Demo, method: str, rounds: int | None, seed: int) -> FederationSpec:
    """The spec of a demo: the data's training settings, three clients, each asked every round.

    Raises:
        PromptfedError: there is no such method, or it cannot run so; the data are not installed.
    """
    from promptfed.shared.data.registry import class_names_of
    from promptfed.shared.data.schemes import all_drawn
    from promptfed.shared.methods import method_class, resolve_spec, with_default_backbone

    number = rounds or demo.rounds
    try:
        ignored = method_class(method).ignores
    except SpecError as error:
        raise Refused(str(error)) from None
    spec = {
        "name": f"demo-{method}".replace("_", "-"),
        "method": {"name": method},
        "rounds": number,
        "training": {key: value for key, value in demo.training(method).items() if key not in ignored},
        "template": demo.template,
        "participation": {"min_clients": len(demo.clients), "draw": "public"},
        "aggregation": {"max_weight_share": 1.0},
        "evaluation": {"every": max(1, number // 5)},
        "seed": seed,
    }
    if demo.backbone:
        spec["backbone"] = demo.backbone
    uris = [uri for _, uri in (*demo.clients, demo.unseen)]
    try:
        if not ((all_drawn(uris) and demo.class_names) or demo.scans):
            named = class_names_of(uris[0])  # somebody else's package may be missing
        spec["class_names"] = list(demo.class_names or named)
        return resolve_spec(with_default_backbone(spec, uris)[0])
    except SpecError as error:
        raise Refused(str(error)) from None


def _draw_scans(sites: tuple[str, ...], folder: Path) -> None:
    """Draw DICOM files of invented patients for each of the ``sites``. Raises PromptfedError without pydicom."""
    if not sites:
        return
    try:
        from promptfed.shared.data.medical.phantoms import write_patients
    except ImportError:
        raise BadInput(f"DICOM files need pydicom: {get_extra('medical')}") from None
    for number, site in enumerate(sites):
        write_patients(folder / site, PATIENTS, IMAGES_EACH, number, site)


def demo_sites(demo: Demo, spec: FederationSpec, scans: Path = Path()) -> list[Site]:
    """The clients, and the unseen domain's evaluator if the method has a classifier for it."""
    from promptfed.shared.methods import method_for

    trainers = [Site(name, uri.format(scans=scans) if demo.scans else uri) for name, uri in demo.clients]
    referee, unseen = demo.unseen
    unseen = unseen.format(scans=scans) if demo.scans else unseen
    evaluators = [Site(referee, unseen, role="evaluator")] if method_for(spec).takes_evaluators else []
    return [*trainers, *evaluators]


@app.add(section="Operate federations")
def track(
    federation: Federation,
    to: Annotated[list[str], typer.Option(help="tensorboard:FOLDER or mlflow:URI, repeatable")],
    api: Api,
    as_json: Json = False,
) -> None:
    """Follow a federation and write every round's metrics to TensorBoard or MLflow, also if it has finished already."""
    written = -1
    with ExitStack() as stack, Watcher(quiet=as_json) as watcher:
        opened = [stack.enter_context(progress.open_tracker(place)) for place in to]

        def show(snapshot: Snapshot, last: int) -> None:
            nonlocal written
            written = last
            watcher.show(snapshot)

        end = progress.track(api, federation, opened, show)
    result = {"federation": federation, "state": end.state, "last_round": written, "to": to}
    tell(as_json, result, f"Wrote the rounds up to {written} to {', '.join(to)}.")
    if end.state != "finished":
        raise EndedBadly(f"the federation is {end.describe()}")
