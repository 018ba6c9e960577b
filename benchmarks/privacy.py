"""Accuracy and membership inference over ε: whole protected federations in one process, five clients of 400 images.

Every run is the real coordinator and real clients (`promptfed.experiments.simulation`), which calibrate their own
noise to ε at δ = 1e-4. The loss attack scores the clients' training images against their test images with the final
global state. Runs are appended to ``--out`` as they end, seeds outermost, so that an interrupted command has whole
seeds and goes on where it was. At the end it prints the table of docs/guides/privacy.md.

    python -m benchmarks.privacy --out privacy.jsonl

Rates of promptfl (0.02 to 0.3, with and without noise) and fedclip (1e-3, 3e-3, without) were chosen on seed 7; those
of fedpgp on held-out training images of seed 7 (validation=0.25): 0.003, 0.01, 0.03 without noise, 0.01, 0.03 at ε = 4.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import cpu_seconds, integers, mean_and_spread, parser, table
from promptfed.client_service.training.data import TEST, TRAIN, ClientData
from promptfed.experiments.attacks.membership import attack, losses
from promptfed.experiments.simulation.simulation import simulate
from promptfed.export.adapted_model import AdaptedModel
from promptfed.runtime.services import Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, tiny
from promptfed.shared.data import open_source

CLIENTS, ROUNDS, BATCH, DELTA = 5, 5, 40, 1e-4
DATA = "symbols:neon?topic=weather&per_class=200&test_per_class=200&partition=iid&clients=5&client={}"
SITES = [Site(f"site-{number}", DATA.format(number)) for number in range(CLIENTS)]
SGD = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.0}
ADAM = {"optimizer": "adam", "weight_decay": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    "promptfl": {"method": {"m": 4}, "plain": SGD | {"learning_rate": 0.05}, "noisy": SGD | {"learning_rate": 0.3}},
    "fedclip": {"method": {}, "plain": ADAM | {"learning_rate": 3e-3}, "noisy": ADAM | {"learning_rate": 3e-3}},
    "fedpgp": {"method": {"m": 4}, "plain": SGD | {"learning_rate": 0.01}, "noisy": SGD | {"learning_rate": 0.03}},
}


def spec_of(method: str, epsilon: float | None, seed: int) -> dict[str, Any]:
    """One run's spec; ε None: not protected."""
    given = METHODS[method]
    spec = {
        "name": "privacy",
        "method": {"name": method, **given["method"]},
        "rounds": ROUNDS,
        "seed": seed,
        "training": {"epochs": 1, "batch_size": BATCH, **given["plain" if epsilon is None else "noisy"]},
        "evaluation": {"every": ROUNDS},
    }
    if epsilon is not None:
        spec["privacy"] = {"level": "sample", "clip": 0.3, "epsilon": epsilon, "delta": DELTA, "evaluation": "plain"}
    return spec


def attacked(result: FederationResult, backbone: Backbone, cache: FeatureCache) -> dict[str, Any]:
    """The loss attack of the final global state on all clients' images."""
    scores: dict[str, list[Any]] = {TRAIN: [], TEST: []}
    model = AdaptedModel.of(result)
    for site in SITES:
        source = open_source(site.data, "trainer")
        data = ClientData(source, backbone, cache)
        classifier = model.serve(backbone, source.class_names).classifier
        for part, own in scores.items():
            split = data.split(part, source.class_names)
            with torch.no_grad():
                logits = classifier.logits(split, torch.arange(len(split))).double().numpy()
            own.append(-losses(logits, split.labels.numpy()))
    outcome = attack("loss", np.concatenate(scores[TRAIN]), np.concatenate(scores[TEST]), DELTA)
    low = next(rate for rate in outcome.rates if rate.at == 0.01)
    return {
        "auc": outcome.auc,
        "auc_low": outcome.auc_low,
        "auc_high": outcome.auc_high,
        "tpr_at_1": low.found,
        "epsilon_bound": outcome.epsilon,
    }


def measure(method: str, epsilon: float | None, seed: int, backbone: Backbone, cache: FeatureCache) -> dict[str, Any]:
    """One line of the results."""
    result = simulate(spec_of(method, epsilon, seed), SITES, backbone=backbone, features=cache)
    tested = [score for score in result.final() if score.split == TEST]
    line = {
        "method": method,
        "epsilon": epsilon,
        "seed": seed,
        "accuracy": statistics.fmean(score.accuracy for score in tested),
        "zero_shot": statistics.fmean(score.zero_shot or 0.0 for score in tested),
    }
    if epsilon is not None:
        spent = [update["privacy"] for update in result.reports[-1]["phases"][0]["updates"]]
        line |= {"spent": max(each["epsilon"] for each in spent), "z": spent[0]["noise_multiplier"]}
    return line | attacked(result, backbone, cache)


def summary(lines: list[dict[str, Any]]) -> str:
    """Accuracy and the attack by method and ε, mean ± standard deviation over the seeds."""
    columns = ["method", "ε", "z", "accuracy", "AUC of the loss attack", "TPR at 1 %", "bound on ε", "seeds"]
    zero_shot = statistics.fmean(line["zero_shot"] for line in lines)
    rows = [["zero-shot", "0", "–", f"{zero_shot:.1%}", "–", "–", "–", "–"]]

    def key(line: dict[str, Any]) -> tuple[str, float]:
        return line["method"], -(line["epsilon"] or float("inf"))

    for (method, negative), group in itertools.groupby(sorted(lines, key=key), key):
        runs = list(group)
        rates = [run["tpr_at_1"] for run in runs if run["tpr_at_1"] is not None]
        cells = [method, "∞", "–"] if runs[0]["epsilon"] is None else [method, f"{-negative:g}", f"{runs[0]['z']:.3g}"]
        cells.append(f"{mean_and_spread([run['accuracy'] for run in runs], sample=True)} %")
        cells.append(mean_and_spread([run["auc"] for run in runs], 1, 3, sample=True))
        cells.append(f"{statistics.fmean(rates):.2%}" if rates else "too few")
        rows.append([*cells, f"{max(run['epsilon_bound'] for run in runs):.2f}", str(len(runs))])
    return table(columns, rows, texts=len(columns))


def main() -> None:
    """Run what ``--out`` does not hold yet, and print its table."""
    command = parser(__doc__)
    command.add_argument("--out", type=Path, default=Path("privacy.jsonl"), help="one run a line")
    command.add_argument("--methods", default=",".join(METHODS))
    command.add_argument("--epsilons", default="inf,8,4,2,1")
    command.add_argument("--seeds", type=integers, default=[0, 1, 2])
    command.add_argument("--features", type=Path, default=Path("privacy-features"), help="folder of kept features")
    options = command.parse_args()
    torch.set_num_threads(1)
    backbone, cache = load_backbone(tiny.MODEL, tiny.PRETRAINED), FeatureCache(options.features)
    epsilons = [None if text == "inf" else float(text) for text in options.epsilons.split(",")]
    lines = [json.loads(text) for text in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(line["method"], line["epsilon"], line["seed"]) for line in lines}
    for seed, method, epsilon in itertools.product(options.seeds, options.methods.split(","), epsilons):
        if (method, epsilon, seed) not in done:
            line: dict[str, Any] = {}
            seconds = cpu_seconds(lambda: line.update(measure(method, epsilon, seed, backbone, cache)))  # noqa: B023
            lines.append(line | {"cpu_seconds": round(seconds, 1)})
            with options.out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print(summary(lines))


if __name__ == "__main__":
    main()
