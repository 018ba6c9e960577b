"""Pre-training of promptfed-emoji: ``python -m benchmarks.backbones.emoji.pretrain --data DIR --out DIR``.

``--data`` is the whole set as ``promptfed data emoji`` makes it. The command can be stopped and started again: it goes
on from the checkpoint in ``--out``, and writes ``weights.safetensors`` and ``read.txt.gz`` there at the end.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.backbones.emoji.corpus import Corpus, Recipe, augmented, captions, corpus, draw
from benchmarks.backbones.emoji.gate import summary_line
from benchmarks.backbones.emoji.readlist import write_read_list
from benchmarks.backbones.training import (
    contrast,
    cosine,
    descend,
    encode_short,
    fresh_model,
    normalise,
    optimizer_of,
    save_weights,
    set_rate,
)
from promptfed.shared.clip.emoji import FROM_TINY, MODEL, register
from promptfed.shared.clip.tiny import weights_path as tiny_weights
from promptfed.shared.seeds import derive_seed

_NAME_SCALE = 16.0
_STYLE_WEIGHT, _KIND_WEIGHT = 0.3, 0.5
_POSITIONS = "visual.positional_embedding"


class Heads(nn.Module):
    """The heads of the first stage, which classify the thing, its kind and its style from image features."""

    def __init__(self, width: int, source: Corpus) -> None:
        super().__init__()
        self.names = nn.Linear(width, len(source.names), bias=False)
        self.kinds = nn.Linear(width, len(source.kinds))
        self.styles = nn.Linear(width, len(source.styles))

    def loss(self, features: Tensor, source: Corpus, rows: np.ndarray) -> Tensor:
        """The weighted sum of the cross entropies for unit features (B, d_e)."""
        scaled = features * _NAME_SCALE
        names = scaled @ F.normalize(self.names.weight, dim=1).T
        return (
            F.cross_entropy(names, torch.from_numpy(source.thing[rows]), label_smoothing=0.1)
            + _KIND_WEIGHT * F.cross_entropy(self.kinds(scaled), torch.from_numpy(source.kind[rows]))
            + _STYLE_WEIGHT * F.cross_entropy(self.styles(scaled), torch.from_numpy(source.style[rows]))
        )


def started(seed: int, from_tiny: bool = True) -> open_clip.CLIP:
    """The model before the first step: promptfed-tiny with its 6 x 6 positions interpolated to 8 x 8 patches."""
    register()
    model = fresh_model(MODEL, seed, "pretrain-emoji", "initial")
    tiny = {name: value.float() for name, value in load_file(tiny_weights()).items()}
    if not from_tiny:
        tiny = {name: tiny[name] for name in FROM_TINY}
    else:
        tiny[_POSITIONS] = stretched(tiny[_POSITIONS], model.visual.grid_size[0])
    model.load_state_dict(tiny, strict=from_tiny)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROM_TINY)
    return model


def stretched(positions: Tensor, side: int) -> Tensor:
    """Interpolate positions (1 + g², d) of a square grid to ``side`` x ``side``. The first, of [cls], is kept."""
    grid = math.isqrt(len(positions) - 1)
    square = positions[1:].T.reshape(1, -1, grid, grid)
    larger = F.interpolate(square, size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat([positions[:1], larger.flatten(2)[0].T])


class Training:
    """The three stages of pre-training, step by step. A checkpoint holds `state`."""

    def __init__(self, data: Path, recipe: Recipe, seed: int, from_tiny: bool = True) -> None:
        self.source, self.recipe, self.seed = corpus(data), recipe, seed
        self.model = started(seed, from_tiny)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "pretrain-emoji", "heads"))
            self.heads = Heads(self.model.visual.output_dim, self.source)
        self.step = 0
        self._features: Tensor | None = None
        self._enter()

    @property
    def stage(self) -> int:
        """The present stage. 0: image tower as a classifier; 1: text tower; 2: both towers."""
        return int(np.searchsorted(self._ends()[:2], self.step, side="right"))

    def _ends(self) -> list[int]:
        recipe = self.recipe
        return list(accumulate((recipe.classifier_steps, recipe.text_steps, recipe.joint_steps)))

    def _enter(self) -> None:
        """Begin the present stage with its parameters and a new optimizer."""
        visual = list(self.model.visual.parameters())
        in_visual = {id(p) for p in visual}
        text = [p for p in self.model.parameters() if p.requires_grad and id(p) not in in_visual]
        trained = ([*visual, *self.heads.parameters()], text, [*visual, *text])[self.stage]
        self.trained, self.optimizer = trained, optimizer_of(trained, self.recipe.rate)
        share = self.recipe.patch_dropout if self.stage == 0 else 0.0
        self.model.visual.patch_dropout = (
            open_clip.transformer.PatchDropout(share) if share else nn.Identity()  # it has no weights
        )

    def rate(self) -> float:
        """The rate of the present step: in each stage a linear warm-up, then half a cosine down to a hundredth."""
        end = self._ends()[self.stage]
        start = 0 if self.stage == 0 else self._ends()[self.stage - 1]
        peak = self.recipe.joint_rate if self.stage == 2 else self.recipe.rate
        at = self.step - start
        if at < 50:
            return peak * (at + 1) / 50
        return cosine(peak, at / (end - start))

    def advance(self) -> float:
        """Carry out one step; its loss."""
        before = self.stage
        set_rate(self.optimizer, self.rate())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, "pretrain-emoji", "dropout", self.step))
            loss = (self._classify, self._read_features, self._read_pictures)[self.stage]()
        descend(self.optimizer, loss, self.trained)
        self.step += 1
        if self.stage != before:
            self._enter()
        return loss.item()

    def _batch(self, size: int) -> tuple[np.ndarray, np.random.Generator]:
        return draw(self.source, self.recipe, self.seed, self.step, size)

    def _image(self, rows: np.ndarray, rng: np.random.Generator) -> Tensor:
        pictures = augmented(self.source.pictures[rows], rng, self.recipe) * 255
        return F.normalize(self.model.visual(normalise(pictures)), dim=-1)

    def _classify(self) -> Tensor:
        self.model.visual.train()
        rows, rng = self._batch(self.recipe.batch)
        return self.heads.loss(self._image(rows, rng), self.source, rows)

    def _read_features(self) -> Tensor:
        """A step on cached features: those of each picture and of its augmented copy are computed once."""
        rows, rng = self._batch(self.recipe.text_batch)
        if self._features is None:
            self._features = self._all_features()
        either = self._features[torch.from_numpy(rng.integers(2, size=len(rows))), torch.from_numpy(rows)]
        return self._contrast(either, rows, rng)

    @torch.no_grad()
    def _all_features(self) -> Tensor:
        self.model.visual.eval()
        rng = np.random.default_rng(derive_seed(self.seed, "pretrain-emoji", "features"))
        count, plain, turned = len(self.source.pictures), [], []
        for start in range(0, count, 256):
            rows = np.arange(start, min(count, start + 256))
            plain.append(F.normalize(self.model.visual(normalise(self.source.pictures[rows])), dim=-1))
            turned.append(self._image(rows, rng))
        return torch.stack([torch.cat(plain), torch.cat(turned)])

    def _read_pictures(self) -> Tensor:
        self.model.visual.train()
        rows, rng = self._batch(self.recipe.batch)
        return self._contrast(self._image(rows, rng), rows, rng)

    def _contrast(self, image: Tensor, rows: np.ndarray, rng: np.random.Generator) -> Tensor:
        """Cross entropy in both directions; all fitting captions of the batch count as right."""
        said = captions(self.source, rows, rng)
        text = F.normalize(encode_short(self.model, said.tokens), dim=-1)
        loss = contrast(self.model, image, text, said.target)
        return loss + self._named(text, said.thing) if self.stage == 1 else loss

    def _named(self, text: Tensor, thing: Tensor) -> Tensor:
        """Cross entropy of captions over the vectors of all 1,393 names, since a batch contains only 192."""
        vectors = F.normalize(self.heads.names.weight.detach(), dim=1)
        return F.cross_entropy(_NAME_SCALE * text @ vectors.T, thing, ignore_index=-1, label_smoothing=0.1)

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint."""
        parts = {"model": self.model, "heads": self.heads, "optimizer": self.optimizer}
        moment = {"step": self.step, "seed": self.seed, "recipe": asdict(self.recipe)}
        return moment | {name: part.state_dict() for name, part in parts.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. ValueError if its recipe or seed differs."""
        if (state["seed"], state["recipe"]) != (self.seed, asdict(self.recipe)):
            raise ValueError("the checkpoint is of another recipe or seed; name another folder")
        self.step = state["step"]
        self._enter()
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])


def run(training: Training, out: Path, data: Path, until: int, save_every: int, check_every: int) -> None:
    """Carry out the steps up to ``until`` with checkpoints. After the last step of the recipe, save the weights."""
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    if checkpoint.is_file():
        training.restore(torch.load(checkpoint, weights_only=True))
    start, first, total = time.monotonic(), training.step, 0.0
    while training.step < min(until, training.recipe.steps):
        total += training.advance()
        done = training.step
        if done % 50 == 0:
            each = (time.monotonic() - start) / (done - first)
            print(f"step {done} stage {training.stage} loss {total / 50:.3f} {each:.2f} s a step", flush=True)
            total = 0.0
        if done % save_every == 0:
            torch.save(training.state(), checkpoint.with_suffix(".part"))
            os.replace(checkpoint.with_suffix(".part"), checkpoint)
        if check_every and done % check_every == 0:
            names = training.heads.names.weight.detach() if training.stage == 0 else None
            print("  " + summary_line(training.model, data, "validation", names), flush=True)
    if training.step >= training.recipe.steps:
        save_weights(training.model, out / "weights.safetensors", FROM_TINY)
        write_read_list(data, out / "read.txt.gz")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the whole set: promptfed data emoji --out DIR")
    parser.add_argument("--out", type=Path, required=True, help="where checkpoints and weights go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--until", type=int, default=10**9, help="stop after this step")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--check-every", type=int, default=500)
    parser.add_argument("--from-scratch", action="store_true", help="do not begin with promptfed-tiny's weights")
    for name, value in asdict(Recipe()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = replace(Recipe(), **{name: getattr(args, name) for name in asdict(Recipe())})
    training = Training(args.data, recipe, args.seed, not args.from_scratch)
    run(training, args.out, args.data, args.until, args.save_every, args.check_every)


if __name__ == "__main__":
    main()
