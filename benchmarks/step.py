"""CPU time of one local training step of promptfl: as released code does it, and with each saving of `shared/clip`.

    python -m benchmarks.step --json step.json

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
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Batch, class_names, in_words, machine, medians, parser, random_backbone, table, write
from promptfed.shared.clip import Backbone, ClassPrompts

CHUNK = 100
WAYS = ("plain", "cached", "short", "prefix")
TARGETS = {10: 30, 100: 20, 1000: 12}


@dataclass
class Task:
    """One training situation: a batch of images with labels, class names, and a context to train."""

    backbone: Backbone
    prompts: list[ClassPrompts]  # all classes, or chunks of them for the plain way
    all_prompts: ClassPrompts
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


def make_task(backbone: Backbone, classes: int, batch: int, m: int) -> Task:
    """Random images, names and context of ``m`` tokens."""
    draws = torch.Generator().manual_seed(0)
    names = class_names(classes, backbone)
    drawn = Batch.drawn(backbone, batch, classes, draws)
    return Task(
        backbone=backbone,
        prompts=[backbone.class_prompts(names[i : i + CHUNK], m) for i in range(0, classes, CHUNK)],
        all_prompts=backbone.class_prompts(names, m),
        images=drawn.pixels,
        features=backbone.encode_images(drawn.pixels),
        labels=drawn.classes,
        start=torch.randn(m, backbone.d_t, generator=draws) * 0.02,
    )


def loss_of(task: Task, images: Tensor, texts: Tensor) -> Tensor:
    """Cross-entropy of image features ``(B, d_e)`` against text features ``(C, d_e)``."""
    return F.cross_entropy(task.backbone.logit_scale * images @ texts.T, task.labels)


def fresh(task: Task) -> tuple[Tensor, torch.optim.SGD]:
    """The context to train, as it is at the start, and its optimizer."""
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
        texts = encode_plain(task, context, task.all_prompts)
        torch.autograd.backward(loss_of(task, images, texts))
    optimizer.step()
    text = time.process_time() - began
    assert context.grad is not None
    return Step(tower + text, text, texts.detach(), context.grad)


def encode_plain(task: Task, context: Tensor, prompts: ClassPrompts) -> Tensor:
    """Text features ``(C, d_e)`` from all positions of all classes."""
    return task.backbone.encode_prompts(context, prompts, path="plain")


def cached_step(task: Task, path: Any) -> Step:
    """On kept image features, by a fast text path."""
    context, optimizer = fresh(task)
    began = time.process_time()
    texts = task.backbone.encode_prompts(context, task.all_prompts, path=path)
    torch.autograd.backward(loss_of(task, task.features, texts))
    optimizer.step()
    seconds = time.process_time() - began
    assert context.grad is not None
    return Step(seconds, seconds, texts.detach(), context.grad)


def assert_equal(step: Step, wanted: Step) -> tuple[float, float]:
    """Largest deviations of text features and gradient (the latter relative to its largest entry)."""
    value = float((step.features - wanted.features).abs().max())
    gradient = float((step.gradient - wanted.gradient).abs().max() / wanted.gradient.abs().max())
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
    typical = medians(seconds)
    return {
        "classes": len(task.all_prompts),
        "seconds": typical,
        "runs": seconds,
        "speedup": typical["plain"] / typical["prefix"],
        "factor": {after: typical[before] / typical[after] for before, after in itertools.pairwise(WAYS)},
        "largest_deviation": {"text_features": worst[0], "gradient_relative": worst[1]},
    }


def provenance(command: str, batch: int, context_tokens: int | dict[str, int]) -> dict[str, Any]:
    """Where a training step's seconds come from."""
    about = {"command": f"python -m benchmarks.{command} " + " ".join(sys.argv[1:]), **machine()}
    return about | {"open_clip": version("open_clip_torch"), "batch": batch, "context_tokens": context_tokens}


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The table of the results."""
    columns = ["backbone", "classes", "plain", "+ feature cache", "+ short text", "+ shared prefix", "times faster"]
    rows = []
    for result in results:
        seconds, factor = result["seconds"], result["factor"]
        cells = [f"{in_words(seconds[way])} (×{factor[way]:.1f})" for way in WAYS[1:]]
        target = f"≥ {TARGETS[result['classes']]}" if result["target"] else "–"
        cells = [in_words(seconds["plain"]), *cells, f"**{result['speedup']:.1f}**", target]
        rows.append([result["model"], str(result["classes"]), *cells])
    return table([*columns, "target"], rows)


def parse() -> argparse.Namespace:
    """The command line's options."""
    command = parser(__doc__)
    command.add_argument("--model", default="ViT-B-16", help="any open_clip model (default: %(default)s)")
    command.add_argument("--no-tiny", action="store_true", help="leave the tiny backbone out")
    command.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    command.add_argument("--batch", type=int, default=32)
    command.add_argument("--context-tokens", type=int, default=16)
    command.add_argument("--repeats", type=int, default=5, help="plain steps; a third of it above 100 classes")
    command.add_argument("--fast-repeats", type=int, default=3, help="steps of each fast way per plain step")
    command.add_argument("--markdown", type=Path, help="write the table here as well")
    return command.parse_args()


def main() -> None:
    """Measure every backbone and number of classes, and print a table."""
    options = parse()
    torch.set_num_threads(1)
    results = []
    for model in [options.model] + ([] if options.no_tiny else ["promptfed-tiny"]):
        backbone = random_backbone(model)
        for classes in options.classes:
            task = make_task(backbone, classes, options.batch, options.context_tokens)
            repeats = max(1, options.repeats // 3) if classes > CHUNK else options.repeats
            result = measure(task, repeats, options.fast_repeats)
            result |= {"model": model, "target": model == "ViT-B-16" and classes in TARGETS}
            results.append(result)
            print(f"{model}, {classes} classes: {result['speedup']:.1f} times faster", file=sys.stderr)
    print(markdown(results))
    if options.markdown:
        options.markdown.write_text(markdown(results) + "\n")
    about = provenance("step", options.batch, options.context_tokens)
    write(options.json, {"provenance": about, "results": results})


if __name__ == "__main__":
    main()
