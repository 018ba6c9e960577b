"""What a federation costs besides the training: wall time of a round minus the clients' compute time.

`promptfl` on the embedded backbone, with a coordinator process and client processes over HTTP. The coordinator measures
a round's wall time from its opening to its commit. The longest `train_seconds` of its clients (from the downloaded
payload to the update on disk) is subtracted. The rest is tasks, payloads, uploads, admission, fsync and aggregation.
Medians over the rounds after the first.

    python -m benchmarks.round_overhead --clients 2 --rounds 20 --json overhead.json
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import parser, shown, write
from promptfed.runtime.processes import Processes
from promptfed.runtime.services import LocalFederation, Site
from promptfed.sdk import operations
from promptfed.sdk.follow import follow

STYLES = ("painting", "sketch", "quickdraw", "neon", "chalk", "mosaic")


def plan(clients: int, rounds: int) -> tuple[dict[str, Any], list[Site]]:
    """The spec and the clients."""
    spec = {
        "name": "overhead",
        "method": {"name": "promptfl"},
        "rounds": rounds,
        "participation": {"min_clients": clients},
        "evaluation": {"every": rounds},
    }
    sites = [
        Site(f"client-{number}", f"symbols:{STYLES[number % len(STYLES)]}?per_class=8") for number in range(clients)
    ]
    return spec, sites


def run_processes(spec: dict[str, Any], sites: list[Site]) -> list[dict[str, Any]]:
    """Run a federation in processes; the reports of all rounds, that of the evaluation before round 1 first."""
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


def measure(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds from the second on."""
    walls, computes, overheads = [], [], []
    for report in reports:
        if report["round"] < 2:
            continue
        phase = report["phases"][0]
        compute = max([update["metrics"]["train_seconds"] for update in phase["updates"]])
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
    command.add_argument("--clients", type=int, default=2)
    command.add_argument("--rounds", type=int, default=20)
    options = command.parse_args()
    if options.rounds < 2:
        command.error("--rounds: at least 2, since the first round is not measured")
    reports = run_processes(*plan(options.clients, options.rounds))
    figures = {"clients": options.clients} | measure(reports)
    print(shown(figures))
    write(options.json, figures)


if __name__ == "__main__":
    main()
