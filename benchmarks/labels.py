"""Wrong, missing and rare labels: what the remedies gain, with three seeds, paired picture by picture.

    python -m benchmarks.labels --json benchmarks/labels.json

Each arm takes the learning rate (and weight of unlabelled sites, or loss) that is best on held-out training images at
seed 0. A seed draws the flips, the tail, the few labelled images and the batches anew. The difference of two arms has
a bootstrap over pictures, each with all its seeds; of scenes, which differ by seed, the least and the largest one.
Held-out labels are right and of all classes alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score

from benchmarks.harness import integers, machine, parser, table, write
from promptfed.client_service.training.data import TEST, ClientData
from promptfed.client_service.training.evaluation import probabilities
from promptfed.experiments.figures.comparison import paired_bootstrap
from promptfed.experiments.simulation.simulation import simulate
from promptfed.export.adapted_model import AdaptedModel
from promptfed.runtime.services import Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import FeatureCache, load_backbone
from promptfed.shared.data.sharing import SharedSources

SIGNS = "symbols:sketch?topic=signs&per_class=40&test_per_class=40"
NEON = "symbols:neon?topic=signs&per_class=100&test_per_class=40"
MORE_SIGNS = "symbols:sketch?topic=signs&per_class=80&test_per_class=40"
SYMBOLS = "symbols:sketch?per_class=24&test_per_class=10"
STYLED = "symbols:{style}?topic=signs&per_class=20&test_per_class=20"
STYLES = ("photo", "sketch", "quickdraw", "neon", "chalk")
SCENES = "emoji-scenes:flat?count=1000&test_count=500"
SCENES_CELL, SCENE_ROUNDS, SCENE_GRID = "tail 100:1, several labels", 15, (0.1, 0.3, 1.0)
SITES, ROUNDS = 5, 20
HELD_OUT = "&validation=0.25"
TAIL = 1 / 3  # share of the classes, the rarest ones, that count as the tail
GRID = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

Arm = Mapping[str, Any]  # data (options of the training sites), loss, unlabelled ("out", "used")
USED: dict[str, list[Arm]] = {
    "left out": [{"unlabelled": "out"}],
    "used": [
        {"unlabelled": "used", "loss": {"unlabelled_weight": w, "unlabelled_threshold": t, "balance": "logit_adjusted"}}
        for w in (0.03, 0.1)
        for t in (0.8, 0.95)
    ],
}
BALANCES: dict[str, list[Arm]] = {
    "cross-entropy": [{}],
    "balanced": [
        *({"loss": {"balance": "logit_adjusted", "adjustment": a}} for a in (0.5, 1.0)),
        *({"loss": {"balance": "class_balanced", "beta": b}} for b in (0.9, 0.99)),
    ],
}
CELLS: dict[str, tuple[str, tuple[str, ...], dict[str, list[Arm]]]] = {
    "40 % flipped": (
        SIGNS + "&flip=0.4",
        ("fedtaskres", "promptfl"),
        {"cross-entropy": [{}], "gce": [{"loss": {"kind": "gce", "q": q}} for q in (0.4, 0.7)]},
    ),
    "one of five sites labelled": (SYMBOLS, ("fedtaskres", "fedclipadapter"), USED),
    "one of five sites labelled, 13 classes": (MORE_SIGNS, ("fedtaskres", "fedclipadapter"), USED),
    "one of five sites labelled, a style each": (STYLED, ("promptfl", "fedclipadapter"), USED),
    "tail 100:1": (SIGNS + "&tail=100", ("fedtaskres",), BALANCES),
    "tail 100:1, neon": (NEON + "&tail=100", ("fedtaskres", "fedclipadapter", "promptfl"), BALANCES),
}


class Bench:
    """Runs federations on shared features. ``rounds`` of each."""

    def __init__(self, folder: Path, rounds: int):
        self.sources, self.cache, self.rounds = SharedSources(), FeatureCache(folder), rounds
        self.backbone = load_backbone("promptfed-tiny", "embedded")

    def sites(self, data: str, arm: Arm, seed: int) -> list[Site]:
        """Five sites with equal parts, or a style each. With ``unlabelled`` only the first has labels.

        Of a part it has two labelled images of each class, of a style all.
        """
        sites = []
        for client, style in enumerate(STYLES):
            part = "" if "{style}" in data else f"&partition=iid&clients={SITES}&client={client}"
            uri = f"{data.format(style=style)}&split_seed={seed}{part}"
            if "unlabelled" not in arm:
                sites.append(Site(f"s{client}", uri))
            elif client == 0:
                sites.append(Site("s0", uri + ("&shots=2" if part else "")))
            elif arm["unlabelled"] == "used":
                sites.append(Site(f"s{client}", uri + "&unlabelled=true"))
            else:
                sites.append(Site(f"s{client}", uri + "&test_on=test", role="evaluator"))
        return sites

    def run(self, method: str, data: str, arm: Arm, rate: float, seed: int) -> FederationResult:
        """One federation."""
        names = list(self.sources.open(data.format(style=STYLES[0])).class_names)
        spec = {
            "name": "labels",
            "method": {"name": method},
            "class_names": names,
            "rounds": self.rounds,
            "seed": seed,
            "training": {"learning_rate": rate},
            "loss": arm.get("loss", {}),
            "participation": {"min_clients": 1},
            "evaluation": {"every": self.rounds},
        }
        sites = self.sites(data, arm, seed)
        return simulate(spec, sites, features=self.cache, sources=self.sources, backbone=self.backbone)

    def scores(self, result: FederationResult, data: str) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities (N, C) of the final state for the test images, and their labels (N,)."""
        source = self.sources.open(data)
        split = ClientData(source, self.backbone, self.cache).split(TEST, source.class_names)
        classifier = AdaptedModel.of(result).serve(self.backbone, source.class_names).classifier
        return probabilities(classifier, split).numpy(), split.labels.numpy()

    def tail_of_scenes(self, arm: Arm, rate: float, seed: int, purpose: str) -> float:
        """Mean average precision of the three rarest kinds in scenes with several labels, of FedTaskRes."""
        data = f"{SCENES}&seed={seed}&purpose={purpose}"
        names = list(self.sources.open(data).class_names)
        tested = {"tail": f"{data}&only={','.join(names[-3:])}"}
        parts = [f"{data}&tail=100&partition=iid&clients={SITES}&client={client}" for client in range(SITES)]
        spec = {
            "name": "scenes",
            "task": "multi_label",
            "method": {"name": "fedtaskres"},
            "backbone": {"model": "promptfed-emoji", "pretrained": "embedded"},
            "class_names": names,
            "rounds": SCENE_ROUNDS,
            "seed": seed,
            "training": {"learning_rate": rate},
            "loss": arm.get("loss", {}),
            "evaluation": {"every": SCENE_ROUNDS},
        }
        sites = [Site(f"s{k}", part, tests={} if k else tested) for k, part in enumerate(parts)]
        result = simulate(spec, sites, features=self.cache, sources=self.sources)
        return next(row.accuracy for row in result.final() if row.split == "tail")


def measure_scenes(bench: Bench, seeds: list[int]) -> dict[str, Any]:
    """The tail of scenes with and without balance; rates are chosen on scenes of training things at seed 0."""
    row: dict[str, Any] = {"cell": SCENES_CELL, "method": "fedtaskres"}
    for name, arm in (("cross-entropy", {}), ("balanced", {"loss": {"balance": "logit_adjusted"}})):
        held_out, rate = max((bench.tail_of_scenes(arm, rate, 0, "train"), rate) for rate in SCENE_GRID)
        reached = [bench.tail_of_scenes(arm, rate, seed, "test") for seed in seeds]
        row[name] = {"rate": rate, "arm": arm, "held_out": held_out, "test": reached}
    gains = np.subtract(row["balanced"]["test"], row["cross-entropy"]["test"])
    return row | {"difference": float(gains.mean()), "low": float(gains.min()), "high": float(gains.max())}


def right(result: FederationResult) -> np.ndarray:
    """Whether each test picture was classified rightly (N,), by site."""
    told = sorted((one for one in result.outcomes if one.split == "test"), key=lambda one: one.client)
    return np.concatenate([np.equal(one.labels, one.predicted) for one in told]).astype(float)


def tail_ap(scores: np.ndarray, labels: np.ndarray) -> float:
    """The mean average precision of the last third of the classes."""
    classes = range(scores.shape[1] - round(TAIL * scores.shape[1]), scores.shape[1])
    return float(np.mean([average_precision_score(labels == k, scores[:, k]) for k in classes]))


def chosen(bench: Bench, method: str, data: str, arms: list[Arm], is_tail: bool) -> tuple[float, Arm, float]:
    """The rate and the arm that are best on held-out training images at seed 0, and what they reach there."""
    best: tuple[float, Arm, float] = (0.0, {}, -1.0)
    for arm in arms:
        for rate in GRID:
            result = bench.run(method, data + HELD_OUT, arm, rate, 0)
            value = tail_ap(*bench.scores(result, data + HELD_OUT)) if is_tail else float(right(result).mean())
            best = max(best, (rate, arm, value), key=lambda found: found[2])
    return best


def measure(bench: Bench, cell: str, method: str, seeds: list[int]) -> dict[str, Any]:
    """Both arms of a cell at every seed, and their paired difference."""
    data, _, arms = CELLS[cell]
    is_tail = cell.startswith("tail")
    row: dict[str, Any] = {"cell": cell, "method": method}
    values: dict[str, list[Any]] = {}
    for name, options in arms.items():
        rate, arm, held_out = chosen(bench, method, data, options, is_tail)
        results = [bench.run(method, data, arm, rate, seed) for seed in seeds]
        values[name] = [bench.scores(result, data) if is_tail else right(result) for result in results]
        reached = [tail_ap(*value) if is_tail else float(value.mean()) for value in values[name]]
        row[name] = {"rate": rate, "arm": dict(arm), "held_out": held_out, "test": reached}
    first, second = values.values()
    row |= _tail_difference(first, second) if is_tail else _difference(first, second)
    return row


def _difference(first: list[np.ndarray], second: list[np.ndarray]) -> dict[str, float]:
    differences = np.stack(second) - np.stack(first)
    low, high, p = paired_bootstrap([differences])
    return {"difference": float(differences.mean()), "low": low, "high": high, "p": p}


def _tail_difference(first: list[Any], second: list[Any], draws: int = 500) -> dict[str, float]:
    rng, labels = np.random.default_rng(0), first[0][1]

    def mean(rows: np.ndarray) -> float:
        pairs = zip(first, second, strict=True)
        return float(np.mean([tail_ap(b[0][rows], labels[rows]) - tail_ap(a[0][rows], labels[rows]) for a, b in pairs]))

    drawn = np.array([mean(rng.integers(len(labels), size=len(labels))) for _ in range(draws)])
    low, high = np.quantile(drawn, [0.025, 0.975])
    tails = min((drawn <= 0).sum(), (drawn >= 0).sum())
    difference = mean(np.arange(len(labels)))
    return {
        "difference": difference,
        "low": float(low),
        "high": float(high),
        "p": min(1.0, 2 * (tails + 1) / (draws + 1)),
    }


def main() -> None:
    """Measure every cell and method, write the file after each, and print a table."""
    command = parser(__doc__)
    command.add_argument("--seeds", type=integers, default=[0, 1, 2])
    command.add_argument("--cell", action="append", choices=[*CELLS, SCENES_CELL], help="only this one (repeatable)")
    command.add_argument("--rounds", type=int, default=ROUNDS)
    options = command.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.rounds)
        for cell in options.cell or [*CELLS, SCENES_CELL]:
            methods = CELLS[cell][1] if cell in CELLS else ("",)
            for method in methods:
                rows.append(
                    measure(bench, cell, method, options.seeds) if method else measure_scenes(bench, options.seeds)
                )
                write(options.json, {"rounds": options.rounds, "machine": machine(), "rows": rows})
                print(rows[-1], flush=True)
    cells = [
        [row["cell"], row["method"], *(f"{100 * row[key]:+.1f}" for key in ("difference", "low", "high"))]
        for row in rows
    ]
    print(table(["task", "method", "difference", "low", "high"], cells, texts=2))


if __name__ == "__main__":
    main()
