"""Accuracies of the tiny backbone: the tables of docs/explanation/backbone.md."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.backbones.training import normalise
from promptfed.shared.clip.tiny import MODEL, register, weights_path
from promptfed.shared.data.classes import SYMBOLS
from promptfed.shared.data.digits import DIGIT_NAMES, DOMAINS, digit_images
from promptfed.shared.data.digits import TEMPLATE as DIGIT_TEMPLATE
from promptfed.shared.data.partition import halves
from promptfed.shared.data.source import Split
from promptfed.shared.data.styles import COMMON, RARE, STYLES
from promptfed.shared.data.symbols import TEMPLATE, symbols_split
from promptfed.shared.seeds import generator

CONTEXT_LENGTH = 16
CONTEXT_STD = 0.02
NAMES = tuple(s.name for s in SYMBOLS)


@dataclass(frozen=True)
class StyleResult:
    """Accuracies of one style in percent. ``base``, ``novel``: among the classes of one half."""

    template: float
    random: float
    base: float
    novel: float
    direction: float
    """Cosine between the mean image and text differences of this style from photo."""


@dataclass(frozen=True)
class Measured:
    """Results by style, and zero-shot accuracies of the handwritten digits by domain."""

    styles: dict[str, StyleResult]
    digits: dict[str, float]

    def mean(self, field: str, styles: Sequence[str]) -> float:
        """A field's mean over styles."""
        return sum(float(getattr(self.styles[s], field)) for s in styles) / len(styles)

    def failures(self) -> list[str]:
        """A sentence for each bar that is missed."""
        missed = [f"{s} is not within 60-90" for s in COMMON if not 60 <= self.styles[s].template <= 90]
        inside = [s for s in RARE if 25 <= self.styles[s].template <= 60]
        if len(inside) < 4:
            missed.append(f"only {len(inside)} rare styles are within 25-60")
        for group in (COMMON, RARE):
            if abs(self.mean("random", group) - self.mean("template", group)) > 5:
                missed.append(f"random contexts are more than 5 points from the template on {', '.join(group)}")
        if self.mean("novel", tuple(STYLES)) < self.mean("base", tuple(STYLES)):
            missed.append("novel classes are worse than base classes")
        return missed


@torch.no_grad()
def image_features(model: open_clip.CLIP, images: Tensor) -> Tensor:
    """Unit features (N, d_e) of uint8 RGB images (N, 3, 48, 48)."""
    parts = [model.encode_image(normalise(part)) for part in torch.split(images, 128)]
    return F.normalize(torch.cat(parts), dim=-1)


@torch.no_grad()
def text_features(model: open_clip.CLIP, names: Sequence[str], template: str) -> Tensor:
    """Unit features (C, d_e) of the template filled with each name."""
    tokenizer = open_clip.get_tokenizer(MODEL)
    return F.normalize(model.encode_text(tokenizer([template.format(n) for n in names])), dim=-1)


@torch.no_grad()
def context_features(model: open_clip.CLIP, names: Sequence[str], context: Tensor) -> Tensor:
    """Unit features (C, d_e) of ``[SOS] context name . [EOT]``; context vectors (m, d_t) enter before positions."""
    tokenizer = open_clip.get_tokenizer(MODEL)
    m = len(context)
    tokens = tokenizer(["x " * m + n + "." for n in names])
    x = model.token_embedding(tokens)
    x[:, 1 : 1 + m] = context
    x = model.transformer(x + model.positional_embedding, attn_mask=model.attn_mask)
    x = model.ln_final(x)[torch.arange(len(tokens)), tokens.argmax(dim=-1)]
    return F.normalize(x @ model.text_projection, dim=-1)


def random_context(model: open_clip.CLIP, seed: int) -> Tensor:
    """A context (16, d_t) drawn from N(0, 0.02^2), as an untrained prompt is."""
    width = model.token_embedding.embedding_dim
    return torch.randn(CONTEXT_LENGTH, width, generator=generator(seed, "context")) * CONTEXT_STD


def accuracy(image: Tensor, text: Tensor, labels: Tensor) -> float:
    """Percent of images whose nearest text is their label's."""
    return 100.0 * (image @ text.T).argmax(1).eq(labels).float().mean().item()


def _pixels(split: Split) -> Tensor:
    return torch.from_numpy(np.stack([np.asarray(split.image(i)) for i in range(len(split))])).permute(0, 3, 1, 2)


def measure(model: open_clip.CLIP, per_class: int, purpose: str, contexts: int = 5) -> Measured:
    """All results. ``purpose`` selects the images: ``test`` for the tables, ``validation`` for decisions."""
    template = text_features(model, NAMES, TEMPLATE)
    random = [context_features(model, NAMES, random_context(model, seed)) for seed in range(contexts)]
    photo_images = torch.zeros(template.shape[1])
    photo_text = text_features(model, NAMES, STYLES["photo"].wording).mean(0)
    results = {}
    for style, info in STYLES.items():
        split = symbols_split(list(SYMBOLS), style, per_class, purpose)
        image, labels = image_features(model, _pixels(split)), split.labels
        if style == "photo":
            photo_images = image.mean(0)
        text_direction = text_features(model, NAMES, info.wording).mean(0) - photo_text
        base, novel = (_half_accuracy(image, template, labels, half) for half in halves(len(NAMES)))
        results[style] = StyleResult(
            template=accuracy(image, template, labels),
            random=sum(accuracy(image, text, labels) for text in random) / len(random),
            base=base,
            novel=novel,
            direction=float(F.cosine_similarity(text_direction, image.mean(0) - photo_images, dim=0)),
        )
    return Measured(results, _digits(model))


def _half_accuracy(image: Tensor, text: Tensor, labels: Tensor, half: range) -> float:
    inside = (labels >= half.start) & (labels < half.stop)
    return accuracy(image[inside], text[half.start : half.stop], labels[inside] - half.start)


def _digits(model: open_clip.CLIP) -> dict[str, float]:
    text = text_features(model, DIGIT_NAMES, DIGIT_TEMPLATE)
    pixels, target = digit_images()
    accuracies = {}
    for domain in DOMAINS:
        shown = torch.from_numpy(255 - pixels if domain == "inverted" else pixels)
        image = image_features(model, shown[:, None].expand(-1, 3, -1, -1))
        accuracies[domain] = accuracy(image, text, torch.from_numpy(target))
    return accuracies


def summary_line(measured: Measured) -> str:
    """Template and random context by style, and digits, on one line."""
    parts = [f"{style} {r.template:.0f}/{r.random:.0f}" for style, r in measured.styles.items()]
    return ", ".join(parts + [f"digits {domain} {value:.0f}" for domain, value in measured.digits.items()])


def markdown(measured: Measured) -> str:
    """The tables of docs/explanation/backbone.md."""
    lines = [
        "| style | images in pre-training | template | random context | base | novel | direction |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for style, r in measured.styles.items():
        kind = "rare" if STYLES[style].rare else "common"
        direction = "" if style == "photo" else f"{r.direction:.2f}"
        cells = f"{r.template:.1f} | {r.random:.1f} | {r.base:.1f} | {r.novel:.1f} | {direction}"
        lines.append(f"| {style} | {kind} | {cells} |")
    for name, group in (("common", COMMON), ("rare", RARE), ("all", tuple(STYLES))):
        values = " | ".join(f"{measured.mean(f, group):.1f}" for f in ("template", "random", "base", "novel"))
        lines.append(f"| *mean* | {name} | {values} | |")
    lines += ["", "| handwritten digits | zero-shot |", "| --- | ---: |"]
    lines += [f"| {domain} | {value:.1f} |" for domain, value in measured.digits.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and exit with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=weights_path())
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--purpose", choices=("test", "validation"), default="test")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    register()
    model = open_clip.create_model(MODEL, pretrained=str(args.weights)).eval()
    measured = measure(model, args.per_class, args.purpose)
    print(markdown(measured))
    for failure in measured.failures():
        print(f"not met: {failure}")
    raise SystemExit(bool(measured.failures()))


if __name__ == "__main__":
    main()
