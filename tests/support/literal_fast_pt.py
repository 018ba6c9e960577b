"""FaST-PT's equations with loops: one image, one class and one domain at a time, optimizers written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods.core.training import batches
from promptfed.shared.seeds import generator
from promptfed.shared.tensors import Tensors
from tests.support import literal


def whole_text(backbone: Backbone, template: str, name: str) -> Tensor:
    """``(d_e,)`` normalised feature of a template with its class name."""
    with torch.no_grad():
        ids = literal.tokenizer_of(backbone.model_name)([template.replace("{}", name)])
        feature = backbone.model.encode_text(ids)[0]
    return feature / feature.norm()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Of two vectors."""
    return (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt())


def moved(q: Tensors, embedding: Tensor) -> Tensor:
    """Q(I) of one embedding ``(d_e,)``, unit by unit."""
    hidden = [torch.clamp((row * embedding).sum() + bias, min=0) for row, bias in zip(q["w1"], q["b1"], strict=True)]
    return torch.stack(
        [sum(w * h for w, h in zip(row, hidden, strict=True)) + b for row, b in zip(q["w2"], q["b2"], strict=True)]
    )


def transfer_terms(
    q: Tensors,
    embeddings: Tensor,
    labels: Tensor,
    own: list[Tensor],
    target: list[Tensor],
    template: list[Tensor],
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """L_A and L_C (Eq. 1 and 2) as means; texts are lists by class."""
    aligned, consistent = [], []
    for embedding, label in zip(embeddings, labels.tolist(), strict=True):
        there = moved(q, embedding)
        aligned.append(1 - cosine(there - embedding, target[label] - own[label]))
        logits = torch.stack([cosine(there, text) / temperature for text in template])
        consistent.append(literal.cross_entropy(logits, label))
    return torch.stack(aligned).mean(), torch.stack(consistent).mean()


def adamw(
    start: Tensors, gradients: Callable[[Tensors, int], Tensors], steps: int, rate: float, weight_decay: float
) -> Tensors:
    """AdamW written out (β = 0.9, 0.999, ε = 1e-8)."""
    weights = {name: one.clone() for name, one in start.items()}
    first = {name: torch.zeros_like(one) for name, one in start.items()}
    second = {name: torch.zeros_like(one) for name, one in start.items()}
    for step in range(1, steps + 1):
        for name, gradient in gradients(weights, step - 1).items():
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient * gradient
            mean, spread = first[name] / (1 - 0.9**step), second[name] / (1 - 0.999**step)
            weights[name] = weights[name] * (1 - rate * weight_decay) - rate * mean / (spread.sqrt() + 1e-8)
    return weights


def fresh_transform(d_e: int, hidden: int, draws: torch.Generator) -> Tensors:
    """The start of a transform: w1, b1, w2, b2 in this order from U(±1/√inputs)."""
    sizes = {"w1": (hidden, d_e), "b1": (hidden,), "w2": (d_e, hidden), "b2": (d_e,)}
    inputs = {"w1": d_e, "b1": d_e, "w2": hidden, "b2": hidden}
    return {
        name: (torch.rand(*size, generator=draws) * 2 - 1) / math.sqrt(inputs[name]) for name, size in sizes.items()
    }


def trained_transform(
    backbone: Backbone,
    embeddings: Tensor,
    labels: Tensor,
    names: Sequence[str],
    templates: tuple[str, str, str],
    draws: torch.Generator,
    *,
    hidden: int,
    epochs: int,
    batch_size: int,
    weight: float = 0.5,
    rate: float = 1e-3,
    weight_decay: float = 0.05,
) -> Tensors:
    """A transform's whole training; ``templates``: own description, the target's, and the federation's template."""
    own, target, template = ([whole_text(backbone, one, name) for name in names] for one in templates)
    start = fresh_transform(embeddings.shape[1], hidden, draws)
    orders = list(batches(len(labels), batch_size, epochs, draws))

    def gradients(weights: Tensors, step: int) -> Tensors:
        q = {name: one.clone().requires_grad_() for name, one in weights.items()}
        some = orders[step]
        aligned, consistent = transfer_terms(q, embeddings[some], labels[some], own, target, template)
        loss = weight * aligned + (1 - weight) * consistent
        return dict(zip(q, torch.autograd.grad(loss, list(q.values())), strict=True))

    return adamw(start, gradients, len(orders), rate, weight_decay)


def transferred(q: Tensors, embeddings: Tensor) -> Tensor:
    """``(N, d_e)`` normalised Q(I)."""
    found = torch.stack([moved(q, one) for one in embeddings])
    return found / found.norm(dim=1, keepdim=True)


def similarity(prompt: Tensor, other: Tensor) -> Tensor:
    """Cosine of the means over tokens."""
    return cosine(sum(prompt) / len(prompt), sum(other) / len(other))


def domain_loss(
    backbone: Backbone,
    general: Tensor,
    prompt: Tensor,
    description: str,
    names: Sequence[str],
    features: Tensor,
    labels: Tensor,
) -> Tensor:
    """Eq. 6: cross-entropy of [P^G, P^D, class] and the contrastive term."""
    words = backbone.embed_words(description.replace("{}", ""))
    near, far = torch.exp(similarity(prompt, words)), torch.exp(similarity(prompt, general))
    composite = torch.cat([general, prompt])
    return literal.context_loss(backbone, composite, list(names), features, labels) - torch.log(near / (near + far))


def classifier_loss(weight: Tensor, bias: Tensor, embeddings: Tensor, rows: Tensor) -> Tensor:
    """Eq. 8: mean cross-entropy of φ with the domain's row as label."""
    losses = []
    for embedding, row in zip(embeddings, rows.tolist(), strict=True):
        scores = torch.stack([(one * embedding).sum() + b for one, b in zip(weight, bias, strict=True)])
        losses.append(literal.cross_entropy(scores, row))
    return torch.stack(losses).mean()


def sgd_on(
    start: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    count: int,
    purpose: Sequence[str | int],
    *,
    epochs: int,
    batch_size: int,
    rate: float,
    momentum: float,
    weight_decay: float,
) -> Tensor:
    """SGD on ``loss(weight, indices)`` over the batches that are drawn for ``purpose`` (seed, round, phase, client)."""
    orders = list(batches(count, batch_size, epochs, generator(purpose[0], *purpose[1:], "batches")))

    def gradient(weight: Tensor, step: int) -> Tensor:
        weight = weight.clone().requires_grad_()
        return torch.autograd.grad(loss(weight, orders[step]), weight)[0]

    return literal.sgd(start, gradient, len(orders), rate, momentum, weight_decay)
