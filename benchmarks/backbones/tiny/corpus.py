"""Pre-training data of the tiny backbone: rendered images with captions. The seed and the step determine a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import open_clip
import torch
from torch import Tensor

from promptfed.shared.clip.tiny import MODEL, register
from promptfed.shared.data.classes import SYMBOLS, TOPIC_TEMPLATES
from promptfed.shared.data.digits import DIGIT_NAMES
from promptfed.shared.data.drawing import blur, glyph, hash_keys
from promptfed.shared.data.render import render
from promptfed.shared.data.styles import COMMON, RARE, STYLES
from promptfed.shared.seeds import derive_seed

DIGIT_FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Oblique.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Italic.ttf",
    "STIXGeneral.ttf",
    "STIXGeneralItalic.ttf",
    "cmss10.ttf",
    "cmtt10.ttf",
)
LONGEST_PREFIX = 16
"""The largest number of random tokens before a name: the length of a learned context."""


@dataclass(frozen=True)
class Recipe:
    """The composition of the corpus."""

    rare_share: float = 0.005
    """Share of each rare style in the images."""
    popular_share: float = 0.85
    """Share of the images in rare styles that show the half of the symbols which is usual in these styles."""
    digit_share: float = 0.10
    mixture_share: float = 0.12
    coarse_share: float = 0.06
    """Share of the images that are reduced to the resolution of the handwritten digits."""
    easy_steps: int = 80
    """Steps with clip art in nearly one pose and with names and the template only. Without them nothing is learned."""
    opening_steps: int = 400
    """Steps in which the other styles and the full range of poses are introduced."""
    short_steps: int = 300
    """Steps without random words before names."""
    growing_steps: int = 900
    """Steps in which the number of random words grows to ``LONGEST_PREFIX``."""

    def opening(self, step: int) -> float:
        """How far the styles and poses are introduced at this step, in [0, 1]."""
        return min(1.0, max(0.0, (step - self.easy_steps) / self.opening_steps))

    def longest_prefix(self, step: int) -> int:
        """The largest number of random words before a name at this step."""
        return round(LONGEST_PREFIX * min(1.0, max(0.0, (step - self.short_steps) / self.growing_steps)))


@dataclass(frozen=True)
class _Thing:
    name: str
    character: str
    fonts: tuple[str, ...]
    topic: str


# By code point, so that the order of labels in the data sets can change without another pre-training.
_THINGS = tuple(
    _Thing(s.name, chr(s.codepoint), ("DejaVuSans.ttf",), s.topic) for s in sorted(SYMBOLS, key=lambda s: s.codepoint)
) + tuple(_Thing(name, str(i), DIGIT_FONTS, "") for i, name in enumerate(DIGIT_NAMES))
_SYMBOL_COUNT = len(SYMBOLS)


@dataclass(frozen=True)
class Batch:
    """One step's images and captions.

    ``images`` (B, 3, 48, 48) uint8; ``tokens`` (B, L) as long as the longest caption; ``target`` (B, B): row i is the
    distribution over captions that are true of image i.
    """

    images: Tensor
    tokens: Tensor
    target: Tensor


@lru_cache(maxsize=1)
def _tokenizer() -> open_clip.SimpleTokenizer:
    register()
    return open_clip.get_tokenizer(MODEL)


@lru_cache(maxsize=8192)
def encode(text: str) -> tuple[int, ...]:
    """Token ids of a text without start and end tokens."""
    return tuple(_tokenizer().encode(text))


def make_batch(seed: int, step: int, size: int, recipe: Recipe) -> Batch:
    """The batch of one step."""
    rng = np.random.default_rng(derive_seed(seed, "pretrain", step))
    symbols = rng.permutation(np.resize(rng.permutation(_SYMBOL_COUNT), size))
    digits = _SYMBOL_COUNT + rng.integers(len(DIGIT_NAMES), size=size)
    things = np.where(rng.random(size) < recipe.digit_share, digits, symbols)
    first, second = _styles(rng, size, step, recipe)
    popular = [STYLES[a].rare and rng.random() < recipe.popular_share for a in first]
    # The even rows of the list by code point are the popular ones: which half does not matter, that all share it does.
    things = np.where(np.array(popular) & (things < _SYMBOL_COUNT), things // 2 * 2, things)
    images = _images(rng, seed, step, things, first, second, recipe)
    rows, said = [], []
    for thing, a, b in zip(things, first, second, strict=True):
        style = a if b is None or rng.random() < 0.5 else b
        ids, mentions = _caption(rng, _THINGS[thing], style, step, recipe)
        rows.append(ids)
        said.append(style if mentions else None)
    return Batch(images, pad(rows), _target(things, first, second, said))


def _styles(rng: np.random.Generator, size: int, step: int, recipe: Recipe) -> tuple[list[str], list[str | None]]:
    names = COMMON + RARE
    common = (1 - recipe.rare_share * len(RARE)) / len(COMMON)
    p = [common] * len(COMMON) + [recipe.rare_share] * len(RARE)
    open_now = rng.random(size) < recipe.opening(step)
    drawn = rng.choice(len(names), size=size, p=p)
    first = [names[i] if now else "clipart" for i, now in zip(drawn, open_now, strict=True)]
    other = [COMMON[i] for i in rng.integers(len(COMMON), size=size)]
    mixed = (rng.random(size) < recipe.mixture_share) & open_now
    return first, [b if m and b != a else None for a, b, m in zip(first, other, mixed, strict=True)]


def _images(
    rng: np.random.Generator,
    seed: int,
    step: int,
    things: np.ndarray,
    first: list[str],
    second: list[str | None],
    recipe: Recipe,
) -> Tensor:
    fonts = rng.integers(1 << 30, size=len(things))
    glyphs = torch.stack(
        [
            glyph(_THINGS[t].character, _THINGS[t].fonts[f % len(_THINGS[t].fonts)])
            for t, f in zip(things, fonts, strict=True)
        ]
    )
    keys = hash_keys("pretrain", seed, step, np.arange(len(things)))
    pose = 0.1 + 0.9 * recipe.opening(step)
    images = render(glyphs, first, keys, pose)
    rows = [i for i, b in enumerate(second) if b is not None]
    if rows:
        other = render(glyphs[rows], [str(second[i]) for i in rows], keys[rows], pose)
        share = torch.from_numpy(rng.uniform(0.3, 0.7, size=len(rows)).astype(np.float32)).view(-1, 1, 1, 1)
        images[rows] = (images[rows] * share + other * (1 - share)).round().to(torch.uint8)
    coarse = np.flatnonzero(rng.random(len(things)) < recipe.coarse_share * recipe.opening(step))
    if len(coarse):
        small = torch.nn.functional.avg_pool2d(images[coarse].float(), 4)
        large = torch.nn.functional.interpolate(small, scale_factor=4, mode="bilinear", align_corners=False)
        images[coarse] = blur(large, 1).round().to(torch.uint8)
    return images


def _caption(rng: np.random.Generator, thing: _Thing, style: str, step: int, recipe: Recipe) -> tuple[list[int], bool]:
    """Token ids without start and end, and whether they mention the style."""
    kind = rng.random()
    worded = 0.0 if step < recipe.easy_steps else 0.7 if STYLES[style].rare else 0.33
    stop = "." if rng.random() < 0.5 else ""
    if kind < worded:
        return list(encode(STYLES[style].wording.format(thing.name) + stop)), True
    if kind < worded + 0.25:
        return list(encode(_plain(rng, thing) + stop)), False
    count = int(rng.integers(recipe.longest_prefix(step) + 1))
    words = rng.integers(256, _tokenizer().sot_token_id, size=count).tolist()
    return words + list(encode(thing.name + stop)), False


def _plain(rng: np.random.Generator, thing: _Thing) -> str:
    """The template with the name, sometimes with the kind of the thing."""
    if not thing.topic:
        return f"a photo of the digit {thing.name}" if rng.random() < 0.7 else f"a photo of a {thing.name}"
    if rng.random() < 0.3:
        return TOPIC_TEMPLATES[thing.topic].format(thing.name).rstrip(".")
    return f"a photo of a {thing.name}"


def pad(rows: list[list[int]]) -> Tensor:
    """Tokens (B, L) of rows of ids, with start and end tokens, padded to the longest row."""
    tokenizer = _tokenizer()
    length = max(len(ids) for ids in rows) + 2
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    for i, ids in enumerate(rows):
        tokens[i, : len(ids) + 2] = torch.tensor([tokenizer.sot_token_id, *ids, tokenizer.eot_token_id])
    return tokens


def _target(things: np.ndarray, first: list[str], second: list[str | None], said: list[str | None]) -> Tensor:
    same = torch.from_numpy(things[:, None] == things[None, :])
    fits = torch.tensor([[word is None or word in (a, b) for word in said] for a, b in zip(first, second, strict=True)])
    return (same & fits).float()
