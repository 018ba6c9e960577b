"""CPU time of one local training step, without and with each optimisation of `shared/clip`.

    python -m benchmarks.step --json step.json
    python -m benchmarks.step --models ViT-B-16 --classes 10 --methods all
    python -m benchmarks.step --models promptfed-tiny --classes 10 --protected
    python -m benchmarks.step --models ViT-B-16 --methods promptfl fedpgp --operations

Every variant calls the method's own `train`. They differ in the backbone and the images that the method is given:

  plain      one step; the frozen image tower encodes the batch, and each prompt passes the text tower separately, over
             all positions of all classes, constant texts included
  cached     plain without the time of the image tower
  short      image features are cached, and no text position after the end token is computed (promptfl only)
  ours       image features are cached (patch features on disk, in 16 bits), `[SOS] ctx` is computed once for all
             classes, and prompts pass the text tower together
  protected  ours with DP-SGD (promptfl only, with --protected)

The last three are averaged over a task of several steps. Except for `protected`, one step from the same start must
change every tensor in the same way; otherwise the run ends. With more than 100 classes the plain text pass would not
fit into memory: it runs in chunks of 100 under activation checkpointing. The additional forward pass is not timed, so
that the plain variant does not pay for the chunks.

With --operations nothing is timed: a JSON line for each method and number of classes says how many operations that are
not views a step has, on a CPU, on a GPU's path (forced on the CPU) and with every position of every text passing
open_clip's blocks. The text tower has the model's blocks and is narrow.
"""

from __future__ import annotations

import copy
import hashlib
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
from typing import Any, Literal, cast

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import in_words, machine, medians, parser, table, write
from promptfed.shared.clip import Backbone, BackboneError, ClassPrompts, load_backbone, shape_of
from promptfed.shared.clip.caches import PatchCache
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, Method, Protection, ServerContext
from promptfed.shared.methods.core.training import make_optimizer
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneSpec, TrainingSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.replay import Operations


class RandomImages:
    """A split of uint8 RGB images (count, side, side, 3), with the interface of a data source."""

    def __init__(self, count: int, side: int, draws: torch.Generator):
        self._pixels = torch.randint(256, (count, side, side, 3), dtype=torch.uint8, generator=draws).numpy()

    def __len__(self) -> int:
        return len(self._pixels)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index])

    def digest(self, index: int) -> str:
        return hashlib.sha256(self._pixels[index].tobytes()).hexdigest()


@dataclass
class KeptBatch:
    """A training split that repeats one batch ``steps`` times. Features are kept in memory, patch features on disk."""

    backbone: Backbone
    source: RandomImages
    cache: PatchCache
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
        return self.cache.rows(self.backbone, self.source, (indices % len(self.classes)).tolist())


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

    @cached_property
    def _patches(self) -> Tensor:
        began = time.process_time()
        patches = self.backbone.encode_patches(self.pixels).half().float()
        self.tower_seconds += time.process_time() - began
        return patches

    def features(self) -> Tensor:
        return self._features

    def patches(self, indices: Tensor) -> Tensor:
        return self._patches[indices]


WIDTH = 64
WAYS = {
    "cpu": "prefix",
    "gpu": "dense",
    "plain": "plain",
}  # text passes; plain: all positions, open_clip's blocks
NO_WORK = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::lift_fresh")


def narrow(model: str, images: bool = False) -> Backbone:
    """A backbone with the blocks of ``model``'s text tower, but narrow: the operations are the same, and soon done.

    ``images``: also those of its image tower.
    """
    import open_clip

    config = open_clip.get_model_config(model)
    if config is None or "layers" not in config["text_cfg"]:
        raise SystemExit(f"open_clip has no text tower of its own in {model!r}: name another model, such as ViT-B-16")
    layers = config["vision_cfg"]["layers"] if images else 1
    vision = {"image_size": 32, "layers": layers, "width": WIDTH, "patch_size": 16}
    name = f"narrow-{layers}-{model}"
    with tempfile.TemporaryDirectory() as folder:
        own = config | {"embed_dim": WIDTH, "vision_cfg": vision, "text_cfg": config["text_cfg"] | {"width": WIDTH}}
        (Path(folder) / f"{name}.json").write_text(json.dumps(own))
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


def open_clip_steps(task: Any, count: int) -> None:
    """Steps with open_clip's own towers, the visual and text prompts of ``task``, its batch and its optimizer.

    Without prompts all weights of the image tower are trained.
    """
    backbone, images, labels = task.kept.backbone, task.kept.pixels, task.kept.classes
    visual = copy.deepcopy(backbone.model.visual)
    prompts = {name: start.clone().requires_grad_() for name, start in task.payload.items() if name.endswith("prompts")}
    seen, read = prompts.get("visual_prompts", []), prompts.get("text_prompts")
    leaves = list(prompts.values()) if prompts else list(visual.requires_grad_().parameters())
    optimizer, text = make_optimizer(leaves, task.training, 1e-30), backbone.encode_text(task.names)
    for _ in range(count):
        optimizer.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(not prompts):
            rows = visual._embeds(images)
        own = rows.shape[1]
        for number, block in enumerate(visual.transformer.resblocks):
            if number < len(seen):
                rows = torch.cat([rows[:, :own], seen[number].expand(len(rows), -1, -1)], dim=1)
            rows = block(rows)
        features = F.normalize(visual._pool(rows[:, :own])[0] @ visual.proj, dim=-1)
        if read is not None:
            classes = backbone.class_prompts(task.names, read.shape[1])
            text = backbone.encode_prompts(read[0], classes, deep=read[1:] if len(read) > 1 else None, path="plain")
        torch.autograd.backward(F.cross_entropy(backbone.logit_scale * features @ text.T, labels))
        optimizer.step()


TEMPLATE = "a photo of a {}."
CHUNK = 100
RATE_OF_COMPARISON = 1000.0  # one step changes weights by the gradient times this: float32 then holds all its digits
RATE_OF_STANDING = 1e-30
MOST_DEVIATION = 1e-4
EXPERTS = 9  # other clients' contexts, pFedMoAP's default
# Options with which a step is that of the method's paper.
OPTIONS: dict[str, dict[str, Any]] = {
    "promptfl": {},
    "fedpgp": {},
    "fedtpg": {},
    "fedotp": {},
    "promptfolio": {},
    "pfedmoap": {"gate_learning_rate": 1000.0},
    "promptfl_per": {},
    "pfedprompt": {},
    "promptfl_amp": {},
}
# Methods that run the image tower in each step: their operations are counted beside those of open_clip's own towers.
IMAGES = ("fedvpt", "fedvpt_deep", "plan", "fedavg")
STILL = {"pfedmoap": {"gate_learning_rate": 1e-30}}  # together with RATE_OF_STANDING: a step that changes nothing
# These biases are added to all keys, experts or classes equally, so that no softmax depends on them.
WITHOUT_EFFECT = ("key.bias", "value.bias", "output.bias")
TARGETS = {("promptfl", 10): 30, ("promptfl", 100): 20, ("promptfl", 1000): 12, ("fedotp", 10): 10}  # ViT-B/16
COLUMNS = {"plain": "plain", "cached": "+ feature cache", "short": "+ short text", "ours": "ours"}
TextPath = Literal["plain", "short"]


class SlowBackbone:
    """A backbone that encodes each prompt separately on the given text path and caches nothing.

    ``untimed``: CPU seconds of forward passes that activation checkpointing repeats in the backward pass.
    """

    def __init__(self, backbone: Backbone, path: TextPath):
        self._backbone, self._path = backbone, path
        self.untimed = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)

    def encode_prompts(self, context: Tensor, prompts: ClassPrompts, *, normalize: bool = True) -> Tensor:
        """``(..., C, d_e)`` of contexts ``(..., m, d_t)``, of length 1 unless ``normalize`` is False."""
        trained = torch.is_grad_enabled()
        with torch.enable_grad():  # without gradients a backbone answers from its cache
            contexts = context.reshape(-1, *context.shape[-2:])
            encoded = [self._encode(row if trained else row.requires_grad_(), prompts, normalize) for row in contexts]
        features = torch.stack(encoded).reshape(*context.shape[:-2], *encoded[0].shape)
        return features if trained else features.detach()

    def _encode(self, context: Tensor, prompts: ClassPrompts, normalize: bool) -> Tensor:
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
        split = PlainBatch(kept.backbone, kept.source, kept.cache, kept.pixels, kept.classes, kept.encoded)
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

    def start(self) -> Tensors:
        """All trained tensors, private ones too, before the first step: those after a step that changes nothing."""
        options = OPTIONS[self.method.name] | STILL.get(self.method.name, {})
        still = replace(self, method=make_method({"name": self.method.name, **options}))
        return still.steps("ours", 1, RATE_OF_STANDING).after


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


def make_task(backbone: Backbone, name: str, classes: int, batch: int, folder: Path) -> Task:
    """A task with random images and labels. The payload is the initial state, with random tensors of other clients."""
    draws, method = torch.Generator().manual_seed(0), make_method({"name": name, **OPTIONS.get(name, {})})
    source, names = RandomImages(batch, backbone.image_size[0], draws), class_names(classes, backbone)
    pixels = torch.stack([backbone.preprocess(source.image(index)) for index in range(batch)])
    cache = PatchCache(folder)
    if method.needs.patch_tokens:
        cache.fill(backbone, source, range(batch))
    labels = torch.randint(classes, (batch,), generator=draws)
    kept = KeptBatch(backbone, source, cache, pixels, labels, backbone.encode_images(pixels))
    defaults = {key: value for key, value in method.defaults.get("training", {}).items() if key != "schedule"}
    training = TrainingSpec(**defaults | {"batch_size": batch, "epochs": 1})
    server = ServerContext(training, shape_of(backbone), names, (), 0, 1)
    state = method.initial_state(server, initial_draws(0))
    start = next(iter(state.values()))
    others = {"experts": torch.randn(EXPERTS, *start.shape, generator=draws) * 0.02, "message": start}
    payload = {spec.name: (state | others)[spec.name] for spec in method.phases(1, 1)[0].down}
    return Task(method, payload, names, training, kept)


def largest_deviation(step: Step, wanted: Step, start: Tensors) -> float:
    """Largest difference between two steps from ``start``, relative to the largest change of the same tensor.

    Tensors whose names end with one of `WITHOUT_EFFECT` have gradients of rounding errors only. Their differences are
    relative to the largest change of all tensors. SystemExit for a difference of more than `MOST_DEVIATION`.
    """
    changed = {name: float((value - start[name]).abs().max()) for name, value in wanted.after.items()}
    largest, worst = max(changed.values()), 0.0
    for name, value in wanted.after.items():
        scale = largest if name.endswith(WITHOUT_EFFECT) else changed[name]
        worst = max(worst, float((step.after[name] - value).abs().max()) / scale)
    if worst > MOST_DEVIATION:
        raise SystemExit(f"The variants differ: a tensor's change is off by {worst:.1e} of its largest entry.")
    return worst


def measure(task: Task, repeats: int, steps: int, protected: bool = False) -> dict[str, Any]:
    """Measure all variants of a task in turn: after each plain step, ``steps`` steps of each fast variant."""
    promptfl = task.method.name == "promptfl"
    fast = [*(["short"] if promptfl else []), "ours"]
    runs: dict[str, list[float]] = {way: [] for way in ("plain", "cached", *fast)}
    rate, deviations, start = task.training.learning_rate, [], task.start()
    for way in fast:
        task.steps(way, 1, rate)  # warm up: what a client computes once, and the allocator
    for _ in range(repeats):
        plain = task.plain_step()
        runs["plain"].append(plain.seconds)
        runs["cached"].append(plain.seconds - plain.tower_seconds)
        for way in fast:
            deviations.append(largest_deviation(task.steps(way, 1, RATE_OF_COMPARISON), plain, start))
            runs[way].append(task.steps(way, steps, rate).seconds)
        if protected and promptfl:
            runs.setdefault("protected", []).append(task.steps("protected", steps, rate).seconds)
    typical = medians(runs)
    return {
        "method": task.method.name,
        "options": OPTIONS[task.method.name],
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
            if way not in seconds:
                cells.append("")
                continue
            cells.append(in_words(seconds[way]) + (f" (×{before / seconds[way]:.1f})" if before else ""))
            before = seconds[way]
        target = TARGETS.get((result["method"], result["classes"])) if result["model"] == "ViT-B-16" else None
        cells += [f"**{result['speedup']:.1f}**", f"≥ {target}" if target else "–"]
        cells.append(in_words(seconds["protected"]) if "protected" in seconds else "")
        rows.append([result["model"], f"`{result['method']}`", str(result["classes"]), *cells])
    columns = ["backbone", "method", "classes", *COLUMNS.values(), "times faster", "target", "protected"]
    return table(columns, rows, texts=2)


def count_operations(model: str, name: str, classes: int, batch: int, protected: bool) -> dict[str, Any]:
    """The operations of a step, by the way (`WAYS`) that prompts pass the text tower.

    Of `IMAGES` also those of a loop over open_clip's own towers.
    """
    backbone = narrow(model, name in IMAGES)
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(backbone, name, classes, batch, Path(folder))
        steps = partial(task.steps, "protected" if protected else "ours", rate=RATE_OF_STANDING)
        counts = {way: of_a_step(backbone, way, steps) for way in WAYS}
        if name in IMAGES:
            counts["open_clip"] = of_a_step(backbone, "plain", lambda count: open_clip_steps(task, count))
    return {"model": model, "method": name, "protected": protected, "classes": classes, "operations": counts}


def random_backbone(model: str) -> Backbone:
    """``model`` with random weights, whose values do not matter to a clock."""
    try:
        return load_backbone(model, "random")
    except BackboneError as error:
        raise SystemExit(str(error)) from error


def main() -> None:
    """Measure every backbone, method and number of classes, and print a table."""
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", default=["ViT-B-16", "promptfed-tiny"], help="of open_clip")
    command.add_argument("--methods", nargs="+", choices=["all", *OPTIONS, *IMAGES], default=["promptfl"])
    command.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    command.add_argument("--batch", type=int, default=32)
    command.add_argument("--repeats", type=int, default=3, help="plain steps; a third of it above 100 classes")
    command.add_argument("--steps", type=int, default=5, help="steps of a task of a fast variant")
    command.add_argument("--protected", action="store_true", help="also promptfl's step with DP-SGD")
    command.add_argument("--operations", action="store_true", help="count the operations of a step instead")
    options = command.parse_args()
    torch.set_num_threads(1)
    every = [*OPTIONS, *IMAGES] if options.operations else list(OPTIONS)
    names = every if "all" in options.methods else cast(list[str], options.methods)
    if not set(names) <= set(every):
        command.error(f"{', '.join(IMAGES)} run the image tower in each step: only their --operations are counted")
    if options.operations:
        for model, name, classes in product(options.models, names, options.classes):
            for protected in (False, True)[: 1 + (options.protected and name == "promptfl")]:
                print(json.dumps(count_operations(model, name, classes, options.batch, protected)), flush=True)
        return
    results = []
    for model in options.models:
        backbone = random_backbone(model)
        for name, classes in ((name, classes) for name in names for classes in options.classes):
            with tempfile.TemporaryDirectory() as folder:
                task = make_task(backbone, name, classes, options.batch, Path(folder))
                repeats = max(1, options.repeats // 3) if classes > CHUNK else options.repeats
                results.append({"model": model} | measure(task, repeats, options.steps, options.protected))
            speedup = results[-1]["speedup"]
            print(f"{model}, {name}, {classes} classes: {speedup:.1f} times faster", file=sys.stderr)
    print(markdown(results))
    about = {"open_clip": version("open_clip_torch"), "batch": options.batch}
    write(options.json, {"provenance": machine() | about, "results": results})


if __name__ == "__main__":
    main()
