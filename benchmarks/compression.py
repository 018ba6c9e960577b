"""Compressed changes: bytes and seconds for a whole ViT-B/16, and what FedAvg on emoji loses.

    python -m benchmarks.compression --json benchmarks/compression.json
    python -m benchmarks.compression --choose        # the rate, without compression, on the things of validation

The change has the shapes of CLIP's ViT-B/16 image tower and random entries. Two clients, a designer's style each, learn
the names of 95 things, and are tested on a third designer's drawings of them. Differences are paired: picture by
picture, over both targets and all seeds.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import integers, machine, parser, table, write
from promptfed.experiments.figures.comparison import paired_bootstrap
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import FeatureCache
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.tensors import Arrays, size_of
from promptfed.shared.tensors.compression import compressed, decompressed

WIDTH, BLOCKS, POSITIONS, JOINT = 768, 12, 197, 512
KINDS = ("none", "bf16", "int8", "topk(0.01)")
ROUNDS, RATE, RATES = 10, 0.001, (0.0003, 0.001, 0.003)
STYLES, TARGETS = ("contrast", "notomono", "fxemoji"), ("contrast", "notomono")
DATA = f"emoji:{{}}?level=names&test={{}}&drawn_by={'+'.join(STYLES)}"


def tower(rng: np.random.Generator) -> Arrays:
    """A change of ViT-B/16's image tower: 86 million entries."""
    block = {
        "attn.in_proj_weight": (3 * WIDTH, WIDTH), "attn.in_proj_bias": (3 * WIDTH,),
        "attn.out_proj.weight": (WIDTH, WIDTH), "attn.out_proj.bias": (WIDTH,),
        "mlp.c_fc.weight": (4 * WIDTH, WIDTH), "mlp.c_fc.bias": (4 * WIDTH,),
        "mlp.c_proj.weight": (WIDTH, 4 * WIDTH), "mlp.c_proj.bias": (WIDTH,),
        "ln_1.weight": (WIDTH,), "ln_1.bias": (WIDTH,), "ln_2.weight": (WIDTH,), "ln_2.bias": (WIDTH,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "class_embedding": (WIDTH,), "positional_embedding": (POSITIONS, WIDTH), "proj": (WIDTH, JOINT),
        "conv1.weight": (WIDTH, 3, 16, 16), "ln_pre.weight": (WIDTH,), "ln_pre.bias": (WIDTH,),
        "ln_post.weight": (WIDTH,), "ln_post.bias": (WIDTH,),
    }  # fmt: skip
    shapes |= {f"blocks.{at}.{name}": shape for at in range(BLOCKS) for name, shape in block.items()}
    return {name: rng.standard_normal(shape, dtype=np.float32) * np.float32(1e-4) for name, shape in shapes.items()}


def costs() -> list[dict[str, Any]]:
    """Bytes, and seconds of encoding and of decoding, of each encoding."""
    change, rows = tower(np.random.default_rng(0)), []
    expected = {name: (one.shape, "float32") for name, one in change.items()}
    rows.append({"up": "none", "bytes": size_of(change), "encode": 0.0, "decode": 0.0})
    for up in KINDS[1:]:
        begin = time.perf_counter()
        sent = compressed(change, up, np.random.default_rng(1))
        middle = time.perf_counter()
        decompressed(sent, expected, up)
        seconds = {"encode": middle - begin, "decode": time.perf_counter() - middle}
        rows.append({"up": up, "bytes": size_of(sent), **seconds})
    return rows


def right(result: FederationResult) -> np.ndarray:
    """Whether each picture of the target was classified rightly (N,), by one client: all have the same state."""
    told = next(one for one in result.outcomes if one.split == "test")
    return np.equal(told.labels, told.predicted).astype(float)


def trained(
    up: str, seed: int, target: str, rate: float = RATE, more: str = "", every: int = ROUNDS, **shared: Any
) -> tuple[np.ndarray, FederationResult]:
    """Which pictures of the target FedAvg tells after its rounds."""
    data = [DATA.format(style, target) + more for style in STYLES if style != target]
    spec = {
        "name": "compression",
        "method": {"name": "fedavg"},
        "backbone": {"model": "promptfed-emoji", "pretrained": "embedded"},
        "class_names": list(shared["sources"].open(data[0]).class_names),
        "rounds": ROUNDS,
        "seed": seed,
        "training": {"epochs": 2, "batch_size": 32, "learning_rate": rate, "schedule": "cosine"},
        "compression": {"up": up},
        "evaluation": {"every": every},
    }
    result = simulate(spec, [Site(f"s{number}", uri) for number, uri in enumerate(data)], **shared)
    return right(result), result


def choose(**shared: Any) -> None:
    """Print the accuracies by round of each rate, without compression, on the things of validation."""
    for rate in RATES:
        for target in TARGETS:
            result = trained("none", 10, target, rate, "&purpose=validation", 2, **shared)[1]
            told = [
                report["evaluation"]["mean"]["trainer"]["accuracy"] for report in result.reports if report["evaluation"]
            ]
            print(rate, target, [round(one, 3) for one in told], flush=True)


def differences(seeds: list[int], numbers: dict[str, Any], **shared: Any) -> None:
    """Add the accuracies by encoding, and their differences from those without, to ``numbers``."""
    plain: np.ndarray | None = None
    for up in KINDS:
        made = [trained(up, seed, target, **shared) for target in TARGETS for seed in seeds]
        told = np.stack([one for one, _ in made])
        plain = told if plain is None else plain
        low, high, p = paired_bootstrap([told - plain])
        results = [result for _, result in made]
        row = {
            "up": up,
            "accuracy": [float(one.mean()) for one in told],
            "zero_shot": [one.reports[0]["evaluation"]["mean"]["trainer"]["accuracy"] for one in results],
            "bytes": results[0].reports[-1]["bytes_up"] // len(results[0].clients),
            "difference": float((told - plain).mean()),
            "other_answers": float((told != plain).mean()),
        }
        numbers["emoji"].append(row | {"low": low, "high": high, "p": p})
        print(numbers["emoji"][-1], flush=True)


def main() -> None:
    """Measure costs and accuracies, and print both tables."""
    command = parser(__doc__)
    command.add_argument("--seeds", type=integers, default=[0, 1, 2])
    command.add_argument("--choose", action="store_true", help="compare rates without compression, and end")
    options = command.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shared = {"sources": SharedSources(), "features": FeatureCache(Path(folder)), "pool": 1}
        if options.choose:
            choose(**shared)
            return
        numbers: dict[str, Any] = {"machine": machine(), "tower": costs(), "rounds": ROUNDS, "emoji": []}
        rows = [
            [one["up"], f"{one['bytes']:,}", f"{one['encode']:.1f}", f"{one['decode']:.1f}"] for one in numbers["tower"]
        ]
        print(table(["up", "bytes", "encoding, s", "decoding, s"], rows), flush=True)
        differences(options.seeds, numbers, **shared)
    write(options.json, numbers)


if __name__ == "__main__":
    main()
