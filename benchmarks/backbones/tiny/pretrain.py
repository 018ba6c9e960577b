"""Pre-training of the tiny backbone: ``python -m benchmarks.backbones.tiny.pretrain --out FILE --seed 0``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.backbones.tiny.corpus import Batch, Recipe, make_batch
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
from promptfed.shared.clip.tiny import MODEL, register


def loss_of(model: open_clip.CLIP, batch: Batch) -> Tensor:
    """Cross entropy in both directions; all fitting captions of the batch count as right."""
    image = F.normalize(model.encode_image(normalise(batch.images)), dim=-1)
    text = F.normalize(encode_short(model, batch.tokens), dim=-1)
    return contrast(model, image, text, batch.target)


def learning_rate(step: int, steps: int, peak: float, warmup: int = 30) -> float:
    """The rate of a step: linear warm-up, then half a cosine down to a hundredth of ``peak``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return cosine(peak, (step - warmup) / max(1, steps - warmup))


def pretrain(args: argparse.Namespace, recipe: Recipe) -> open_clip.CLIP:
    """Train from scratch; the model in evaluation mode."""
    register()
    model = fresh_model(MODEL, args.seed, "pretrain", "initial")
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
    parser.add_argument("--out", required=True, help="file of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    save_weights(pretrain(args, Recipe()), Path(args.out))


if __name__ == "__main__":
    main()
