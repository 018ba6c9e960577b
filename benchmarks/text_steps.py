"""CPU time of one local training step of each text-side method: with nothing kept, and as `shared/methods` does it.

    python -m benchmarks.text_steps --json benchmarks/text_steps.json

Both ways are the method's own `train`; what stands behind it differs. Plain: a task of one step, in which the frozen
image tower encodes the batch, every prompt passes the text tower by itself over all positions of all classes, and
constant texts (templates, experts) are encoded too. Ours: a task of several steps, divided by their number, on image
features that are kept (in memory, patch features on disk in 16 bits), with the short text path, shared prefixes and
prompts that pass the tower together. Equations are not what this compares: tests/promptfed/shared/methods hold each
method against them, and `benchmarks.text_methods` measures FedPGP and FedTPG against theirs.

Equality is asserted on every run: one step from the same start changes each tensor alike in both ways.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    RATE_OF_COMPARISON,
    Step,
    class_names,
    client_context,
    in_words,
    largest_deviation,
    medians,
    parser,
    random_backbone,
    started,
    table,
    write,
)
from benchmarks.patch_step import RandomImages
from benchmarks.step import provenance
from promptfed.shared.clip import Backbone, ClassPrompts
from promptfed.shared.clip.caches.features import PatchCache
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface.base import ClientContext, Method
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors import Tensors

# Options that make a step what the paper's is; pFedPrompt's memory stands in its loss only on request.
OPTIONS: dict[str, dict[str, Any]] = {
    "fedotp": {},
    "promptfolio": {},
    "pfedmoap": {"gate_learning_rate": 1000.0},
    "fedpha": {},
    "promptfl_per": {},
    "promptfl_amp": {},
    "pfedprompt": {"train_with_memory": True},
    "fedprograd": {},
    "fedplot": {},
}
EXPERTS = 9  # other clients' contexts, pFedMoAP's default
STILL = {"pfedmoap": {"gate_learning_rate": 1e-30}}  # for a step that moves nothing
RATE_OF_STANDING = 1e-30
# pFedMoAP's gate adds these to all experts' keys, or to all classes' logits alike: they move no softmax.
WITHOUT_EFFECT = ("key.bias", "value.bias", "output.bias")
TARGETS = {"fedotp": 10}  # ViT-B/16, 10 classes, batch 32


class PlainBackbone:
    """A backbone that remembers nothing: each prompt by itself, all positions of all classes, whenever asked."""

    def __init__(self, backbone: Backbone):
        self._backbone = backbone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)

    def encode_prompts(self, context: Tensor, prompts: ClassPrompts, *, normalize: bool = True) -> Tensor:
        """``(..., C, d_e)`` of contexts ``(..., m, d_t)``, of length 1 unless ``normalize`` is False."""
        wanted = torch.is_grad_enabled()
        with torch.enable_grad():  # without gradients a backbone answers from what it encoded before
            each = [
                self._backbone.encode_prompts(
                    one.requires_grad_() if not wanted else one, prompts, path="plain", normalize=normalize
                )
                for one in context.reshape(-1, *context.shape[-2:])
            ]
        found = torch.stack(each).reshape(*context.shape[:-2], *each[0].shape)
        return found if wanted else found.detach()


@dataclass
class PlainSplit:
    """A batch of which only pixels are kept; within one step the towers see it once."""

    backbone: Backbone
    pixels: Tensor  # (B, 3, H, W)
    labels: Tensor  # (B,)

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def _features(self) -> Tensor:
        return self.backbone.encode_images(self.pixels)

    @cached_property
    def _patches(self) -> Tensor:
        return self.backbone.encode_patches(self.pixels).half().float()

    def features(self) -> Tensor:
        """``(B, d_e)``."""
        return self._features

    def patches(self, indices: Tensor) -> Tensor:
        """``(B, M, d_e)``."""
        return self._patches[indices]


@dataclass
class KeptSplit:
    """The same batch, ``steps`` times over, as a client has kept it."""

    backbone: Backbone
    images: RandomImages
    cache: PatchCache
    encoded: Tensor  # (B, d_e)
    classes: Tensor  # (B,)
    steps: int = 1

    def __len__(self) -> int:
        return self.steps * len(self.classes)

    @property
    def labels(self) -> Tensor:
        """Of all images."""
        return self.classes.repeat(self.steps)

    def features(self) -> Tensor:
        """``(steps · B, d_e)``."""
        return self.encoded.repeat(self.steps, 1)

    def patches(self, indices: Tensor) -> Tensor:
        """Read from disk."""
        return self.cache.rows(self.backbone, self.images, (indices % len(self.classes)).tolist())


@dataclass
class Task:
    """A method and a client's task."""

    method: Method
    payload: Tensors
    names: tuple[str, ...]
    training: TrainingSpec
    pixels: Tensor
    kept: KeptSplit

    def context(self, split: PlainSplit | KeptSplit, rate: float, backbone: Any) -> ClientContext:
        """What the method is handed."""
        training = self.training.model_copy(update={"learning_rate": rate})
        return client_context(backbone, self.names, split, training=training)  # type: ignore[arg-type]


def make_task(backbone: Backbone, name: str, classes: int, batch: int, folder: Path) -> Task:
    """Random images and labels, and the method's own start; what it takes from others is random too."""
    draws, method = torch.Generator().manual_seed(0), make_method({"name": name, **OPTIONS[name]})
    images = RandomImages(batch, backbone.image_size[0], draws)
    pixels = torch.stack([backbone.preprocess(images.image(index)) for index in range(batch)])
    names, cache = class_names(classes, backbone), PatchCache(folder)
    if method.needs.patch_tokens:
        cache.fill(backbone, images, range(batch))
    labels = torch.randint(classes, (batch,), generator=draws)
    kept = KeptSplit(backbone, images, cache, backbone.encode_images(pixels), labels)
    training, state = started(method, backbone, names, batch)
    start = next(iter(state.values()))
    others = {"experts": torch.randn(EXPERTS, *start.shape, generator=draws) * 0.02, "message": start}
    payload = {one.name: (state | others)[one.name] for one in method.phases(1, 1)[0].down}
    return Task(method, payload, names, training, pixels, kept)


def plain_step(task: Task, backbone: Backbone) -> Step:
    """One step with nothing kept. Which texts are constant is found out anew, as each plain backbone is another one."""
    split = PlainSplit(backbone, task.pixels, task.kept.classes)
    context = task.context(split, RATE_OF_COMPARISON, PlainBackbone(backbone))
    began = time.process_time()
    result = task.method.train(context, task.payload, {})
    return Step(time.process_time() - began, result.update | result.private)


def our_steps(task: Task, backbone: Backbone, steps: int, rate: float) -> Step:
    """The method's own training of ``steps`` steps; seconds of one."""
    kept = task.kept
    split = KeptSplit(kept.backbone, kept.images, kept.cache, kept.encoded, kept.classes, steps)
    context = task.context(split, rate, backbone)
    began = time.process_time()
    result = task.method.train(context, task.payload, {})
    return Step((time.process_time() - began) / steps, result.update | result.private)


def start_of(task: Task, backbone: Backbone) -> Tensors:
    """All that is trained, private tensors too, as it is before: after a step of no length."""
    options = OPTIONS[task.method.name] | STILL.get(task.method.name, {})
    still = replace(task, method=make_method({"name": task.method.name, **options}))
    return our_steps(still, backbone, 1, RATE_OF_STANDING).after


def measure(task: Task, backbone: Backbone, repeats: int, steps: int) -> dict[str, Any]:
    """Interleaved: one plain step, then one task of ours."""
    runs: dict[str, list[float]] = {"plain": [], "ours": []}
    rate, deviations = task.training.learning_rate, []
    our_steps(task, backbone, 1, rate)  # warm up: what a client computes once, and the allocator
    start = start_of(task, backbone)
    for _ in range(repeats):
        slow = plain_step(task, backbone)
        runs["plain"].append(slow.seconds)
        quick = our_steps(task, backbone, 1, RATE_OF_COMPARISON)
        deviations.append(largest_deviation(quick, slow, start, WITHOUT_EFFECT))
        runs["ours"].append(our_steps(task, backbone, steps, rate).seconds)
    typical = medians(runs)
    return {
        "method": task.method.name,
        "options": OPTIONS[task.method.name],
        "classes": len(task.names),
        "seconds": typical,
        "runs": runs,
        "speedup": typical["plain"] / typical["ours"],
        "largest_deviation": max(deviations),
        "target": TARGETS.get(task.method.name),
    }


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The table of the results."""
    rows = []
    for one in results:
        times = [in_words(one["seconds"][way]) for way in ("plain", "ours")]
        target = f"≥ {one['target']}" if one["target"] else "-"
        rows.append([f"`{one['method']}`", str(one["classes"]), *times, f"**{one['speedup']:.1f}**", target])
    return table(["method", "classes", "plain step", "our step", "times faster", "target"], rows)


def main() -> None:
    """Measure the methods one after another, and print a table."""
    command = parser(__doc__)
    command.add_argument("--model", default="ViT-B-16", help="any open_clip model (default: %(default)s)")
    command.add_argument("--methods", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    command.add_argument("--classes", type=int, default=10)
    command.add_argument("--batch", type=int, default=32)
    command.add_argument("--repeats", type=int, default=2)
    command.add_argument("--steps", type=int, default=5, help="steps of a task of ours")
    given = command.parse_args()
    torch.set_num_threads(1)
    backbone, results = random_backbone(given.model), []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.methods:
            task = make_task(backbone, name, given.classes, given.batch, Path(folder))
            results.append(measure(task, backbone, given.repeats, given.steps))
            print(f"{name}: {results[-1]['speedup']:.1f} times faster", file=sys.stderr)
    print(markdown(results))
    about = provenance("text_steps", given.batch, 16) | {"model": given.model}
    write(given.json, {"provenance": about, "results": results})


if __name__ == "__main__":
    main()
