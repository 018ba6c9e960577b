"""Image features per second against the bare image tower, and the memory of a simulation with more clients.

    python -m benchmarks.features --json features.json
    python -m benchmarks.features --count 10000 --device cuda

Pictures are 320 x 240 JPEG files of noise; the weights of ViT-B/16 are random. ``rate`` compares, in turns over parts
of the pictures, the features that a client computes (decoding, preprocessing, the tower, the cache's files) with a loop
that only runs the tower over batches of preprocessed images. ``ratio_of_cpu_seconds`` is that of one core, whatever
else the machine does. ``pipeline`` replaces the tower by one that takes no time (numbers are made of pixels where a
tower is), and compares it, in turns and on as many threads, with a loop that only decodes and resizes the same files by
PIL. ``memory`` compares the peak memory of simulations of one round with 1 and with 10 clients of 8 pictures each, for
a method on cached features and one that runs the image tower in each step.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import in_own_process, machine, parser, write
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.clip.slots import batch_size
from promptfed.shared.data import open_source
from promptfed.shared.data.image_files import READERS
from promptfed.shared.machine import processors
from promptfed.shared.methods.core.spec_backbone import open_backbone
from promptfed.shared.spec.spec import BackboneSpec

Precision = Literal["fp32", "fp16", "bf16"]
MODEL, PRETRAINED = "ViT-B-16", "random"
TURN = 512  # pictures after which the pipeline and PIL take turns
MEMORY_METHODS = ("promptfl", "fedvpt")
CLIENTS = (1, 10)
EACH = 8


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


def pipeline(count: int, model: str, pretrained: str, device: str) -> dict[str, Any]:
    """Pictures per second without a tower's time and of PIL alone, and the median ratio."""
    torch.set_num_threads(1)
    backbone = open_backbone(BackboneSpec(model=model, pretrained=pretrained), allow_backbone=False, device=device)
    backbone.encode_images = _no_tower(backbone)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(READERS) as threads:
        write_pictures(Path(place) / "images", 2 * count)
        split = open_source(f"folder:{place}/images").train
        parts = [range(start, start + TURN) for start in range(0, len(split) - TURN + 1, TURN)]
        turns = []
        for number, rows in enumerate(parts):
            cache = FeatureCache(Path(place) / f"features-{number}")
            cache.features(backbone, split, indices=[rows.start - 1])  # the places of a batch are measured
            paths = [split.path(row) for row in rows]
            turns.append(
                (
                    _timed(partial(list, threads.map(_by_pil, paths))),
                    _timed(partial(cache.features, backbone, split, indices=rows)),
                )
            )
    return {
        "pictures": sum(map(len, parts)),
        "processors": processors(),
        "pil_per_second": round(TURN / statistics.median(pil[0] for pil, _ in turns), 1),
        "ours_per_second": round(TURN / statistics.median(ours[0] for _, ours in turns), 1),
        "ratio": round(statistics.median(pil[0] / ours[0] for pil, ours in turns), 3),
        "ratio_of_cpu_seconds": round(statistics.median(pil[1] / ours[1] for pil, ours in turns), 3),
    }


def _by_pil(path: Path) -> Image.Image:
    """What a preprocessing of 224 pixels does with a picture of 320 x 240, up to the numbers."""
    with Image.open(path) as image:
        return image.convert("RGB").resize((298, 224), Image.Resampling.BICUBIC).crop((37, 0, 261, 224))


def _no_tower(backbone: Backbone) -> Callable[..., torch.Tensor]:
    def encode(images: torch.Tensor, **options: bool) -> torch.Tensor:
        return images[:, 0].flatten(1)[:, : backbone.d_e].float().to(backbone.device)

    return encode


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


def memory(method: str, clients: int, model: str, device: str) -> dict[str, float]:
    """The peak memory (MiB) of this process after a simulation of one round."""
    with tempfile.TemporaryDirectory() as place:
        sites = []
        for number in range(clients):
            write_pictures(Path(place) / str(number), 2 * EACH)
            sites.append(Site(f"site-{number}", f"folder:{place}/{number}"))
        spec = {
            "name": "memory",
            "method": {"name": method},
            "rounds": 1,
            "backbone": {"model": model, "pretrained": PRETRAINED},
            "training": {"batch_size": 4},
            "participation": {"min_clients": clients},
        }
        simulate(spec, sites, device=device)
    figures = {"host_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if device != "cpu":
        figures["device_mib"] = torch.cuda.max_memory_allocated() / (1 << 20)
    return {name: round(value, 1) for name, value in figures.items()}


def main() -> None:
    """Measure both, or with ``--memory`` one simulation in this process."""
    command = parser(__doc__)
    command.add_argument("--count", type=int, default=1024, help="pictures")
    command.add_argument("--model", default=MODEL)
    command.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    command.add_argument("--pipeline", action="store_true", help="only the pipeline without a tower")
    command.add_argument("--memory", nargs=2, metavar=("METHOD", "CLIENTS"))
    options = command.parse_args()
    if options.memory:
        print(json.dumps(memory(options.memory[0], int(options.memory[1]), options.model, options.device)))
        return
    if options.pipeline:
        print(json.dumps(pipeline(options.count, options.model, PRETRAINED, options.device)))
        return
    numbers: dict[str, Any] = {"about": machine(), "model": options.model, "device": options.device, "memory": {}}
    for method in MEMORY_METHODS:
        place = ("--model", options.model, "--device", options.device)
        one, many = (in_own_process("benchmarks.features", "--memory", method, str(n), *place) for n in CLIENTS)
        numbers["memory"][method] = {"one": one, "ten": many, "ratio": {k: round(many[k] / one[k], 3) for k in one}}
    numbers["pipeline"] = pipeline(options.count, options.model, PRETRAINED, options.device)
    numbers["rate"] = rate(options.count, options.model, PRETRAINED, options.device)
    print(json.dumps(numbers, indent=1))
    write(options.json, numbers)


if __name__ == "__main__":
    main()
