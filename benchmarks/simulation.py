"""Time and memory of a simulation. Each case runs in a process of its own.

Each client has 16 training and 10 test images of one style. In each round a tenth of the clients trains `promptfl` on
the embedded backbone for one epoch. "before round 1" includes loading the backbone, drawing and encoding all images,
and enrolment. CPU seconds are those of all threads and processes; compare these on a busy
machine. Peak memory is the main process's.

    python -m benchmarks.simulation --json simulation.json
    python -m benchmarks.simulation --cases 100:20 --pool 2
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from typing import Any

import torch

from benchmarks.harness import cpu_seconds_of, in_own_process, parser, shown, write
from promptfed.console.progress import Snapshot
from promptfed.experiments.bench.runner import provenance
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared.data.classes import SYMBOLS

CASES = ((100, 20), (1000, 3))  # clients and rounds
TRAIN, TEST = 16, 10  # images of each client
TENTH = 0.1


def plan(clients: int, rounds: int) -> tuple[dict[str, Any], list[Site]]:
    """The spec and the clients. They evaluate before the first round and after the last."""
    spec = {
        "name": "simulation",
        "method": {"name": "promptfl"},
        "rounds": rounds,
        "training": {"batch_size": TRAIN},
        "participation": {"fraction": TENTH},
        "evaluation": {"every": rounds},
    }
    per_class, test_per_class = (-(-clients * images // len(SYMBOLS)) for images in (TRAIN, TEST))
    data = f"symbols:blueprint?per_class={per_class}&test_per_class={test_per_class}&partition=iid&clients={clients}"
    return spec, [Site(f"site-{number}", f"{data}&client={number}") for number in range(clients)]


def cpu_seconds() -> float:
    """CPU seconds of this process, and of those that compute for it or have done so."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = sum(cpu_seconds_of(child.pid) for child in multiprocessing.active_children() if child.pid is not None)
    return time.process_time() + alive + ended.ru_utime + ended.ru_stime


def measure(clients: int, rounds: int, pool: int) -> dict[str, Any]:
    """Run a case in this process; its figures."""
    torch.set_num_threads(1)
    running: list[float] = []  # when the first round began

    def progress(snapshot: Snapshot) -> None:
        if snapshot.state == "running" and not running:
            running.append(cpu_seconds())

    started = cpu_seconds()
    run = simulate(*plan(clients, rounds), pool=pool, progress=progress)
    ended = cpu_seconds()
    phases = [phase for report in run.reports for phase in report["phases"]]
    evaluations = [report["evaluation"] for report in run.reports if report["evaluation"]]
    return {
        "clients": clients,
        "rounds": rounds,
        "pool": pool,
        "seconds_before_round_1": round(run.setup_seconds, 2),
        "seconds_of_rounds": round(run.wall_seconds, 2),
        "cpu_seconds_before_round_1": round(running[0] - started, 2),
        "cpu_seconds_of_rounds": round(ended - running[0], 2),
        "training_tasks": sum(len(phase["updates"]) for phase in phases),
        "evaluations": sum(len(evaluation["clients"]) for evaluation in evaluations),
        "client_seconds": round(run.client_seconds, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "state_hash": run.state_hash,
    }


def pair(text: str) -> tuple[int, int]:
    """Clients and rounds of ``100:20``."""
    clients, rounds = text.split(":")
    return int(clients), int(rounds)


def main() -> None:
    """Run the cases and print."""
    command = parser(__doc__)
    command.add_argument("--cases", type=pair, nargs="+", default=list(CASES), help="CLIENTS:ROUNDS")
    command.add_argument("--case", type=pair, help="run this case in this process and print its numbers as JSON")
    command.add_argument("--pool", type=int, default=1, help="clients that compute at once")
    options = command.parse_args()
    if options.case is not None:
        clients, rounds = options.case
        print(json.dumps(measure(clients, rounds, options.pool)))
        return
    results = []
    for clients, rounds in options.cases:
        case = ["--case", f"{clients}:{rounds}", "--pool", str(options.pool)]
        results.append(in_own_process("benchmarks.simulation", *case))
    print("\n\n".join(map(shown, results)))
    write(options.json, {"cases": results, "provenance": provenance().model_dump()})


if __name__ == "__main__":
    main()
