"""CPU time of one local training step of fedotp: with the image tower in every step, and on kept patch features.

    python -m benchmarks.patch_step --json patch_step.json

The step: patch features of a batch of images, text features of two contexts, a transport plan for every image and
class, cross-entropy, gradient with respect to both contexts, SGD update. The ways differ in what is computed for it,
never in the result, which is asserted on every run.

  plain    frozen image tower on every step, all text positions of all classes
  kept     patch features read from disk (16 bits), short text with a shared prefix
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from benchmarks.harness import class_names, in_words, machine, medians, parser, random_backbone, table, write
from promptfed.shared.clip import Backbone, ClassPrompts
from promptfed.shared.clip.caches.features import PatchCache
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.patch_texts import PatchTextLogits
from promptfed.shared.methods.fedotp import FedOTP

TARGET = 10  # times faster, ViT-B/16, 10 classes, batch 32
Path_ = Literal["auto", "plain"]


class RandomImages:
    """Images as a data source has them."""

    def __init__(self, count: int, side: int, draws: torch.Generator):
        self._pixels = torch.randint(256, (count, side, side, 3), dtype=torch.uint8, generator=draws).numpy()

    def __len__(self) -> int:
        return len(self._pixels)

    def image(self, index: int) -> Image.Image:
        """One of them."""
        return Image.fromarray(self._pixels[index])

    def digest(self, index: int) -> str:
        """Of its pixels."""
        return hashlib.sha256(self._pixels[index].tobytes()).hexdigest()


@dataclass
class Patches:
    """A training split whose patch features come from ``read``."""

    labels: Tensor
    read: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.labels)

    def patches(self, indices: Tensor) -> Tensor:
        """``(B, M, d_e)``."""
        return self.read(indices)


@dataclass
class Task:
    """One training situation."""

    backbone: Backbone
    prompts: ClassPrompts
    start: Tensor  # (2, m, d_t)
    plain: Patches
    kept: Patches
    bytes: int


def make_task(backbone: Backbone, classes: int, batch: int, m: int, folder: Path) -> Task:
    """Random images and contexts; the images' patch features are on disk."""
    draws = torch.Generator().manual_seed(0)
    images = RandomImages(batch, backbone.image_size[0], draws)
    pixels = torch.stack([backbone.preprocess(images.image(index)) for index in range(batch)])
    labels = torch.randint(classes, (batch,), generator=draws)
    cache = PatchCache(folder)
    cache.fill(backbone, images, range(batch))
    size = sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
    return Task(
        backbone=backbone,
        prompts=backbone.class_prompts(class_names(classes, backbone), m),
        start=torch.randn(2, m, backbone.d_t, generator=draws) * 0.02,
        plain=Patches(labels, lambda rows: backbone.encode_patches(pixels[rows]).half().float()),
        kept=Patches(labels, lambda rows: cache.rows(backbone, images, rows.tolist())),
        bytes=size,
    )


def step(task: Task, split: Patches, path: Path_) -> tuple[float, Tensor]:
    """CPU seconds of one step, and its gradient ``(2, m, d_t)``."""
    method = make_method({"name": "fedotp", "m": task.start.shape[1]})
    assert isinstance(method, FedOTP)
    contexts = task.start.clone().requires_grad_()
    optimizer = torch.optim.SGD([contexts], lr=0.001, momentum=0.9, weight_decay=5e-4)
    logits = PatchTextLogits(task.backbone.logit_scale, method.plans)
    began = time.process_time()
    texts = task.backbone.encode_prompts(contexts, task.prompts, path=path, normalize=False)
    scored = logits(split, torch.arange(len(split)), texts)
    torch.autograd.backward(F.cross_entropy(scored, split.labels))
    optimizer.step()
    seconds = time.process_time() - began
    assert contexts.grad is not None
    return seconds, contexts.grad


def measure(task: Task, plain_repeats: int, fast_repeats: int) -> dict[str, Any]:
    """Interleaved: after each plain step some on kept features."""
    seconds: dict[str, list[float]] = {"plain": [], "kept": []}
    worst = 0.0
    step(task, task.kept, "auto")  # warm up
    for _ in range(plain_repeats):
        took, wanted = step(task, task.plain, "plain")
        seconds["plain"].append(took)
        for _ in range(fast_repeats):
            took, gradient = step(task, task.kept, "auto")
            seconds["kept"].append(took)
            worst = max(worst, float((gradient - wanted).abs().max() / wanted.abs().max()))
    # Both round to 16 bits; the tower's own last bits, before that, depend on the batch that an image stands in.
    if worst > 1e-2:
        raise SystemExit(f"The ways differ: gradients by {worst:.1e} of the largest entry.")
    typical = medians(seconds)
    return {
        "classes": len(task.prompts),
        "seconds": typical,
        "runs": seconds,
        "speedup": typical["plain"] / typical["kept"],
        "largest_deviation": worst,
        "bytes_per_image": task.bytes // len(task.kept),
    }


def parse() -> argparse.Namespace:
    """The command line's options."""
    command = parser(__doc__)
    command.add_argument("--model", default="ViT-B-16", help="any open_clip model (default: %(default)s)")
    command.add_argument("--classes", type=int, nargs="+", default=[10, 100])
    command.add_argument("--batch", type=int, default=32)
    command.add_argument("--context-tokens", type=int, default=16)
    command.add_argument("--repeats", type=int, default=5, help="plain steps")
    command.add_argument("--fast-repeats", type=int, default=3, help="steps on kept features per plain step")
    return command.parse_args()


def main() -> None:
    """Measure, and print a table."""
    options = parse()
    torch.set_num_threads(1)
    backbone, results = random_backbone(options.model), []
    with tempfile.TemporaryDirectory() as folder:
        for classes in options.classes:
            task = make_task(backbone, classes, options.batch, options.context_tokens, Path(folder))
            result = measure(task, options.repeats, options.fast_repeats) | {"model": options.model}
            results.append(result | {"target": TARGET if options.model == "ViT-B-16" and classes == 10 else None})
    columns = ["backbone", "classes", "plain", "kept", "times faster", "on disk, an image"]
    rows = [
        [
            one["model"],
            str(one["classes"]),
            in_words(one["seconds"]["plain"]),
            in_words(one["seconds"]["kept"]),
            f"**{one['speedup']:.1f}**",
            f"{one['bytes_per_image'] / 1e3:.0f} kB",
        ]
        for one in results
    ]
    print(table(columns, rows))
    write(options.json, {"provenance": machine() | {"batch": options.batch}, "results": results})


if __name__ == "__main__":
    main()
