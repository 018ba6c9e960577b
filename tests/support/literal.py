"""The methods' equations written out slowly: one class at a time, all positions, no cache, no shared prefix."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import open_clip
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods.core.interface import ClientContext
from promptfed.shared.methods.core.training import batches, learning_rate
from promptfed.shared.seeds import generator
from promptfed.shared.tensors import Tensors

Loss = Callable[[Tensors, Tensor], Tensor]


@cache
def tokenizer_of(model_name: str) -> Any:
    """open_clip's tokenizer, read from disk once."""
    return open_clip.get_tokenizer(model_name)


def text_feature(backbone: Backbone, context: Tensor, name: str) -> Tensor:
    """``(d_e,)`` normalised feature of ``[SOS] ctx×m name . [EOT]`` over the tower's full length."""
    feature = raw_text_feature(backbone, context, name)
    return feature / feature.norm()


def raw_text_feature(backbone: Backbone, context: Tensor, name: str) -> Tensor:
    """As `text_feature`, at the length that the tower gives it."""
    model = backbone.model
    length, m = model.context_length, len(context)
    tokenizer = tokenizer_of(backbone.model_name)
    words = tokenizer.encode(name.replace("_", " ") + ".")
    ids = torch.zeros(length, dtype=torch.long)
    ids[0] = tokenizer.sot_token_id
    ids[1 + m : 1 + m + len(words)] = torch.tensor(words)
    end = 1 + m + len(words)
    ids[end] = tokenizer.eot_token_id
    rows = model.token_embedding(ids)
    rows = torch.cat([rows[:1], context, rows[1 + m :]]) + model.positional_embedding
    rows = model.transformer(rows.unsqueeze(0), attn_mask=model.attn_mask)[0]
    feature: Tensor = model.ln_final(rows)[end] @ model.text_projection
    return feature


def cross_entropy(logits: Tensor, label: int) -> Tensor:
    """−log of the softmax probability of ``label`` among ``logits (C,)``."""
    return torch.logsumexp(logits, 0) - logits[label]


def context_loss(backbone: Backbone, context: Tensor, names: list[str], features: Tensor, labels: Tensor) -> Tensor:
    """Mean over the images of CE(τ⁻¹·⟨I(x), T(ctx, y)⟩), one image and one class at a time."""
    texts = [text_feature(backbone, context, name) for name in names]
    losses = []
    for feature, label in zip(features, labels, strict=True):
        logits = torch.stack([backbone.logit_scale * torch.dot(feature, text) for text in texts])
        losses.append(cross_entropy(logits, int(label)))
    return torch.stack(losses).mean()


def sgd(
    start: Tensor,
    gradients: Callable[[Tensor, int], Tensor],
    steps: int,
    rate: float,
    momentum: float,
    weight_decay: float,
) -> Tensor:
    """SGD written out: v ← μ·v + (g + λ·w), w ← w − η·v."""
    weight, velocity = start.clone(), torch.zeros_like(start)
    for step in range(steps):
        gradient = gradients(weight, step) + weight_decay * weight
        velocity = momentum * velocity + gradient
        weight = weight - rate * velocity
    return weight


def training(context: ClientContext, start: Tensors, loss: Loss, rate: float | None = None) -> Tensors:
    """E epochs of SGD by hand over all tensors of ``start``; ``loss(tensors, rows of the batch)``.

    The rate is the schedule's unless given.
    """
    draws = generator(context.seed, context.round, context.phase, context.client, "batches")
    given = context.training
    orders = list(batches(len(context.train), given.batch_size, given.epochs, draws))
    sizes = [value.numel() for value in start.values()]

    def parts(row: Tensor) -> Tensors:
        split = torch.split(row, sizes)
        return {name: value.view_as(start[name]) for name, value in zip(start, split, strict=True)}

    def gradient(row: Tensor, step: int) -> Tensor:
        row = row.clone().requires_grad_()
        return torch.autograd.grad(loss(parts(row), orders[step]), row)[0]

    whole = torch.cat([value.flatten() for value in start.values()])
    rate = learning_rate(given, context.round, context.rounds) if rate is None else rate
    return parts(sgd(whole, gradient, len(orders), rate, given.momentum, given.weight_decay))


def plain_loss(context: ClientContext) -> Loss:
    """The cross-entropy of ``context`` among the task's classes."""

    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        features, labels = context.train.features()[rows], context.train.labels[rows]
        return context_loss(context.backbone, tensors["context"], list(context.class_names), features, labels)

    return loss
