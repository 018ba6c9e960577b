"""Parts of a pre-training step."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from safetensors.torch import save_file
from torch import Tensor, nn

from promptfed.shared.seeds import derive_seed

MAX_LOGIT_SCALE = 50.0


def fresh_model(name: str, seed: int, *keys: str) -> open_clip.CLIP:
    """A model with seeded initial weights. The state of torch's global generator does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, *keys))
        return open_clip.create_model(name)


def normalise(images: Tensor) -> Tensor:
    """Images (B, 3, H, W) in [0, 255], normalised with the mean and deviation of CLIP's training images; float."""
    mean = torch.tensor(OPENAI_DATASET_MEAN).view(1, 3, 1, 1)
    std = torch.tensor(OPENAI_DATASET_STD).view(1, 3, 1, 1)
    return (images.float() / 255 - mean) / std


def encode_short(model: open_clip.CLIP, tokens: Tensor) -> Tensor:
    """Text features (B, d_e) of tokens (B, L) without trailing padding; the causal mask makes this exact."""
    length = tokens.shape[1]
    x = model.token_embedding(tokens) + model.positional_embedding[:length]
    x = model.transformer(x, attn_mask=model.attn_mask[:length, :length])
    x = model.ln_final(x)[torch.arange(len(tokens)), tokens.argmax(dim=-1)]
    features: Tensor = x @ model.text_projection
    return features


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
