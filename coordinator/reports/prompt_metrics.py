"""Metrics of learned prompts: their drift, the similarity of clients' changes, and the nearest words.

Pure functions of tensors; sums are in float64. Notation: ``K`` clients, ``V`` words, ``m`` context vectors, ``d_t``
width of the text tower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from promptfed.shared.api.insight_schemas import TensorDrift
from promptfed.shared.tensors import norm

COLUMNS = 1 << 16  # entries of all updates that are worked on together in float64
Source = Path | bytes
"""Safetensors: a file, or its content."""

SAMPLE = 256  # words whose nearest other word says how far apart words are


def drift(
    start: Mapping[str, Tensor], now: Mapping[str, Tensor], before: Mapping[str, Tensor] | None = None
) -> dict[str, TensorDrift]:
    """The drift of each tensor that both have in the same shape, and its step since ``before``.

    Rows that joined later have no start.
    """
    drifts = {}
    for name in sorted(start.keys() & now.keys()):
        if start[name].shape == now[name].shape and start[name].numel():
            length = norm({name: start[name]})
            distance, step = _distance(name, start, now), _distance(name, before or {}, now)
            relative, relative_step = (
                value / length if length > 0 and value is not None else None for value in (distance, step)
            )
            assert distance is not None
            drifts[name] = TensorDrift(distance=distance, relative=relative, step=step, relative_step=relative_step)
    return drifts


def _distance(name: str, start: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> float | None:
    if name not in start or start[name].shape != now[name].shape:
        return None
    return norm({name: now[name].double() - start[name].double()})


def cosines(updates: Sequence[Source], before: Mapping[str, Tensor]) -> list[list[float | None]]:
    """Cosines ``(K, K)`` between clients' changes: their updates minus the state ``before`` that they began with.

    A tensor that the state does not have in the update's shape (such as pFedPG's ΔP) is a change by itself.
    Updates are safetensors, in files or as bytes, and read tensor by tensor. None beside a client that changed nothing.
    """
    gram = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in _float_names(updates):
        rows = torch.stack([_tensor(update, name).flatten() for update in updates])
        start = before.get(name)
        same = start is not None and start.numel() == rows.shape[1]
        for columns in torch.split(torch.arange(rows.shape[1]), COLUMNS):
            part = rows[:, columns].double()
            if start is not None and same:
                part = part - start.flatten()[columns].double()
            gram += part @ part.T
    lengths = gram.diagonal().sqrt()
    return [
        [_cosine(gram[i, j].item(), (lengths[i] * lengths[j]).item()) for j in range(len(updates))]
        for i in range(len(updates))
    ]


def _cosine(product: float, lengths: float) -> float | None:
    return max(-1.0, min(1.0, product / lengths)) if lengths > 0 and math.isfinite(product) else None


def _float_names(updates: Sequence[Source]) -> list[str]:
    """The float tensors that every update has in the same shape."""
    shared: dict[str, list[int]] | None = None
    for update in updates:
        shapes = _float_shapes(update)
        shared = shapes if shared is None else {n: s for n, s in shared.items() if shapes.get(n) == s}
    return sorted(shared or {})


def _float_shapes(update: Source) -> dict[str, list[int]]:
    if isinstance(update, bytes):
        return {name: list(part.shape) for name, part in load(update).items() if part.dtype == torch.float32}
    with safe_open(update, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: part.get_shape() for name, part in slices.items() if part.get_dtype() == "F32"}


def _tensor(update: Source, name: str) -> Tensor:
    if isinstance(update, bytes):
        return load(update)[name]
    with safe_open(update, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


@dataclass(frozen=True)
class Plane:
    """Points by name in the plane of the first two principal components, and each component's share of variance."""

    points: dict[str, tuple[float, float]]
    explained: tuple[float, float]


def plane(vectors: Mapping[str, Tensor]) -> Plane | None:
    """The two-dimensional PCA of ``vectors``, all of one length; None for fewer than two.

    Signs are chosen so that the largest entry of each component is positive: the same vectors give the same picture.
    """
    names = sorted(vectors)
    if len(names) < 2:
        return None
    rows = torch.stack([vectors[name].flatten() for name in names]).double()
    centred = rows - rows.mean(0)
    left, sizes, right = torch.linalg.svd(centred, full_matrices=False)
    signs = torch.sign(right[torch.arange(len(right)), right.abs().argmax(1)])
    scores = left * (sizes * signs)
    total = float(sizes.square().sum())
    if scores.shape[1] == 1:
        scores, sizes = torch.cat([scores, torch.zeros_like(scores)], 1), torch.cat([sizes, sizes.new_zeros(1)])
    shares = [float(size.square()) / total if total > 0 else 0.0 for size in sizes[:2]]
    points = {name: (float(x), float(y)) for name, (x, y) in zip(names, scores[:, :2].tolist(), strict=True)}
    return Plane(points, (shares[0], shares[1]))


def nearest(vectors: Tensor, embeddings: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """For each of ``vectors (m, d_t)`` the rows of ``embeddings (V, d_t)`` that are nearest (L2), and the distances."""
    distances = torch.cdist(vectors.float(), embeddings, compute_mode="donot_use_mm_for_euclid_dist")
    least = distances.topk(min(count, len(embeddings)), largest=False)
    return [
        list(zip(rows, values, strict=True))
        for rows, values in zip(least.indices.tolist(), least.values.tolist(), strict=True)
    ]


def spacing(embeddings: Tensor) -> float | None:
    """The median distance of a word to its nearest other word, over ``SAMPLE`` evenly chosen words; None for one word.

    It is the yardstick for a context's distances: a vector much farther from its nearest word than words are from
    each other is no word.
    """
    if len(embeddings) < 2:
        return None
    chosen = torch.arange(0, len(embeddings), max(1, len(embeddings) // SAMPLE))[:SAMPLE]
    distances = torch.cdist(embeddings[chosen], embeddings)
    distances[torch.arange(len(chosen)), chosen] = math.inf
    return float(distances.min(dim=1).values.median())
