"""CPU time of one local training step of PromptFL, without and with each optimisation of `shared/clip`.

    python -m benchmarks.step --json step.json

Every variant calls the method's own `train`. They differ in the backbone and the images that the method is given:

  plain      one step; the frozen image tower encodes the batch, and the prompts pass the text tower over all positions
             of all classes, constant texts included
  cached     plain without the time of the image tower
  short      image features are cached, and no text position after the end token is computed
  ours       image features are cached, and `[SOS] ctx` is computed once for all classes

The last two are averaged over a task of several steps. One step from the same start must change the context in the same
way; otherwise the run ends.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import in_words, machine, medians, parser, table, write
from promptfed.shared.clip import Backbone, BackboneError, load_backbone, shape_of
from promptfed.shared.clip.towers.text import Path as TextPath
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, Method, Protection, ServerContext
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneSpec, TrainingSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors import Tensors


@dataclass
class KeptBatch:
    """A training split that repeats one batch ``steps`` times, whose features are kept."""

    backbone: Backbone
    pixels: Tensor  # (B, 3, H, W)
    classes: Tensor  # (B,)
    encoded: Tensor  # (B, d_e)
    steps: int = 1

    @property
    def labels(self) -> Tensor:
        return self.classes.repeat(self.steps)

    def __len__(self) -> int:
        return self.steps * len(self.classes)

    def features(self) -> Tensor:
        return self.encoded.repeat(self.steps, 1)

    def raw_features(self) -> Tensor:
        """The same as `features`: the time of a step does not depend on the length of the features."""
        return self.features()

    def images(self, indices: Tensor) -> Tensor:
        return self.pixels[indices % len(self.pixels)]

    def patches(self, indices: Tensor) -> Tensor:
        raise NotImplementedError("no method of this benchmark reads patches")


@dataclass
class PlainBatch(KeptBatch):
    """The same batch with only the pixels kept. ``tower_seconds``: CPU seconds of the image tower, which encodes it."""

    tower_seconds: float = 0.0

    @cached_property
    def _features(self) -> Tensor:
        began = time.process_time()
        features = self.backbone.encode_images(self.pixels)
        self.tower_seconds += time.process_time() - began
        return features

    def features(self) -> Tensor:
        return self._features


TEMPLATE = "a photo of a {}."
RATE_OF_COMPARISON = 1000.0  # one step changes weights by the gradient times this: float32 then holds all its digits
MOST_DEVIATION = 1e-4
COLUMNS = {"plain": "plain", "cached": "+ feature cache", "short": "+ short text", "ours": "+ shared prefix"}
FAST = ("short", "ours")


def on_path(backbone: Backbone, path: TextPath) -> Backbone:
    """The same backbone, whose prompts pass the text tower on ``path``."""
    forced = copy(backbone)
    forced.text_path = path
    return forced


@dataclass
class Step:
    """CPU seconds of a step, ``tower_seconds`` of them in the image tower, and all trained tensors after it."""

    seconds: float
    after: Tensors
    tower_seconds: float = 0.0


@dataclass
class Task:
    """A method with the payload, the class names and the images that its client gets."""

    method: Method
    payload: Tensors
    names: tuple[str, ...]
    training: TrainingSpec
    kept: KeptBatch

    def train(self, split: KeptBatch, rate: float, backbone: Backbone, protection: Protection | None = None) -> Step:
        """Call the method's ``train`` on ``split`` with learning rate ``rate``, from the start of the payload."""
        training = self.training.model_copy(update={"learning_rate": rate})
        terms = TrainingTerms(
            method={"name": self.method.name},
            training=training,
            backbone=BackboneSpec(),
            class_names=None,
            template=TEMPLATE,
            rounds=1,
            seed=0,
        )
        context = ClientContext(
            backbone=backbone,
            terms=terms,
            class_names=self.names,
            template=TEMPLATE,
            client="benchmark",
            domain=None,
            peers=(),
            round=1,
            phase="train",
            train=split,
            protection=protection,
        )
        began = time.process_time()
        result = self.method.train(context, self.payload, {})
        return Step(time.process_time() - began, result.update | result.private)

    def plain_step(self) -> Step:
        """One step without any cache."""
        kept = self.kept
        split = PlainBatch(kept.backbone, kept.pixels, kept.classes, kept.encoded)
        step = self.train(split, RATE_OF_COMPARISON, on_path(kept.backbone, "plain"))
        return replace(step, tower_seconds=split.tower_seconds)

    def steps(self, way: str, count: int, rate: float) -> Step:
        """``count`` steps on cached features by ``short``, ``ours`` or ``protected``; its seconds are of one step."""
        protection = None
        if way == "protected":
            size = len(self.kept.classes)
            protection = Protection(0.3, 1.0, size, size, count, SeededNoise(1).stream())
        backbone = on_path(self.kept.backbone, "short") if way == "short" else self.kept.backbone
        kept = self.kept if protection is not None else replace(self.kept, steps=count)  # its epochs are the steps
        step = self.train(kept, rate, backbone, protection)
        return replace(step, seconds=step.seconds / count)


def class_names(count: int, backbone: Backbone) -> tuple[str, ...]:
    """``count`` different names of one to five words in equal shares; each word is one token."""
    from open_clip import IMAGENET_CLASSNAMES

    words = sorted({name.lower() for name in IMAGENET_CLASSNAMES if name.isalpha()})
    words = [word for word in words if len(backbone.embed_words(word)) == 1]
    draw = random.Random(0)
    names: list[str] = []
    while len(names) < count:
        name = " ".join(draw.sample(words, len(names) % 5 + 1))
        if name not in names:
            names.append(name)
    return tuple(names)


def make_task(backbone: Backbone, name: str, classes: int, batch: int) -> Task:
    """A task with random images and labels. The payload is the initial state."""
    draws, method = torch.Generator().manual_seed(0), make_method({"name": name})
    names = class_names(classes, backbone)
    pixels = torch.randn(batch, 3, *backbone.image_size, generator=draws)
    labels = torch.randint(classes, (batch,), generator=draws)
    kept = KeptBatch(backbone, pixels, labels, backbone.encode_images(pixels))
    defaults = {key: value for key, value in method.defaults.get("training", {}).items() if key != "schedule"}
    training = TrainingSpec(**defaults | {"batch_size": batch, "epochs": 1})
    server = ServerContext(training, shape_of(backbone), names, (), 0, 1)
    state = method.initial_state(server, initial_draws(0))
    payload = {spec.name: state[spec.name] for spec in method.phases(1, 1)[0].down}
    return Task(method, payload, names, training, kept)


def largest_deviation(step: Step, wanted: Step, start: Tensors) -> float:
    """Largest difference between two steps from ``start``, relative to the largest change of the same tensor.

    SystemExit for a difference of more than `MOST_DEVIATION`.
    """
    worst = 0.0
    for name, value in wanted.after.items():
        changed = float((value - start[name]).abs().max())
        worst = max(worst, float((step.after[name] - value).abs().max()) / changed)
    if worst > MOST_DEVIATION:
        raise SystemExit(f"The variants differ: a tensor's change is off by {worst:.1e} of its largest entry.")
    return worst


def measure(task: Task, repeats: int, steps: int) -> dict[str, Any]:
    """Measure all variants of a task in turn: after each plain step, ``steps`` steps of each fast variant."""
    runs: dict[str, list[float]] = {way: [] for way in COLUMNS}
    rate, deviations = task.training.learning_rate, []
    for way in FAST:
        task.steps(way, 1, rate)  # warm up: what a client computes once, and the allocator
    for _ in range(repeats):
        plain = task.plain_step()
        runs["plain"].append(plain.seconds)
        runs["cached"].append(plain.seconds - plain.tower_seconds)
        for way in FAST:
            deviations.append(largest_deviation(task.steps(way, 1, RATE_OF_COMPARISON), plain, task.payload))
            runs[way].append(task.steps(way, steps, rate).seconds)
    typical = medians(runs)
    return {
        "classes": len(task.names),
        "seconds": typical,
        "runs": runs,
        "speedup": typical["plain"] / typical["ours"],
        "largest_deviation": max(deviations),
    }


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The table of the results. The factor in brackets is over the column to the left."""
    rows = []
    for result in results:
        seconds, cells, before = result["seconds"], [], 0.0
        for way in COLUMNS:
            cells.append(in_words(seconds[way]) + (f" (×{before / seconds[way]:.1f})" if before else ""))
            before = seconds[way]
        rows.append([result["model"], str(result["classes"]), *cells, f"**{result['speedup']:.1f}**"])
    return table(["backbone", "classes", *COLUMNS.values(), "times faster"], rows)


def random_backbone(model: str) -> Backbone:
    """``model`` with random weights, whose values do not matter to a clock."""
    try:
        return load_backbone(model, "random")
    except BackboneError as error:
        raise SystemExit(str(error)) from error


def main() -> None:
    """Measure every backbone and number of classes, and print a table."""
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", default=["ViT-B-16", "promptfed-tiny"], help="of open_clip")
    command.add_argument("--classes", type=int, nargs="+", default=[10, 100])
    command.add_argument("--batch", type=int, default=32)
    command.add_argument("--repeats", type=int, default=3, help="plain steps")
    command.add_argument("--steps", type=int, default=5, help="steps of a task of a fast variant")
    options = command.parse_args()
    torch.set_num_threads(1)
    results = []
    for model in options.models:
        backbone = random_backbone(model)
        for classes in options.classes:
            task = make_task(backbone, "promptfl", classes, options.batch)
            results.append({"model": model} | measure(task, options.repeats, options.steps))
            print(f"{model}, {classes} classes: {results[-1]['speedup']:.1f} times faster", file=sys.stderr)
    print(markdown(results))
    about = {"open_clip": version("open_clip_torch"), "batch": options.batch}
    write(options.json, {"provenance": machine() | about, "results": results})


if __name__ == "__main__":
    main()
