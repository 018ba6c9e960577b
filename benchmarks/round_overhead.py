"""What the federation costs beside the training: wall time of a round over real HTTP less the clients' compute.

A real coordinator process and real client processes run `promptfl` on the embedded backbone. A round's wall time is the
coordinator's own, from its opening to its commit. The clients compute at the same time, so what is taken off is the
longest `train_seconds` of the round (their own clocks, from the payload in hand to the update on disk). What is left is
the protocol: tasks, payloads, uploads, admission, fsync, aggregation. Medians over the rounds after the first.

    python -m benchmarks.round_overhead --clients 2 --rounds 20 --json overhead.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from promptfed.local import LocalFederation, Site
from promptfed.processes import Processes
from promptfed.watching import follow, pages

STYLES = ("painting", "sketch", "quickdraw", "neon", "chalk", "mosaic")


def run(clients: int, rounds: int, images: int) -> list[dict[str, Any]]:
    """Run a federation; the report of every round."""
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
    with (
        tempfile.TemporaryDirectory(prefix="promptfed-bench-") as folder,
        Processes(Path(folder)) as processes,
        LocalFederation(processes, Path(folder)) as local,
    ):
        federation = local.create(spec)
        local.enrol(federation, sites, lambda count: None)
        local.api.post(f"/v1/federations/{federation}/start")
        for snapshot in follow(local.api, federation, between=processes.watch):
            state = snapshot.state
        if state != "finished":
            raise SystemExit(f"the federation is {state}")
        return list(pages(local.api, f"/v1/federations/{federation}/rounds", "rounds"))


def measure(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the phases of rounds 2 to last; the first round also computes the image features."""
    walls, computes, overheads = [], [], []
    for report in reports:
        if report["round"] < 2:
            continue
        phase = report["phases"][0]
        compute = max(update["metrics"]["train_seconds"] for update in phase["updates"])
        walls.append(phase["seconds"])
        computes.append(compute)
        overheads.append(phase["seconds"] - compute)
    return {
        "rounds": len(walls),
        "round_seconds": statistics.median(walls),
        "longest_client_seconds": statistics.median(computes),
        "overhead_seconds": statistics.median(overheads),
        "overhead_worst_seconds": max(overheads),
        "bytes_up_per_round": reports[-1]["bytes_up"],
        "bytes_down_per_round": reports[1]["bytes_down"],
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--images", type=int, default=8, help="training images per class and client")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    given = parser.parse_args()
    found = {"clients": given.clients} | measure(run(given.clients, given.rounds, given.images))
    for name, value in found.items():
        print(f"{name:24s} {value:.4f}" if isinstance(value, float) else f"{name:24s} {value}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
