"""CPU time of one local training step of promptfl: as released code does it, and with each saving of `shared/clip`.

    python benchmarks/step.py --json step.json

The step: logits of a batch of images against all classes, cross-entropy, gradient with respect to the context
`(m, d_t)`, SGD update. The ways differ in what is computed for it, never in the result; equality of text features and
gradients is asserted on every run.

  plain    frozen image tower on every step, all text positions of all classes
  cached   image features kept on disk, text as above
  short    cached, and no text position after the end token
  prefix   cached, and `[SOS] ctx` computed once for all classes

With more than 100 classes the plain text pass runs in chunks of 100 with summed gradients, since it would not fit into
memory. The softmax needs all text features before the first gradient; they come from a pass that is not timed, so
chunking costs the plain way nothing.
"""

import argparse
import itertools
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from promptfed.shared.clip import Backbone, BackboneError, ClassPrompts, load_backbone

CHUNK = 100
WAYS = ("plain", "cached", "short", "prefix")
TARGETS = {10: 30, 100: 20, 1000: 12}


@dataclass
class Task:
    """One training situation: a batch of images with labels, class names, and a context to train."""

    backbone: Backbone
    prompts: list[ClassPrompts]  # all classes, or chunks of them for the plain way
    whole: ClassPrompts
    images: Tensor  # (B, 3, H, W)
    features: Tensor  # (B, d_e)
    labels: Tensor  # (B,)
    start: Tensor  # (m, d_t)


@dataclass
class Step:
    """What one step took and gave. `text`: without the image tower."""

    seconds: float
    text: float
    features: Tensor
    gradient: Tensor


def class_names(count: int, tokens_of: Any) -> list[str]:
    """`count` different names of one to five tokens in equal shares, of words that are one token each."""
    from open_clip import IMAGENET_CLASSNAMES

    words = sorted({name.lower() for name in IMAGENET_CLASSNAMES if name.isalpha() and tokens_of(name) == 1})
    draw = random.Random(0)
    names: list[str] = []
    while len(names) < count:
        name = " ".join(draw.sample(words, len(names) % 5 + 1))
        if name not in names:
            names.append(name)
    return names


def make_task(backbone: Backbone, classes: int, batch: int, m: int) -> Task:
    generator = torch.Generator().manual_seed(0)
    names = class_names(classes, lambda name: len(backbone.embed_words(name)))
    images = torch.randn(batch, 3, *backbone.image_size, generator=generator)
    return Task(
        backbone=backbone,
        prompts=[backbone.class_prompts(names[i : i + CHUNK], m) for i in range(0, classes, CHUNK)],
        whole=backbone.class_prompts(names, m),
        images=images,
        features=backbone.encode_images(images),
        labels=torch.randint(classes, (batch,), generator=generator),
        start=torch.randn(m, backbone.d_t, generator=generator) * 0.02,
    )


def loss_of(task: Task, images: Tensor, texts: Tensor) -> Tensor:
    return F.cross_entropy(task.backbone.logit_scale * images @ texts.T, task.labels)


def fresh(task: Task) -> tuple[Tensor, torch.optim.SGD]:
    context = task.start.clone().requires_grad_()
    return context, torch.optim.SGD([context], lr=0.002, momentum=0.9, weight_decay=5e-4)


def plain_step(task: Task) -> Step:
    """The image tower and every text position. Above `CHUNK` classes chunk by chunk, see the module's docstring."""
    context, optimizer = fresh(task)
    began = time.process_time()
    images = task.backbone.encode_images(task.images)
    tower = time.process_time() - began
    if len(task.prompts) > 1:
        texts = torch.cat([encode_plain(task, context.detach(), part) for part in task.prompts]).requires_grad_()
    began = time.process_time()
    if len(task.prompts) > 1:
        (upstream,) = torch.autograd.grad(loss_of(task, images, texts), texts)
        features = []
        for part, gradient in zip(task.prompts, torch.split(upstream, CHUNK), strict=True):
            features.append(encode_plain(task, context, part))
            torch.autograd.backward(features[-1], gradient)
            features[-1] = features[-1].detach()
        texts = torch.cat(features)
    else:
        texts = encode_plain(task, context, task.whole)
        torch.autograd.backward(loss_of(task, images, texts))
    optimizer.step()
    text = time.process_time() - began
    assert context.grad is not None
    return Step(tower + text, text, texts.detach(), context.grad)


def encode_plain(task: Task, context: Tensor, prompts: ClassPrompts) -> Tensor:
    return task.backbone.encode_prompts(context, prompts, path="plain")


def cached_step(task: Task, path: Any) -> Step:
    """On kept image features, by a fast text path."""
    context, optimizer = fresh(task)
    began = time.process_time()
    texts = task.backbone.encode_prompts(context, task.whole, path=path)
    torch.autograd.backward(loss_of(task, task.features, texts))
    optimizer.step()
    seconds = time.process_time() - began
    assert context.grad is not None
    return Step(seconds, seconds, texts.detach(), context.grad)


def assert_equal(found: Step, wanted: Step) -> tuple[float, float]:
    """Largest deviations of text features and gradient (the latter relative to its largest entry)."""
    value = float((found.features - wanted.features).abs().max())
    gradient = float((found.gradient - wanted.gradient).abs().max() / wanted.gradient.abs().max())
    if value > 1e-5 * max(1.0, float(wanted.features.abs().max())) or gradient > 1e-4:
        raise SystemExit(f"The ways differ: text features by {value:.1e}, gradients by {gradient:.1e}.")
    return value, gradient


def measure(task: Task, plain_repeats: int, fast_repeats: int) -> dict[str, Any]:
    """Interleaved: in every round one plain step, then the fast ways in turn."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    worst = (0.0, 0.0)
    for path in ("prefix", "short"):
        cached_step(task, path)  # warm up: constants and allocator
    for _ in range(plain_repeats):
        plain = plain_step(task)
        seconds["plain"].append(plain.seconds)
        seconds["cached"].append(plain.text)
        for _ in range(fast_repeats):
            for path in ("short", "prefix"):
                step = cached_step(task, path)
                seconds[path].append(step.seconds)
                deviation = assert_equal(step, plain)
                worst = (max(worst[0], deviation[0]), max(worst[1], deviation[1]))
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    return {
        "classes": len(task.whole),
        "seconds": medians,
        "runs": seconds,
        "speedup": medians["plain"] / medians["prefix"],
        "factor": {after: medians[before] / medians[after] for before, after in itertools.pairwise(WAYS)},
        "largest_deviation": {"text_features": worst[0], "gradient_relative": worst[1]},
    }


def provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    import open_clip

    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "command": "python benchmarks/step.py " + " ".join(sys.argv[1:]),
        "cpu": cpu,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "open_clip": open_clip.__version__,
        "python": platform.python_version(),
        "batch": arguments.batch,
        "context_tokens": arguments.context_tokens,
    }


def markdown(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| backbone | classes | plain | + feature cache | + short text | + shared prefix | times faster | target |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for result in results:
        cells = [f"{seconds(result['seconds'][way])} (×{result['factor'][way]:.1f})" for way in WAYS[1:]]
        target = f"≥ {TARGETS[result['classes']]}" if result["target"] else "–"
        yield (
            f"| {result['model']} | {result['classes']} | {seconds(result['seconds']['plain'])} | {' | '.join(cells)} "
            f"| **{result['speedup']:.1f}** | {target} |"
        )


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16", help="any open_clip model (default: %(default)s)")
    parser.add_argument("--no-tiny", action="store_true", help="leave the tiny backbone out")
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5, help="plain steps; a third of it above 100 classes")
    parser.add_argument("--fast-repeats", type=int, default=3, help="steps of each fast way per plain step")
    parser.add_argument("--json", type=Path, help="write all runs and the provenance here")
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    results = []
    for model in [arguments.model] + ([] if arguments.no_tiny else ["promptfed-tiny"]):
        try:
            backbone = load_backbone(model, "random")  # the weights' values do not matter here
        except BackboneError as error:
            raise SystemExit(str(error)) from error
        for classes in arguments.classes:
            task = make_task(backbone, classes, arguments.batch, arguments.context_tokens)
            repeats = max(1, arguments.repeats // 3) if classes > CHUNK else arguments.repeats
            result = measure(task, repeats, arguments.fast_repeats)
            result |= {"model": model, "target": model == "ViT-B-16" and classes in TARGETS}
            results.append(result)
            print(f"{model}, {classes} classes: {result['speedup']:.1f} times faster", file=sys.stderr)
    table = "\n".join(markdown(results))
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")
    if arguments.json:
        report = {"provenance": provenance(arguments), "results": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
