"""Costs of a federation beside the training: wall time of a round less the clients' compute.

`promptfl` on the embedded backbone. ``--way process`` is a real coordinator process and real client processes over
HTTP; ``--way simulate`` is one process without sockets. A round's wall time is the coordinator's own, from its opening
to its commit. Taken off is the clients' compute by their own clocks (`train_seconds`, from the payload in hand to the
update on disk): processes compute at the same time, so that it is the longest of the round; in a simulation they
compute in turn, so that it is the sum. What is left is the protocol: tasks, payloads, uploads, admission, fsync,
aggregation. Medians over the rounds after the first.

    python -m benchmarks.round_overhead --clients 2 --rounds 20 --json overhead.json
    python -m benchmarks.round_overhead --way simulate --clients 10
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import parser, shown, write
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Processes
from promptfed.runtime.services import LocalFederation, Site
from promptfed.sdk import operations
from promptfed.sdk.follow import follow

STYLES = ("painting", "sketch", "quickdraw", "neon", "chalk", "mosaic")


def plan(clients: int, rounds: int, images: int) -> tuple[dict[str, Any], list[Site]]:
    """The spec, and its clients."""
    spec = {
        "name": "overhead",
        "method": {"name": "promptfl"},
        "rounds": rounds,
        "participation": {"min_clients": clients},
        "evaluation": {"every": rounds},
    }
    sites = [
        Site(f"client-{number}", f"symbols:{STYLES[number % len(STYLES)]}?per_class={images}")
        for number in range(clients)
    ]
    return spec, sites


def run_processes(spec: dict[str, Any], sites: list[Site]) -> list[dict[str, Any]]:
    """Run a federation in processes; the report of every round."""
    with (
        tempfile.TemporaryDirectory(prefix="promptfed-bench-") as folder,
        Processes(Path(folder)) as processes,
        LocalFederation(processes, Path(folder)) as local,
    ):
        federation = local.create(spec)
        local.enrol(federation, sites, lambda count: None)
        local.api.send(operations.steer(federation, "start"))
        for snapshot in follow(local.api, federation, between=processes.watch):
            state = snapshot.state
        if state != "finished":
            raise SystemExit(f"the federation is {state}")
        return local.api.run(operations.accuracies(federation)).reports


def run_simulation(spec: dict[str, Any], sites: list[Site]) -> list[dict[str, Any]]:
    """Run the same in this process."""
    torch.set_num_threads(1)
    return simulate(spec, sites).reports


WAYS: dict[str, tuple[Callable[[dict[str, Any], list[Site]], list[dict[str, Any]]], Callable[[list[float]], float]]] = {
    "process": (run_processes, max),
    "simulate": (run_simulation, sum),
}
"""How a federation is run, and a round's compute from each client's seconds."""


def measure(reports: list[dict[str, Any]], together: Callable[[list[float]], float] = max) -> dict[str, Any]:
    """Medians over the phases of rounds 2 to last; ``together``: a round's compute of each client's seconds."""
    walls, computes, overheads = [], [], []
    for report in reports:
        if report["round"] < 2:
            continue
        phase = report["phases"][0]
        compute = together([update["metrics"]["train_seconds"] for update in phase["updates"]])
        walls.append(phase["seconds"])
        computes.append(compute)
        overheads.append(phase["seconds"] - compute)
    return {
        "rounds": len(walls),
        "round_seconds": statistics.median(walls),
        "compute_seconds": statistics.median(computes),
        "overhead_seconds": statistics.median(overheads),
        "overhead_worst_seconds": max(overheads),
        "bytes_up_per_round": reports[-1]["bytes_up"],
        "bytes_down_per_round": reports[1]["bytes_down"],
    }


def main() -> None:
    """Run and print."""
    command = parser(__doc__)
    command.add_argument("--way", choices=sorted(WAYS), default="process")
    command.add_argument("--clients", type=int, default=2)
    command.add_argument("--rounds", type=int, default=20)
    command.add_argument("--images", type=int, default=8, help="training images per class and client")
    options = command.parse_args()
    run, together = WAYS[options.way]
    reports = run(*plan(options.clients, options.rounds, options.images))
    figures = {"way": options.way, "clients": options.clients} | measure(reports, together)
    print(shown(figures))
    write(options.json, figures)


if __name__ == "__main__":
    main()
