"""Pre-training data of promptfed-emoji: the pictures that `splits` permits, augmented, with captions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.backbones.tiny.corpus import LONGEST_PREFIX, encode, pad
from promptfed.shared.data.emoji import store
from promptfed.shared.data.emoji.splits import Splits, splits
from promptfed.shared.data.emoji.styles import COMMON, RARE, STYLES
from promptfed.shared.seeds import derive_seed


@dataclass(frozen=True)
class Recipe:
    """The composition of the corpus, and the numbers of steps and pictures."""

    rare_share: float = 0.03
    """Share of each rare style in the pictures of a batch."""
    batch: int = 96
    classifier_steps: int = 4000
    """Steps that train the image tower as a classifier of names, kinds and styles; half of the patches are dropped."""
    text_steps: int = 2000
    """Steps that train the text tower on features of the frozen image tower."""
    joint_steps: int = 1500
    """Steps that train both towers, with all patches."""
    text_batch: int = 192
    rate: float = 1e-3
    joint_rate: float = 3e-4
    patch_dropout: float = 0.5
    grey_share: float = 0.25
    invert_share: float = 0.1
    flip_share: float = 0.4

    @property
    def steps(self) -> int:
        """Steps of all stages."""
        return self.classifier_steps + self.text_steps + self.joint_steps


@dataclass(frozen=True)
class Corpus:
    """Pictures (N, 3, 64, 64) uint8, with the thing, kind and style of each, as places in the lists.

    ``rows`` holds each style's pictures in ``pictures``.
    """

    pictures: Tensor
    thing: np.ndarray
    kind: np.ndarray
    style: np.ndarray
    rows: tuple[np.ndarray, ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    styles: tuple[str, ...]


def read_cells(drawn: store.Drawn, known: Splits) -> list[tuple[str, int]]:
    """Style and place of each picture that pre-training reads."""
    return [
        (style, place)
        for style in (*COMMON, *RARE)
        for place in sorted(drawn.styles.get(style, ()))
        if known.was_read(drawn.things[place].name, style)
    ]


@lru_cache(maxsize=1)
def corpus(folder: Path) -> Corpus:
    """All permitted pictures of a folder, which may hold the whole set or some styles."""
    drawn = store.read(folder)
    cells = read_cells(drawn, splits())
    styles, kinds = (*COMMON, *RARE), tuple(sorted({thing.kind for thing in drawn.things}))
    style = np.array([styles.index(name) for name, _ in cells])
    return Corpus(
        pictures=pixels(drawn, cells),
        thing=np.array([place for _, place in cells]),
        kind=np.array([kinds.index(drawn.things[place].kind) for _, place in cells]),
        style=style,
        rows=tuple(np.flatnonzero(style == k) for k in range(len(styles))),
        names=tuple(thing.name for thing in drawn.things),
        kinds=kinds,
        styles=styles,
    )


def pixels(drawn: store.Drawn, cells: list[tuple[str, int]]) -> Tensor:
    """The pictures of ``cells`` (style and place), (N, 3, 64, 64) uint8."""
    return torch.from_numpy(np.stack([np.asarray(drawn.image(*cell)) for cell in cells])).permute(0, 3, 1, 2)


def draw(source: Corpus, recipe: Recipe, seed: int, step: int, size: int) -> tuple[np.ndarray, np.random.Generator]:
    """The rows of a batch (size,), and the generator for its other draws."""
    rng = np.random.default_rng(derive_seed(seed, "pretrain-emoji", step))
    common = (1 - recipe.rare_share * len(RARE)) / len(COMMON)
    shares = np.array([common] * len(COMMON) + [recipe.rare_share] * len(RARE)) * [
        len(rows) > 0 for rows in source.rows
    ]
    chosen = rng.choice(len(source.styles), size=size, p=shares / shares.sum())
    return np.array([source.rows[k][rng.integers(len(source.rows[k]))] for k in chosen]), rng


def augmented(pictures: Tensor, rng: np.random.Generator, recipe: Recipe) -> Tensor:
    """Pictures (B, 3, H, W) uint8 after random rotation, scaling, shift and change of colours; float in [0, 1]."""
    count = len(pictures)
    out = F.grid_sample(
        1 - pictures.float() / 255,  # so that what comes in at the edge is paper
        F.affine_grid(_poses(rng, count, recipe.flip_share), list(pictures.shape), align_corners=False),
        align_corners=False,
    )
    out = 1 - out

    def some(share: float) -> Tensor:
        return torch.from_numpy(rng.random(count) < share).view(-1, 1, 1, 1)

    def between(low: float, high: float, channels: int = 1) -> Tensor:
        return torch.from_numpy(rng.uniform(low, high, (count, channels, 1, 1)).astype(np.float32))

    out = torch.where(some(recipe.grey_share), out.mean(1, keepdim=True).expand_as(out), out)
    out = (out * between(0.75, 1.1, 3) + between(-0.1, 0.1)).clamp(0, 1)
    out = torch.where(some(recipe.invert_share), 1 - out, out)
    hole = some(0.3) & _holes(rng, count, pictures.shape[-1])
    return torch.where(hole, between(0, 1, 3).expand_as(out), out)


def _poses(rng: np.random.Generator, count: int, flip_share: float) -> Tensor:
    angle = rng.normal(0, 0.2, count)
    scale = rng.uniform(0.9, 1.45, (count, 1)) * np.exp(rng.normal(0, 0.08, (count, 2)))
    flip = np.where(rng.random(count) < flip_share, -1.0, 1.0)
    pose = np.zeros((count, 2, 3), dtype=np.float32)
    pose[:, 0, 0], pose[:, 0, 1] = np.cos(angle) * scale[:, 0] * flip, -np.sin(angle) * scale[:, 0]
    pose[:, 1, 0], pose[:, 1, 1] = np.sin(angle) * scale[:, 1] * flip, np.cos(angle) * scale[:, 1]
    pose[:, :, 2] = rng.uniform(-0.2, 0.2, (count, 2))
    return torch.from_numpy(pose)


def _holes(rng: np.random.Generator, count: int, side: int) -> Tensor:
    """A random rectangle of each picture, as a mask (B, 1, H, W) bool."""
    size, start = rng.uniform(0.15, 0.4, (count, 2)) * side, rng.uniform(-0.1, 0.9, (count, 2)) * side
    at = np.arange(side)
    inside = [(at >= start[:, k, None]) & (at < (start + size)[:, k, None]) for k in (0, 1)]
    return torch.from_numpy(inside[0][:, None, :, None] & inside[1][:, None, None, :])


@dataclass(frozen=True)
class Captions:
    """Tokens (B, L); a matrix (B, B), 1 where caption j fits picture i; the thing that each names (B,), or -1."""

    tokens: Tensor
    target: Tensor
    thing: Tensor


def captions(source: Corpus, rows: np.ndarray, rng: np.random.Generator, words: bool = True) -> Captions:
    """A caption for each picture: with its style, with its kind, the template, or random words before its name."""
    ids, said = [], []
    for row in rows:
        name, kind, style = source.thing[row], source.kind[row], source.style[row]
        stop = "." if rng.random() < 0.5 else ""
        which = rng.random()
        if which < 0.25:
            text = STYLES[source.styles[style]].wording.format(source.names[name])
            said.append(("style", name, style))
        elif which < 0.33:
            text = f"a photo of a {source.kinds[kind]}"
            said.append(("kind", kind, -1))
        else:
            text = f"a photo of a {source.names[name]}" if which < 0.7 or not words else source.names[name]
            said.append(("name", name, -1))
        prefix = rng.integers(256, 49406, size=int(rng.integers(LONGEST_PREFIX + 1))).tolist() if which >= 0.7 else []
        ids.append([*(prefix if words else []), *encode(text + stop)])
    named = torch.tensor([-1 if what == "kind" else thing for what, thing, _ in said])
    return Captions(pad(ids), _target(source, rows, said), named)


def _target(source: Corpus, rows: np.ndarray, said: list[tuple[str, int, int]]) -> Tensor:
    thing, kind, style = source.thing[rows][:, None], source.kind[rows][:, None], source.style[rows][:, None]
    what = np.array([kind for kind, _, _ in said])
    first, second = np.array([a for _, a, _ in said]), np.array([b for _, _, b in said])
    true = np.where(what == "kind", kind == first, (thing == first) & ((what == "name") | (style == second)))
    return torch.from_numpy(true).float()
