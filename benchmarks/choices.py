"""Oort and power of choice beside uniform selection: mean accuracy of all clients, paired by seed.

    python -m benchmarks.choices --json benchmarks/choices.json
    python -m benchmarks.choices --unequal --json benchmarks/choices_unequal.json

Twenty clients have Dirichlet(0.3) shares of the pictures, and each round asks four of them. A seed draws the shares,
the batches and the choices anew. All choices use the learning rate that the method has by default.

With ``--unequal`` the slowest client takes twenty times as long as the fastest, in virtual time, and each state is
tested on all test pictures. The seconds are to 95 % of the gain that uniform selection has at its end. Oort prefers
clients that need at most as long as the median client for a share of mean size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import integers, machine, parser, table, write
from benchmarks.rounds import SHARE, Trial, reached
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone
from promptfed.shared.data.sharing import SharedSources

PICTURES = "symbols:sketch?topic=signs&per_class=40&test_per_class=20"
DATA = f"{PICTURES}&partition=dirichlet&alpha=0.3"
CLIENTS, ROUNDS, EVERY = 20, 20, 5
METHODS = ("promptfl", "fedclip")
CHOICES = ("uniform", "power_of_choice", "oort", "round_robin")
LONG, PREFERRED = 60, 4.0  # rounds; a share of 26 pictures takes four steps of a second each


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


def unequal(method: str, seed: int, backbone: Backbone) -> list[dict[str, Any]]:
    """A row for each choice: the accuracy of every state over virtual seconds, and the seconds to the level."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(method, seed, Path(folder), backbone, PICTURES, CLIENTS)
        for choice in CHOICES:
            part = {"fraction": 0.2, "choice": choice, "draw": "public"}
            part |= {"preferred_seconds": PREFERRED} if choice == "oort" else {}
            exact = trial.run(choice, LONG, {}, participation=part)
            curve = [(round(seconds, 1), round(value, 4)) for seconds, value in exact]
            first = rows[0]["curve"] if rows else curve
            level = first[0][1] + SHARE * (first[-1][1] - first[0][1])
            about = {"method": method, "seed": seed, "choice": choice, "level": level, "curve": curve}
            rows.append(about | {"seconds": reached(curve, level), "all_seconds": curve[-1][0], "end": curve[-1][1]})
            told = {key: value for key, value in rows[-1].items() if key != "curve"}
            print(told, flush=True)
    return rows


def unequal_table(rows: list[dict[str, Any]]) -> str:
    """By method and choice: seconds to the level, accuracies when Oort's rounds are over, and at the choice's end."""
    cells = []
    over = {(row["method"], row["seed"]): row["all_seconds"] for row in rows if row["choice"] == "oort"}
    for method, choice in product(METHODS, CHOICES):
        mine = [row for row in rows if (row["method"], row["choice"]) == (method, choice)]
        to_level = ", ".join("-" if row["seconds"] is None else f"{row['seconds']:.0f}" for row in mine)
        in_all = f"{np.mean([row['all_seconds'] for row in mine]):.0f}"
        meanwhile = [latest(row["curve"], over[row["method"], row["seed"]]) for row in mine]
        cells.append([method, choice, to_level, in_all, by_seed(meanwhile), by_seed([row["end"] for row in mine])])
    columns = ["method", "choice", "s to the level", f"s of {LONG} rounds", "% when Oort's are over", "% at the end"]
    return table(columns, cells, texts=2)


def latest(curve: Sequence[tuple[float, float]], seconds: float) -> float:
    """The mean accuracy of the last three states until then."""
    return float(np.mean([value for at, value in curve if at <= seconds][-3:]))


def by_seed(values: Sequence[float]) -> str:
    """The mean in per cent, and in parentheses the values."""
    return f"{100 * np.mean(values):.1f} ({', '.join(f'{100 * value:.1f}' for value in values)})"


def main() -> None:
    """Measure every method and choice, and print a table."""
    command = parser(__doc__)
    command.add_argument("--seeds", type=integers, default=[0, 1, 2])
    command.add_argument("--unequal", action="store_true", help="clients of unequal speeds, in virtual time")
    options = command.parse_args()
    torch.set_num_threads(1)
    if options.unequal:
        backbone = load_backbone("promptfed-tiny", "embedded")
        runs = [row for method, seed in product(METHODS, options.seeds) for row in unequal(method, seed, backbone)]
        print(unequal_table(runs))
        write(options.json, {"data": PICTURES, "rounds": LONG, "machine": machine(), "rows": runs})
        return
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
