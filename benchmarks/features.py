"""Image features per second against the bare image tower.

    python -m benchmarks.features --json features.json
    python -m benchmarks.features --count 10000 --device cuda

Pictures are 320 x 240 JPEG files of noise; the weights of ViT-B/16 are random. ``rate`` compares, in turns over parts
of the pictures, the features that a client computes (decoding, preprocessing, the tower, the cache's files) with a loop
that only runs the tower over batches of preprocessed images. ``ratio_of_cpu_seconds`` is that of one core, whatever
else the machine does.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import machine, parser, write
from promptfed.sdk.backbone import open_backbone
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.clip.caches import batch_size
from promptfed.shared.data import open_source
from promptfed.shared.machine import processors
from promptfed.shared.spec.spec import BackboneSpec

Precision = Literal["fp32", "fp16", "bf16"]
MODEL, PRETRAINED = "ViT-B-16", "random"


def write_pictures(folder: Path, count: int) -> None:
    """``count`` JPEG files of noise in two classes, half of them for training."""
    for split, kind in product(("train", "test"), ("left", "right")):
        (folder / split / kind).mkdir(parents=True)

    def write_one(number: int) -> None:
        place = folder / ("train", "test")[number // 2 % 2] / ("left", "right")[number % 2]
        noise = np.random.default_rng(number).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((320, 240)).save(place / f"{number}.jpg", quality=90)

    with ThreadPoolExecutor(processors()) as threads:
        list(threads.map(write_one, range(count)))


def rate(count: int, model: str, pretrained: str, device: str, precision: Precision = "fp32") -> dict[str, Any]:
    """Pictures per second of both loops, and the median ratio."""
    torch.set_num_threads(1)
    spec = BackboneSpec(model=model, pretrained=pretrained, precision=precision)
    backbone = open_backbone(spec, allow_backbone=False, device=device)
    with tempfile.TemporaryDirectory() as place:
        write_pictures(Path(place) / "images", 2 * count + 4)
        split = open_source(f"folder:{place}/images").train
        cache = FeatureCache(Path(place) / "features")
        cache.features(backbone, split, indices=range(1))  # the places of a batch are measured
        size = 2 * batch_size(backbone.device)  # whole batches, since the cache fills them up
        rows = np.arange(1, 1 + (len(split) - 1) // size * size).reshape(-1, size)
        turns = [(_bare(backbone, len(part)), _ours(cache, backbone, split, part)) for part in rows]
    figures = {
        "pictures": rows.size,
        "bare_per_second": round(size / statistics.median(bare[0] for bare, _ in turns), 2),
        "ours_per_second": round(size / statistics.median(ours[0] for _, ours in turns), 2),
        "ratio": round(statistics.median(bare[0] / ours[0] for bare, ours in turns), 3),
    }
    if device == "cpu":
        figures["ratio_of_cpu_seconds"] = round(statistics.median(bare[1] / ours[1] for bare, ours in turns), 3)
    return figures


def _bare(backbone: Backbone, count: int) -> tuple[float, float]:
    size = batch_size(backbone.device)
    images = torch.randn(size, 3, *backbone.image_size)

    def loop() -> None:
        for start in range(0, count, size):
            backbone.encode_images(images[: min(size, count - start)]).cpu()

    return _timed(loop)


def _ours(cache: FeatureCache, backbone: Backbone, split: Any, rows: np.ndarray) -> tuple[float, float]:
    return _timed(lambda: cache.features(backbone, split, indices=rows.tolist()))


def _timed(loop: Callable[[], object]) -> tuple[float, float]:
    """Seconds that pass, and those of this process on all cores."""
    begun, alone = time.perf_counter(), time.process_time()
    loop()
    return time.perf_counter() - begun, time.process_time() - alone


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--count", type=int, default=1024, help="pictures")
    command.add_argument("--model", default=MODEL)
    command.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = command.parse_args()
    figures = rate(options.count, options.model, PRETRAINED, options.device)
    numbers = {"about": machine(), "model": options.model, "device": options.device, "rate": figures}
    print(json.dumps(numbers, indent=1))
    write(options.json, numbers)


if __name__ == "__main__":
    main()
