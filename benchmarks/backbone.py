"""Pre-training of the embedded backbone: its corpus, its steps, and `python -m benchmarks.backbone`."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from safetensors.torch import save_file
from torch import Tensor, nn

from promptfed.shared.clip.embedded import EMBEDDED, tiny
from promptfed.shared.data.classes import SYMBOLS, TOPIC_TEMPLATES
from promptfed.shared.data.digits import DIGIT_NAMES
from promptfed.shared.data.symbols import COMMON, RARE, STYLES, blur, glyph, hash_keys, render
from promptfed.shared.seeds import derive_seed

MAX_LOGIT_SCALE = 50.0
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
_FONTS = Path(matplotlib.get_data_path(), "fonts", "ttf")

LONGEST_PREFIX = 16
"""The largest number of random tokens before a name: the length of a learned context."""

_SYMBOL_COUNT = len(SYMBOLS)


def fresh_model(name: str, seed: int, *keys: str) -> open_clip.CLIP:
    """A model with seeded initial weights. The state of torch's global generator does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, *keys))
        EMBEDDED[name].register()
        return open_clip.create_model(name)


def normalise(images: Tensor) -> Tensor:
    """Images (B, 3, H, W) in [0, 255], normalised with the mean and deviation of CLIP's training images; float."""
    mean = torch.tensor(OPENAI_DATASET_MEAN).view(1, 3, 1, 1)
    std = torch.tensor(OPENAI_DATASET_STD).view(1, 3, 1, 1)
    return (images.float() / 255 - mean) / std


def pooled_short(model: open_clip.CLIP, tokens: Tensor) -> Tensor:
    """Text features (B, d_t) before the projection of tokens (B, L) without trailing padding, which the mask hides."""
    length = tokens.shape[1]
    x = model.token_embedding(tokens) + model.positional_embedding[:length]
    x = model.transformer(x, attn_mask=model.attn_mask[:length, :length])
    pooled: Tensor = model.ln_final(x)[torch.arange(len(tokens)), tokens.argmax(dim=-1)]
    return pooled


def contrast(model: open_clip.CLIP, image: Tensor, text: Tensor, target: Tensor) -> Tensor:
    """Cross entropy in both directions of unit features (B, d_e). ``target`` (B, B): 1 where caption j fits image i."""
    logits = model.logit_scale.exp().clamp(max=MAX_LOGIT_SCALE) * image @ text.T
    rows = target / target.sum(1, keepdim=True).clamp(min=1)
    columns = target.T / target.T.sum(1, keepdim=True).clamp(min=1)
    return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, columns)) / 2


def optimizer_of(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.AdamW:
    """AdamW, with weight decay for matrices only."""
    trained = list(parameters)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """One optimizer step with gradients clipped to norm 1."""
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def cosine(peak: float, part: float) -> float:
    """The rate after ``part`` in [0, 1] of the steps: half a cosine from ``peak`` down to a hundredth."""
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * part)))


def save_weights(model: open_clip.CLIP, path: Path, without: Container[str] = ()) -> None:
    """The weights in half precision, except those named ``without``."""
    with torch.no_grad():
        model.logit_scale.clamp_(max=math.log(MAX_LOGIT_SCALE))
    kept = {name: value for name, value in model.state_dict().items() if name not in without}
    save_file({name: value.half().contiguous() for name, value in kept.items()}, path)


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
    tiny.register()
    return open_clip.get_tokenizer(tiny.MODEL)


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
            glyph(_THINGS[t].character, _FONTS / _THINGS[t].fonts[f % len(_THINGS[t].fonts)])
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


def loss_of(model: open_clip.CLIP, batch: Batch) -> Tensor:
    """Cross entropy in both directions; all fitting captions of the batch count as right."""
    image = F.normalize(model.encode_image(normalise(batch.images)), dim=-1)
    text = F.normalize(pooled_short(model, batch.tokens) @ model.text_projection, dim=-1)
    return contrast(model, image, text, batch.target)


def learning_rate(step: int, steps: int, peak: float, warmup: int = 30) -> float:
    """The rate of a step: linear warm-up, then half a cosine down to a hundredth of ``peak``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return cosine(peak, (step - warmup) / max(1, steps - warmup))


def pretrain(args: argparse.Namespace, recipe: Recipe) -> open_clip.CLIP:
    """Train from scratch; the model in evaluation mode."""
    tiny.register()
    model = fresh_model(tiny.MODEL, args.seed, "pretrain", "initial")
    model.token_embedding.weight.requires_grad_(False)
    model.train()
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    optimizer = optimizer_of(matrices + vectors, args.lr)
    start = time.monotonic()
    for step in range(args.steps):
        set_rate(optimizer, learning_rate(step, args.steps, args.lr))
        loss = loss_of(model, make_batch(args.seed, step, args.batch, recipe))
        descend(optimizer, loss, matrices + vectors)
        if step % 50 == 49:
            print(f"step {step + 1} loss {loss.item():.3f} {time.monotonic() - start:.0f} s", flush=True)
    print(f"pre-trained in {time.monotonic() - start:.0f} s", flush=True)
    return model.eval()


def main() -> None:
    """Read the options, train and save the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="?", choices=("tiny", "photo"), default="tiny")
    parser.add_argument("--out", help="file of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: 2300 of tiny, 1500 of photo")
    parser.add_argument("--batch", type=int, help="default: 128 of tiny, 96 of photo")
    parser.add_argument("--lr", type=float, help="default: 1e-3 of tiny, 2e-3 of photo")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.which == "photo":
        from benchmarks import photo_backbone

        photo_backbone.make(args)
        return
    args.steps, args.batch, args.lr = args.steps or 2300, args.batch or 128, args.lr or 1e-3
    save_weights(pretrain(args, Recipe()), Path(args.out or "weights.safetensors"))


if __name__ == "__main__":
    main()
