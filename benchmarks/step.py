"""CPU time of one local training step of PromptFL, without and with each optimisation of `shared/clip`.

    python -m benchmarks.step --json step.json
    python -m benchmarks.step --models ViT-B-16 --operations --protected

Every variant calls the method's own `train`. They differ in the backbone and the images that the method is given:

  plain      one step; the frozen image tower encodes the batch, and the prompts pass the text tower over all positions
             of all classes, constant texts included
  cached     plain without the time of the image tower
  short      image features are cached, and no text position after the end token is computed
  ours       image features are cached, and `[SOS] ctx` is computed once for all classes

The last two are averaged over a task of several steps. One step from the same start must change the context in the same
way; otherwise the run ends. With more than 100 classes the plain text pass would not fit into memory: it runs in chunks
of 100 under activation checkpointing. The additional forward pass is not timed, so that the plain variant does not pay
for the chunks.

With --operations nothing is timed: a JSON line for each method and number of classes says how many operations that are
not views a step has, on a CPU, on a GPU's path (forced on the CPU) and with every position of every text passing
open_clip's blocks. The text tower has the model's blocks and is narrow.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import in_words, machine, medians, parser, table, write
from promptfed.shared.clip import Backbone, BackboneError, ClassPrompts, load_backbone, shape_of
from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, Method, ServerContext
from promptfed.shared.methods.core.objectives import Protection
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import TEMPLATE, BackboneSpec, TrainingSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.replay import Operations

WIDTH = 64
WAYS = {"cpu": "prefix", "gpu": "dense", "plain": "plain"}  # text passes; plain: all positions, open_clip's blocks
NO_WORK = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::lift_fresh")
CHUNK = 100
RATE_OF_COMPARISON = 1000.0  # one step changes weights by the gradient times this: float32 then holds all its digits
RATE_OF_STANDING = 1e-30
MOST_DEVIATION = 1e-4
METHODS = ("promptfl", "fedpgp")  # the second one's operations alone are counted
COLUMNS = {"plain": "plain", "cached": "+ feature cache", "short": "+ short text", "ours": "+ shared prefix"}
FAST = ("short", "ours")
TextPath = Literal["plain", "short"]


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


def narrow(model: str) -> Backbone:
    """A backbone with the blocks of ``model``'s towers, but narrow: the operations are the same, and soon done.

    Embedded ones are narrow.
    """
    if model in EMBEDDED:
        return random_backbone(model)
    import open_clip

    config = open_clip.get_model_config(model)
    if config is None or "layers" not in config["text_cfg"]:
        raise SystemExit(f"open_clip has no text tower of its own in {model!r}: name another model, such as ViT-B-16")
    vision = {"image_size": 32, "layers": config["vision_cfg"]["layers"], "width": WIDTH, "patch_size": 16}
    name = f"narrow-{model}"
    with tempfile.TemporaryDirectory() as folder:
        narrow = config | {"embed_dim": WIDTH, "vision_cfg": vision, "text_cfg": config["text_cfg"] | {"width": WIDTH}}
        (Path(folder) / f"{name}.json").write_text(json.dumps(narrow))
        open_clip.add_model_config(folder)
        return load_backbone(name, "random")


def works(operation: Any) -> bool:
    """Whether an operation computes or copies: views and new memory do neither."""
    schema = operation._schema
    viewed = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    return schema.name.startswith("aten::") and not viewed and not schema.name.startswith(NO_WORK)


def of_a_step(backbone: Backbone, way: str, steps: Callable[[int], object]) -> int:
    """The operations, without views, by which two ``steps`` are more than one; the optimizer's among them."""
    backbone.text_path = WAYS[way]  # type: ignore[assignment]
    try:
        steps(1)  # what is made once
        found = []
        for count in (1, 2):
            with Operations(backbone.device) as passed:
                steps(count)
            found.append(sum(works(noted[0]) for noted in passed.noted))
    finally:
        del backbone.text_path
    return found[1] - found[0]


class SlowBackbone:
    """A backbone that encodes prompts on the given text path and caches nothing.

    ``untimed``: CPU seconds of forward passes that activation checkpointing repeats in the backward pass.
    """

    def __init__(self, backbone: Backbone, path: TextPath):
        self._backbone, self._path = backbone, path
        self.untimed = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)

    def encode_prompts(self, context: Tensor, prompts: ClassPrompts, *, normalize: bool = True) -> Tensor:
        """``(C, d_e)`` of a context ``(m, d_t)``, of length 1 unless ``normalize`` is False."""
        encode = partial(self._backbone.encode_prompts, path=self._path, normalize=normalize)
        if self._path != "plain" or len(prompts) <= CHUNK:
            return encode(context, prompts)
        began = time.process_time()
        names, length = prompts.names, prompts.context_length
        chunks = [self._backbone.class_prompts(names[i : i + CHUNK], length) for i in range(0, len(names), CHUNK)]
        features = torch.cat([checkpoint(encode, context, chunk, use_reentrant=False) for chunk in chunks])
        self.untimed += time.process_time() - began
        return features


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

    def train(self, split: KeptBatch, rate: float, backbone: Any, protection: Protection | None = None) -> Step:
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
        backbone = SlowBackbone(kept.backbone, "plain")
        split = PlainBatch(kept.backbone, kept.pixels, kept.classes, kept.encoded)
        step = self.train(split, RATE_OF_COMPARISON, backbone)
        return replace(step, seconds=step.seconds - backbone.untimed, tower_seconds=split.tower_seconds)

    def steps(self, way: str, count: int, rate: float) -> Step:
        """``count`` steps on cached features by ``short``, ``ours`` or ``protected``; its seconds are of one step."""
        protection = None
        if way == "protected":
            size = len(self.kept.classes)
            protection = Protection(0.3, 1.0, size, size, count, SeededNoise(1).stream())
        backbone = SlowBackbone(self.kept.backbone, "short") if way == "short" else self.kept.backbone
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


def count_operations(model: str, name: str, classes: int, batch: int, protected: bool) -> dict[str, Any]:
    """The operations of a step, by the way (`WAYS`) that prompts pass the text tower."""
    backbone = narrow(model)
    task = make_task(backbone, name, classes, batch)
    steps = partial(task.steps, "protected" if protected else "ours", rate=RATE_OF_STANDING)
    counts = {way: of_a_step(backbone, way, steps) for way in WAYS}
    return {"model": model, "method": name, "protected": protected, "classes": classes, "operations": counts}


def random_backbone(model: str) -> Backbone:
    """``model`` with random weights, whose values do not matter to a clock."""
    try:
        return load_backbone(model, "random")
    except BackboneError as error:
        raise SystemExit(str(error)) from error


def main() -> None:
    """Measure every backbone and number of classes, and print a table; or count operations."""
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", default=["ViT-B-16", "promptfed-tiny"], help="of open_clip")
    command.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    command.add_argument("--batch", type=int, default=32)
    command.add_argument("--repeats", type=int, default=3, help="plain steps; a third of it above 100 classes")
    command.add_argument("--steps", type=int, default=5, help="steps of a task of a fast variant")
    command.add_argument("--operations", action="store_true", help="count the operations of a step instead")
    command.add_argument("--protected", action="store_true", help="with --operations: also of promptfl with DP-SGD")
    options = command.parse_args()
    torch.set_num_threads(1)
    if options.operations:
        for model, name, classes in product(options.models, METHODS, options.classes):
            for protected in (False, True)[: 1 + (options.protected and name == "promptfl")]:
                print(json.dumps(count_operations(model, name, classes, options.batch, protected)), flush=True)
        return
    results = []
    for model in options.models:
        backbone = random_backbone(model)
        for classes in options.classes:
            repeats = max(1, options.repeats // 3) if classes > CHUNK else options.repeats
            task = make_task(backbone, "promptfl", classes, options.batch)
            results.append({"model": model} | measure(task, repeats, options.steps))
            print(f"{model}, {classes} classes: {results[-1]['speedup']:.1f} times faster", file=sys.stderr)
    print(markdown(results))
    about = {"open_clip": version("open_clip_torch"), "batch": options.batch}
    write(options.json, {"provenance": machine() | about, "results": results})


if __name__ == "__main__":
    main()
