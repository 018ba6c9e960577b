"""Deep prompts in both towers, and PLAN's equations, written out slowly: one image, one class, one token at a time."""

from __future__ import annotations

from functools import cache
from typing import Any

import open_clip
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from tests.support.literal import cross_entropy


@cache
def tokenizer_of(model: str) -> Any:
    """open_clip's tokenizer, which takes long to make."""
    return open_clip.get_tokenizer(model)


def text_feature(backbone: Backbone, prompts: Tensor, name: str) -> Tensor:
    """``(d_e,)`` feature of a class: prompts ``(depth, m, d_t)`` replace their slots at each of the first blocks."""
    model, m = backbone.model, prompts.shape[1]
    tokenizer = tokenizer_of(backbone.model_name)
    words = (
        [tokenizer.sot_token_id] + [0] * m + tokenizer.encode(name.replace("_", " ") + ".") + [tokenizer.eot_token_id]
    )
    ids = torch.tensor(words + [0] * (model.context_length - len(words)))
    rows = model.token_embedding(ids)
    for number, block in enumerate(model.transformer.resblocks):
        if number == 0:
            rows = torch.cat([rows[:1], prompts[0], rows[1 + m :]]) + model.positional_embedding
        elif number < len(prompts):
            rows = torch.cat([rows[:1], prompts[number], rows[1 + m :]])
        rows = block(rows.unsqueeze(0), attn_mask=model.attn_mask)[0]
    feature = model.ln_final(rows)[len(words) - 1] @ model.text_projection
    return feature / feature.norm()


def pooled_feature(backbone: Backbone, prompts: Tensor, image: Tensor) -> Tensor:
    """``(d_v,)`` of an image ``(3, H, W)``: [cls], prompts ``(depth, m, d_v)``, patches; slots renewed each block."""
    visual, m = backbone.model.visual, prompts.shape[1]
    patches = visual.conv1(image.unsqueeze(0))[0].flatten(1).T
    rows = torch.cat([visual.class_embedding.unsqueeze(0), patches]) + visual.positional_embedding
    for number, block in enumerate(visual.transformer.resblocks):
        if number == 0:
            rows = visual.ln_pre(torch.cat([rows[:1], prompts[0], rows[1:]]))
        elif number < len(prompts):
            rows = torch.cat([rows[:1], prompts[number], rows[1 + m :]])
        rows = block(rows.unsqueeze(0))[0]
    return visual.ln_post(rows[0])


def image_feature(backbone: Backbone, prompts: Tensor, image: Tensor) -> Tensor:
    """``(d_e,)`` normalised feature of an image under visual prompts."""
    feature = pooled_feature(backbone, prompts, image) @ backbone.model.visual.proj
    return feature / feature.norm()


def logits(backbone: Backbone, text: Tensor, visual: Tensor, names: list[str], image: Tensor) -> Tensor:
    """``(C,)`` cos(w_c, f)/τ (Eq. 1) under text and visual prompts."""
    feature = image_feature(backbone, visual, image)
    return torch.stack([backbone.logit_scale * text_feature(backbone, text, name) @ feature for name in names])


def divergence(reference: Tensor, scores: Tensor) -> Tensor:
    """Σ_j p^g_j·log(p^g_j/p^k_j) (one image's part of Eq. 9) of two vectors of logits ``(C,)``."""
    p, q = torch.softmax(reference, 0), torch.softmax(scores, 0)
    return torch.stack([p[j] * torch.log(p[j] / q[j]) for j in range(len(p))]).sum()


def local_loss(
    backbone: Backbone,
    text: Tensor,
    visual: Tensor,
    names: list[str],
    images: Tensor,
    labels: Tensor,
    reference: Tensor | None,
    alpha: float,
) -> Tensor:
    """Eq. 10 over a batch; ``reference (B, C)`` are the global prediction's logits."""
    total = []
    for row, (image, label) in enumerate(zip(images, labels, strict=True)):
        scores = logits(backbone, text, visual, names, image)
        value = cross_entropy(scores, int(label))
        if reference is not None:
            value = value + alpha * divergence(reference[row].detach(), scores)
        total.append(value)
    return torch.stack(total).mean()


def perceptron(token: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, residual: bool) -> Tensor:
    """x + W₂·ReLU(W₁x + b₁) + b₂ of one token ``(d,)``; without the skip: no x."""
    hidden = torch.clamp(w1 @ token + b1, min=0)
    return (token if residual else 0) + w2 @ hidden + b2


def aggregated(parts: dict[str, Tensor], modality: str, prompts: list[Tensor], residual: bool = True) -> Tensor:
    """Eq. 12 and 13, block by block: ``(depth, m, d)`` of the clients' prompts ``(depth, m, d)``."""
    return torch.stack([_block(parts, modality, prompts, block, residual)[1] for block in range(len(prompts[0]))])


def shares(parts: dict[str, Tensor], modality: str, prompts: list[Tensor], residual: bool = True) -> Tensor:
    """γ ``(K, depth)`` (Eq. 12)."""
    return torch.stack(
        [_block(parts, modality, prompts, block, residual)[0] for block in range(len(prompts[0]))], dim=1
    )


def _block(
    parts: dict[str, Tensor], modality: str, prompts: list[Tensor], block: int, residual: bool
) -> tuple[Tensor, Tensor]:
    def mapped(net: str, token: Tensor) -> Tensor:
        w1, b1, w2, b2 = (parts[f"{modality}_aggregator.{net}.{part}"][block] for part in ("w1", "b1", "w2", "b2"))
        return perceptron(token, w1, b1, w2, b2, residual)

    query = parts[f"{modality}_aggregator.query"][block]
    scores = [
        sum(torch.dot(query[token], mapped("fq", one[block][token])) for token in range(len(query))) for one in prompts
    ]
    weights = [torch.exp(score - max(scores)) for score in scores]
    gamma = torch.stack([weight / sum(weights) for weight in weights])
    made = [
        sum(gamma[k] * mapped("fa", one[block][token]) for k, one in enumerate(prompts)) for token in range(len(query))
    ]
    return gamma, torch.stack(made)
