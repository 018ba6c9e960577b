"""What noise is worth to an attacker: AUC on canaries over ε, where prompts without noise can be read.

One client whose images are each in by a coin, half of them under a wrong label; long training, so that without noise
the wrong labels are learned by heart. Each line is several real federations (`promptfed.experiments.attacks.shadows`).

    python -m benchmarks.privacy_audit --out audit.jsonl
    python -m benchmarks.privacy_audit --out audit.jsonl --table
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.privacy import ADAM, DELTA
from promptfed.cli.audit import served
from promptfed.experiments.attacks.shadows import ShadowPlan, run_shadows
from promptfed.runtime.services import Site
from promptfed.shared.clip import FeatureCache, load_backbone, tiny

SITE = Site("site", "symbols:neon?topic=weather&per_class=40&test_per_class=2")
TRAINING = {"epochs": 20, "batch_size": 40, **ADAM, "learning_rate": 3e-3}
METHODS: dict[str, dict[str, Any]] = {"fedclip": {}, "promptfl": {"m": 16}, "fedpgp": {"m": 16}}
CLIP, ROUNDS = 0.3, 2


def spec_of(method: str, epsilon: float | None) -> dict[str, Any]:
    """One run's spec; ε None: not protected."""
    spec = {
        "name": "audit",
        "method": {"name": method, **METHODS[method]},
        "rounds": ROUNDS,
        "seed": 1,
        "training": TRAINING,
        "evaluation": {"every": ROUNDS},
    }
    if epsilon is None:
        return spec
    return spec | {"privacy": {"level": "sample", "clip": CLIP, "epsilon": epsilon, "delta": DELTA}}


def measured(method: str, epsilon: float | None, seeds: int, canaries: int, cache: FeatureCache) -> dict[str, Any]:
    """The attacks' figures at one ε."""
    started = time.process_time()
    backbone = load_backbone(tiny.MODEL, tiny.PRETRAINED)
    shadows = run_shadows(
        ShadowPlan(spec_of(method, epsilon), (SITE,), "site", seeds, canaries), served, backbone, cache
    )
    found = {one.name: one for one in shadows.attacks(DELTA)}
    best = found["gained on canaries"]
    return {
        "method": method,
        "epsilon": epsilon,
        "claimed": shadows.claimed,
        "runs": seeds,
        "canaries": canaries,
        "auc": best.auc,
        "auc_low": best.auc_low,
        "auc_high": best.auc_high,
        "loss_auc": found["loss on canaries"].auc,
        "images_auc": found["gained"].auc,
        "bound": shadows.epsilon(DELTA),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """As docs/guides/privacy.md has it."""
    rows = [
        "| method | ε | AUC on canaries (95 %) | by the loss alone | AUC on ordinary images | ε shown at least |",
        "|---|---|---|---|---|---|",
    ]
    for one in lines:
        shown = "∞" if one["epsilon"] is None else f"{one['epsilon']:g}"
        interval = f"{one['auc']:.3f} ({one['auc_low']:.3f} to {one['auc_high']:.3f})"
        figures = f"{one['loss_auc']:.3f} | {one['images_auc']:.3f} | {one['bound']:.2f}"
        rows.append(f"| {one['method']} | {shown} | {interval} | {figures} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Run what ``--out`` does not hold yet, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("audit.jsonl"))
    parser.add_argument("--methods", default="fedclip,promptfl,fedpgp", help="of these; all by default")
    parser.add_argument("--epsilons", default="inf,8,4,2,1")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--canaries", type=int, default=100)
    parser.add_argument("--features", type=Path, default=Path("audit-features"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.methods.split(",")) - set(METHODS):
        parser.error(f"--methods: there is no {min(unknown)}; there are {', '.join(METHODS)}")
    lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    if given.table:
        sys.stdout.write(table(lines))
        return
    torch.set_num_threads(1)
    known, cache = {(one["method"], one["epsilon"]) for one in lines}, FeatureCache(given.features)
    for method in given.methods.split(","):
        for text in given.epsilons.split(","):
            epsilon = None if text == "inf" else float(text)
            if (method, epsilon) not in known:
                line = measured(method, epsilon, given.seeds, given.canaries, cache)
                with given.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
