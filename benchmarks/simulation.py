"""Time and memory of a simulation; each case runs in a process of its own.

Each client holds 16 training and 10 test images of one style; a tenth of the clients trains in each round, one epoch of
`promptfl` on the embedded backbone. "before round 1" is everything up to it: backbone, drawing and encoding all images,
enrolment. CPU seconds are those of all threads: the figures to compare on a busy machine. Peak memory is that of the
whole process.

    python -m benchmarks.simulation --json benchmarks/simulation.json
    python -m benchmarks.simulation --cases 100:20 --pool 2
"""

from __future__ import annotations

import json
import resource
import time
from typing import Any

import torch

from benchmarks.harness import in_own_process, parser, shown, write
from promptfed.experiments.bench.provenance import provenance
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.sdk.follow import Snapshot
from promptfed.shared.data.classes import SYMBOLS

CASES = ((100, 20), (1000, 3))  # clients and rounds
TRAIN, TEST = 16, 10  # images of each client
TENTH = 0.1


def plan(clients: int, rounds: int) -> tuple[dict[str, Any], list[Site]]:
    """The spec, and its clients; evaluations before the first round and after the last."""
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


def measure(clients: int, rounds: int, pool: int) -> dict[str, Any]:
    """Run one case in this process."""
    torch.set_num_threads(1)
    begun: list[float] = []

    def progress(snapshot: Snapshot) -> None:
        if snapshot.state == "running" and not begun:
            begun.append(time.process_time())

    started = time.process_time()
    run = simulate(*plan(clients, rounds), pool=pool, progress=progress)
    ended = time.process_time()
    phases = [phase for report in run.reports for phase in report["phases"]]
    evaluations = [report["evaluation"] for report in run.reports if report["evaluation"]]
    return {
        "clients": clients,
        "rounds": rounds,
        "pool": pool,
        "seconds_before_round_1": round(run.setup_seconds, 2),
        "seconds_of_rounds": round(run.wall_seconds, 2),
        "cpu_seconds_before_round_1": round(begun[0] - started, 2),
        "cpu_seconds_of_rounds": round(ended - begun[0], 2),
        "training_tasks": sum(len(phase["updates"]) for phase in phases),
        "evaluations": sum(len(evaluation["clients"]) for evaluation in evaluations),
        "client_seconds": round(run.client_seconds, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "state_hash": run.state_hash,
    }


def pair(text: str) -> tuple[int, int]:
    """``100:20`` as numbers."""
    clients, rounds = text.split(":")
    return int(clients), int(rounds)


def main() -> None:
    """Run the cases and print."""
    command = parser(__doc__)
    command.add_argument("--cases", type=pair, nargs="+", default=list(CASES), help="CLIENTS:ROUNDS")
    command.add_argument("--case", type=pair, help="run this one here and print its numbers as JSON")
    command.add_argument("--pool", type=int, default=1)
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
