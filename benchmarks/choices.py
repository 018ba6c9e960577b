"""Oort and power of choice beside uniform selection: mean accuracy of all clients, paired by seed.

    python -m benchmarks.choices --json benchmarks/choices.json

Twenty clients have Dirichlet(0.3) shares of the pictures, and each round asks four of them. A seed draws the shares,
the batches and the choices anew. All choices use the learning rate that the method has by default.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import integers, machine, parser, table, write
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.shared.clip import FeatureCache, load_backbone
from promptfed.shared.data.sharing import SharedSources

DATA = "symbols:sketch?topic=signs&per_class=40&test_per_class=20&partition=dirichlet&alpha=0.3"
CLIENTS, ROUNDS, EVERY = 20, 20, 5
METHODS = ("promptfl", "fedclip")
CHOICES = ("uniform", "power_of_choice", "oort", "round_robin")


def accuracies(method: str, choice: str, seed: int, **shared: Any) -> dict[int, float]:
    """Mean accuracy over the clients, by round."""
    sites = [
        Site(f"s{client:02}", f"{DATA}&split_seed={seed}&clients={CLIENTS}&client={client}")
        for client in range(CLIENTS)
    ]
    spec = {
        "name": "choices",
        "method": {"name": method},
        "class_names": list(shared["sources"].open(sites[0].data).class_names),
        "rounds": ROUNDS,
        "seed": seed,
        "participation": {"fraction": 0.2, "choice": choice, "draw": "public"},
        "evaluation": {"every": EVERY},
    }
    result = simulate(spec, sites, **shared)
    evaluated = [report for report in result.reports if report["evaluation"] is not None]
    return {report["round"]: report["evaluation"]["mean"]["trainer"]["accuracy"] for report in evaluated}


def measure(method: str, seeds: list[int], **shared: Any) -> list[dict[str, Any]]:
    """A row for each choice: its accuracies, and the differences from uniform selection at the same seeds."""
    rows: list[dict[str, Any]] = []
    for choice in CHOICES:
        reached = [accuracies(method, choice, seed, **shared) for seed in seeds]
        row: dict[str, Any] = {"method": method, "choice": choice, "accuracy": reached}
        for round in (EVERY, ROUNDS):
            first = rows[0]["accuracy"] if rows else reached
            row[f"difference_{round}"] = [one[round] - other[round] for one, other in zip(reached, first, strict=True)]
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Measure every method and choice, and print a table."""
    command = parser(__doc__)
    command.add_argument("--seeds", type=integers, default=[0, 1, 2])
    options = command.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        shared = {"sources": SharedSources(), "features": FeatureCache(Path(folder))}
        shared["backbone"] = load_backbone("promptfed-tiny", "embedded")
        for method in METHODS:
            rows += measure(method, options.seeds, **shared)
            write(options.json, {"data": DATA, "rounds": ROUNDS, "machine": machine(), "rows": rows})
    cells = []
    for row in rows:
        means = [f"{100 * np.mean([one[round] for one in row['accuracy']]):.1f}" for round in (EVERY, ROUNDS)]
        differences = [100 * np.array(row[f"difference_{round}"]) for round in (EVERY, ROUNDS)]
        told = [f"{each.mean():+.1f} ({each.min():+.1f} to {each.max():+.1f})" for each in differences]
        cells.append([row["method"], row["choice"], means[0], told[0], means[1], told[1]])
    columns = ["method", "choice", f"after {EVERY} rounds", "difference", f"after {ROUNDS} rounds", "difference"]
    print(table(columns, cells, texts=2))


if __name__ == "__main__":
    main()
