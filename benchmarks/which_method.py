"""Accuracy, bytes, seconds, privacy, an unseen domain and new classes by method, on the embedded data sets.

    python -m benchmarks.which_method --json benchmarks/which_method.json
    python -m benchmarks.which_method --json benchmarks/which_method.json --table

A run continues where the last one with the same file ended. Two sites train six rounds on half of the classes, with at
most eight images of each; an evaluator has the unseen domain, and the sites are also tested on the other classes.
Methods have their defaults. ``--table`` writes the table into docs/guides/compare-methods.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import DOCS, fill_tables, integers, parser, table, write
from promptfed.experiments.bench.runner import costs
from promptfed.experiments.protocols.setting import with_options
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.sdk.backbone import open_backbone, resolve
from promptfed.sdk.errors import CommandError
from promptfed.sdk.text import size
from promptfed.shared.data import open_source
from promptfed.shared.methods import method_class

METHODS = (
    "zero_shot,fedtaskres,fedclap,fedclipadapter,fedlp,fedtipf,promptfl,fedclip,fedpgp,fedprolip,fedtpg,plan,fedavg,"
    "fast_pt,pfedpg"
)
SIGNS = "symbols:{}?topic=signs&per_class=8"
DATA: dict[str, tuple[str, tuple[str, ...], str]] = {  # a backbone, the sites' data, and the unseen domain
    "symbols": ("promptfed-tiny", (SIGNS.format("neon"), SIGNS.format("blueprint")), SIGNS.format("sketch")),
    "digits": (
        "promptfed-tiny",
        tuple(f"digits?shots=8&partition=iid&clients=2&client={index}" for index in range(2)),
        "digits?domain=inverted",
    ),
    "emoji": ("promptfed-emoji", ("emoji:noto", "emoji:contrast"), "emoji:fxemoji"),
}


def run(method: str, data: str, seed: int, features: Path) -> dict[str, Any]:
    """One federation: means over the sites (fractions), and costs of a site and round."""
    model, uris, unseen = DATA[data]
    base = [with_options(uri, {"classes": "base"}) for uri in uris]
    spec = {
        "name": "which",
        "method": {"name": method} | ({"head": "linear"} if method == "fedavg" else {}),
        "backbone": {"model": model, "pretrained": "embedded"},
        "class_names": list(open_source(base[0]).class_names),
        "template": None,
        "rounds": 6,
        "participation": {"min_clients": len(uris)},
        "evaluation": {"every": 6},
        "seed": seed,
    }
    heads = method == "fedavg" or not method_class(method).takes_evaluators  # these know no other classes
    sites = [
        Site(f"site-{index}", own, tests={} if heads else {"novel": with_options(uri, {"classes": "novel"})})
        for index, (own, uri) in enumerate(zip(base, uris, strict=True))
    ]
    if method_class(method).takes_evaluators:
        sites.append(Site("unseen", with_options(unseen, {"classes": "base"}), "evaluator"))
    resolved = resolve(spec)
    backbone = open_backbone(resolved.backbone, allow_backbone=False)
    result = simulate(resolved, sites, backbone=backbone, features=features)
    groups: dict[str, list[float]] = {}
    for row in result.final():
        kind = "unseen" if row.role == "evaluator" else row.split
        groups.setdefault(kind, []).append(row.accuracy)
    price = costs(result.reports)
    bytes_round = price["bytes_up"] + price["bytes_down"]
    return {kind: fmean(values) for kind, values in groups.items()} | {
        "bytes": bytes_round,
        "seconds": price["seconds"],
    }


def markdown(runs: Mapping[str, Any]) -> str:
    """A row for each method: means over the data sets and the seeds for which all of them are finished."""
    rows = []
    for method in METHODS.split(","):
        by_seed: dict[str, list[dict[str, float]]] = {}
        for key, result in runs.items():
            if key.split()[0] == method and "test" in result:
                by_seed.setdefault(key.split()[2], []).append(result)
        finished = [result for results in by_seed.values() if len(results) == len(DATA) for result in results]
        if not finished:
            continue

        def mean(kind: str, found: list[dict[str, float]] = finished) -> float | None:
            values = [result[kind] for result in found if kind in result]
            return fmean(values) if values else None

        accuracies = [mean(kind) for kind in ("test", "unseen", "novel")]
        rows.append(
            [
                f"`{method}`",
                "yes" if method_class(method).can_protect() else "no",
                str(len(finished)),
                *("-" if value is None else f"{100 * value:.1f}" for value in accuracies),
                size(mean("bytes") or 0),
                f"{mean('seconds') or 0:.2f}",
            ]
        )
    columns = ["method", "privacy", "runs", "accuracy", "unseen domain", "new classes", "bytes", "seconds"]
    return table(columns, rows, texts=2)


def main() -> None:
    """Run what is missing, by seed, data set and method, and write the table."""
    command = parser(__doc__)
    command.add_argument("--methods", default=METHODS, help="names by commas")
    command.add_argument("--seeds", type=integers, default=[0, 1, 2])
    command.add_argument("--table", action="store_true", help="only write the table of the file")
    options = command.parse_args()
    runs: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    with TemporaryDirectory(prefix="promptfed-which-") as features:
        for seed in options.seeds if not options.table else ():
            for method in options.methods.split(","):
                for data in DATA:
                    key = f"{method} {data} {seed}"
                    if key not in runs:
                        try:
                            runs[key] = run(method, data, seed, Path(features))
                        except CommandError as error:
                            runs[key] = {"refused": str(error)}
                        write(options.json, runs)
                        print(key, runs[key], flush=True)
    page = DOCS / "guides/compare-methods.md"
    page.write_text(fill_tables(page.read_text(), "which", {"": markdown(runs)}))


if __name__ == "__main__":
    main()
