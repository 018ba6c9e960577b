"""`promptfed simulate`: a run file's federation in one process, with its table, and its results kept in a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from promptfed.cli.launch import new_folder
from promptfed.experiments.provenance import provenance
from promptfed.experiments.simulation import simulate
from promptfed.library.run import taken_of
from promptfed.runtime.processes import interrupt_on_sigterm
from promptfed.runtime.run_file import read_run
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.output import console, messages, percent, print_json, size, table, write_file
from promptfed.sdk.progress import Result, Row, Watcher, result_table
from promptfed.sdk.simulated import Accuracy, Simulated
from promptfed.sdk.trackers import open_tracker, record
from promptfed.shared.leaving import leave
from promptfed.shared.tensors import encode

MOST_ROWS = 12  # clients that a table shows one by one
RESULT_FILE, PROMPTS_FILE = "result.json", "prompts.safetensors"


@dataclass(frozen=True)
class Summary:
    """The clients of one role on one of their test sets: accuracies as fractions, ``sd`` and ``worst`` over clients."""

    role: str
    split: str
    clients: int
    zero_shot: float | None
    mean: float
    sd: float | None
    worst: float


@dataclass(frozen=True)
class Simulation:
    """How a run file is simulated: ``pool`` clients compute at once, ``out`` keeps the results, ``track`` names
    experiment trackers."""

    pool: int = 1
    device: str = "cpu"
    out: Path | None = None
    allow_backbone: bool = False
    track: tuple[str, ...] = ()


def run_simulate(path: Path, clients: int | None, how: Simulation, as_json: bool) -> None:
    """Simulate the federation that ``path`` describes and print its result.

    Raises:
        CommandError: one line: a run file, backbone, data or folder that cannot be used, a client that failed, a
            federation that did not finish.
    """
    interrupt_on_sigterm()
    started = time.monotonic()
    run = read_run(path, clients)
    try:
        with (
            ExitStack() as open_trackers,
            new_folder(how.out, "--out") as out,
            Watcher(run.spec.get("rounds"), quiet=as_json) as watcher,
        ):
            trackers = [open_trackers.enter_context(open_tracker(where)) for where in how.track]
            watcher.say(f"{len(run.sites)} clients: their images and features")
            found = simulate(
                run.spec,
                run.sites,
                pool=how.pool,
                device=how.device,
                allow_backbone=how.allow_backbone,
                progress=watcher.show,
            )
            if how.out is not None:
                _keep(found, out)
            for tracker in trackers:
                record(tracker, taken_of(found))
    except KeyboardInterrupt:
        # The interpreter would wait for the thread that computes. Nothing of it is kept.
        messages.print("promptfed: interrupted")
        leave(Exit.INTERRUPTED)
    seconds = time.monotonic() - started
    if as_json:
        print_json(_told(found, seconds))
    else:
        _show(found, seconds, how.out)


def summaries(accuracies: Sequence[Accuracy]) -> list[Summary]:
    """One for each role and test set, trainers and their own test images first."""
    groups: dict[tuple[str, str], list[Accuracy]] = {}
    for one in accuracies:
        groups.setdefault((one.role, one.split), []).append(one)
    order = sorted(groups, key=lambda key: (key[0] != "trainer", key[1] != "test", key[1]))
    return [_summary(*key, groups[key]) for key in order]


def _summary(role: str, split: str, members: list[Accuracy]) -> Summary:
    values = [one.accuracy for one in members]
    zero_shot = [one.zero_shot for one in members if one.zero_shot is not None]
    return Summary(
        role=role,
        split=split,
        clients=len(members),
        zero_shot=fmean(zero_shot) if zero_shot else None,
        mean=fmean(values),
        sd=stdev(values) if len(values) > 1 else None,
        worst=min(values),
    )


def _told(found: Simulated, seconds: float) -> dict[str, Any]:
    return {
        "name": found.spec["name"],
        "method": found.spec["method"]["name"],
        "rounds": found.rounds,
        "clients": sum(found.federation["clients"][role] for role in ("trainers", "evaluators")),
        "accuracy": [asdict(one) for one in summaries(found.final())],
        "state_hash": found.state_hash,
        "bytes_up": found.bytes_up,
        "bytes_down": found.bytes_down,
        "client_seconds": round(found.client_seconds, 3),
        "wall_seconds": round(found.wall_seconds, 3),
        "setup_seconds": round(found.setup_seconds, 3),
        "seconds": round(seconds, 3),
    }


def _keep(found: Simulated, folder: Path) -> None:
    result = _told(found, found.setup_seconds + found.wall_seconds) | {
        "accuracies": [asdict(one) for one in found.accuracies()],
        "by_round": list(_rounds(found)),
        "spec": found.spec,
        "backbone_fingerprint": found.backbone_fingerprint,
        "provenance": provenance().model_dump(),
    }
    write_file(folder / RESULT_FILE, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    write_file(folder / PROMPTS_FILE, encode(found.state))


def _rounds(found: Simulated) -> Iterator[dict[str, Any]]:
    for report in found.reports:
        yield {
            "round": report["round"],
            "seconds": report["seconds"],
            "state_hash": report["state_hash"],
            "bytes_up": report["bytes_up"],
            "bytes_down": report["bytes_down"],
            "phases": [
                {key: phase[key] for key in ("phase", "seconds", "sample_size", "asked", "metrics")}
                | {"counted": [one["client"] for one in phase["counted"]]}
                for phase in report["phases"]
            ],
        }


def _show(found: Simulated, seconds: float, out: Path | None) -> None:
    method = found.spec["method"]["name"]
    console.print(_table(found.final(), f"Accuracy of {method} after {found.rounds} rounds"))
    parts = [
        f"{seconds:.0f} s in all",
        f"the clients computed for {found.client_seconds:.0f} s",
        f"sent {size(found.bytes_up)} up and took {size(found.bytes_down)} down",
    ]
    console.print("; ".join(parts) + ".", highlight=False, soft_wrap=True)
    console.print(f"State {found.state_hash}", highlight=False, soft_wrap=True)
    if out is not None:
        console.print(f"Wrote {RESULT_FILE} and {PROMPTS_FILE} in {out}.", highlight=False, soft_wrap=True)


def _table(final: Sequence[Accuracy], title: str) -> Table:
    if len(final) <= MOST_ROWS and all(one.split == "test" for one in final):
        rows = [Row(one.client, one.role, one.domain, one.zero_shot, one.accuracy) for one in final]
        return result_table(Result(0, tuple(sorted(rows, key=lambda row: row.role != "trainer")), 0, 0), title)
    columns = ["clients", "n", "test set", "zero-shot", "federated", "sd", "worst", "gain"]
    return table(title, columns, [_cells(one) for one in summaries(final)])


def _cells(one: Summary) -> list[str]:
    gain = "-" if one.zero_shot is None else f"{100 * (one.mean - one.zero_shot):+.1f}"
    sd = "-" if one.sd is None else f"{100 * one.sd:.1f}"
    who = "trainers" if one.role == "trainer" else "evaluators"
    return [who, str(one.clients), one.split, percent(one.zero_shot), percent(one.mean), sd, percent(one.worst), gain]
