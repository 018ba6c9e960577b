"""`promptfed simulate`: a run file's federation in one process, with its table, and its results kept in a folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
from rich.table import Table

from promptfed.cli.app import Made, app
from promptfed.cli.common import (
    AllowBackbone,
    Device,
    Engine,
    Json,
    RayAddress,
    RunFilePath,
    SimulationPool,
    Trainers,
    Written,
    refuse,
)
from promptfed.runtime.processes import interrupt_on_sigterm
from promptfed.runtime.run_file import RunFile, read_run
from promptfed.sdk.errors import Exit
from promptfed.sdk.files import new_folder, write_file
from promptfed.sdk.output import console, note, print_json, say, table
from promptfed.sdk.progress import Watcher, result_table
from promptfed.sdk.remarks import remarks
from promptfed.sdk.result import Accuracy, FederationResult
from promptfed.sdk.text import percent, size
from promptfed.sdk.trackers import open_tracker, record
from promptfed.shared.plain_text import counted
from promptfed.shared.service.leaving import leave
from promptfed.shared.spec.spec import FederationSpec

MOST_ROWS = 12  # clients that a table shows one by one
RESULT_FILE, PROMPTS_FILE = "result.json", "prompts.safetensors"
RUN_FOLDER = "run"  # of a run that was interrupted, which the same command goes on with


@dataclass(frozen=True)
class RoleSummary:
    """The clients of one role on one of their test sets: accuracies as fractions, ``sd`` and ``worst`` over clients."""

    role: str
    split: str
    clients: int
    zero_shot: float | None
    mean: float
    sd: float | None
    worst: float


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
        Path | None,
        typer.Option(help="keep the result and the prompts here; an interrupted run goes on from it"),
    ] = None,
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
    from promptfed.sdk.backbone import resolve

    resolved = resolve(run.spec)
    options: dict[str, Any] = {"pool": pool, "device": device, "allow_backbone": allow_backbone}
    try:
        with (
            ExitStack() as open_trackers,
            results_folder(out) as folder,
            Watcher(resolved.rounds, quiet=as_json) as watcher,
        ):
            trackers = [open_trackers.enter_context(open_tracker(where)) for where in track or ()]
            watcher.say(f"{counted(len(run.sites), 'client')}: their images and features")
            if out is not None and cluster.engine is None:
                options |= {"folder": folder / RUN_FOLDER, "lasting": True}
            result = _result(resolved, run, cluster, progress=watcher.show, **options)
            if out is not None:
                _keep(result, folder)
                shutil.rmtree(folder / RUN_FOLDER, ignore_errors=True)
            for tracker in trackers:
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
        CommandError: the folder cannot be used.
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
    from promptfed.experiments.bench.provenance import provenance

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
    for remark in remarks(result):
        say(remark)
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
    return table(title, columns, [_cells(summary) for summary in summaries(final)])


def _cells(group: RoleSummary) -> list[str]:
    gain = "-" if group.zero_shot is None else f"{100 * (group.mean - group.zero_shot):+.1f}"
    sd = "-" if group.sd is None else f"{100 * group.sd:.1f}"
    who = "trainers" if group.role == "trainer" else "evaluators"
    adapted = [percent(group.zero_shot), percent(group.mean), sd, percent(group.worst), gain]
    return [who, str(group.clients), group.split, *adapted]
