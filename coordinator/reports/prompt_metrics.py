"""Metrics of learned prompts: their drift, the similarity of clients' changes, and the nearest words.

Pure functions of tensors; sums are in float64. Notation: ``K`` clients, ``V`` words, ``m`` context vectors, ``d_t``
width of the text tower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from promptfed.shared.api.insight_schemas import TensorDrift
from promptfed.shared.tensors import Array, Arrays, decode_place, norm
from promptfed.shared.tensors.arrays import double

COLUMNS = 1 << 16  # entries of all updates that are worked on together in float64
Source = Path | bytes
"""Safetensors: a file, or its content."""

BLOCK = 4096  # words that are compared at once
SAMPLE = 256  # words whose nearest other word says how far apart words are


def drift(
    start: Mapping[str, Array], now: Mapping[str, Array], before: Mapping[str, Array] | None = None
) -> dict[str, TensorDrift]:
    """The drift of each tensor that both have in the same shape, and its step since ``before``.

    Rows that joined later have no start.
    """
    drifts = {}
    for name in sorted(start.keys() & now.keys()):
        if start[name].shape == now[name].shape and start[name].size:
            length = norm({name: start[name]})
            distance, step = _distance(name, start, now), _distance(name, before or {}, now)
            relative, relative_step = (
                value / length if length > 0 and value is not None else None for value in (distance, step)
            )
            assert distance is not None
            drifts[name] = TensorDrift(distance=distance, relative=relative, step=step, relative_step=relative_step)
    return drifts


def _distance(name: str, start: Mapping[str, Array], now: Mapping[str, Array]) -> float | None:
    if name not in start or start[name].shape != now[name].shape:
        return None
    return norm({name: double(now[name]) - double(start[name])})


def cosines(updates: Sequence[Source], starts: Sequence[Mapping[str, Array]]) -> list[list[float | None]]:
    """Cosines ``(K, K)`` between clients' changes: each one's update minus the state that it began with.

    A tensor that the state does not have in the update's shape (such as pFedPG's ΔP) is a change by itself.
    Updates are safetensors, in files or as bytes, and read tensor by tensor. None beside a client that changed nothing.
    """
    if not updates:
        return []
    gram = np.zeros((len(updates), len(updates)))
    sent = [decode_place(update)[0] for update in updates]
    for name in _float_names(sent):
        rows = [update[name].reshape(-1) for update in sent]
        begun = [_flat(start.get(name), rows[0].size) for start in starts]
        for first in range(0, rows[0].size, COLUMNS):
            columns = slice(first, first + COLUMNS)
            part = double(np.stack([row[columns] for row in rows]))
            for row, start in zip(part, begun, strict=True):
                if start is not None:
                    row -= start[columns]
            gram += part @ part.T
    lengths = np.sqrt(gram.diagonal())
    count = range(len(updates))
    return [[_cosine(float(gram[i, j]), float(lengths[i] * lengths[j])) for j in count] for i in count]


def _flat(start: Array | None, size: int) -> Array | None:
    """The entries of a tensor, if there are as many as in the update's."""
    return start.reshape(-1) if start is not None and start.size == size else None


def _cosine(product: float, lengths: float) -> float | None:
    return max(-1.0, min(1.0, product / lengths)) if lengths > 0 and math.isfinite(product) else None


def _float_names(updates: Sequence[Arrays]) -> list[str]:
    """The float32 tensors that every update has in the same shape."""
    first, *others = (
        {name: part.shape for name, part in update.items() if part.dtype == np.float32} for update in updates
    )
    return sorted(name for name, shape in first.items() if all(shapes.get(name) == shape for shapes in others))


@dataclass(frozen=True)
class Plane:
    """Points by name in the plane of the first two principal components, and each component's share of variance."""

    points: dict[str, tuple[float, float]]
    explained: tuple[float, float]


def plane(vectors: Mapping[str, Array]) -> Plane | None:
    """The two-dimensional PCA of ``vectors``, all of one length; None for fewer than two.

    Signs are chosen so that the largest entry of each component is positive: the same vectors give the same picture.
    """
    names = sorted(vectors)
    if len(names) < 2:
        return None
    rows = double(np.stack([vectors[name].reshape(-1) for name in names]))
    centred = rows - rows.mean(0)
    left, sizes, right = np.linalg.svd(centred, full_matrices=False)
    signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(1)])
    scores = left * (sizes * signs)
    total = float(np.square(sizes).sum())
    if scores.shape[1] == 1:
        scores, sizes = np.concatenate([scores, np.zeros_like(scores)], 1), np.append(sizes, 0.0)
    shares = [float(size**2) / total if total > 0 else 0.0 for size in sizes[:2]]
    points = {name: (float(x), float(y)) for name, (x, y) in zip(names, scores[:, :2].tolist(), strict=True)}
    return Plane(points, (shares[0], shares[1]))


def nearest(vectors: Array, embeddings: Array, count: int) -> list[list[tuple[int, float]]]:
    """For each of ``vectors (m, d_t)`` the rows of ``embeddings (V, d_t)`` that are nearest (L2), and the distances."""
    found = []
    for vector in vectors:
        distances = np.concatenate([_lengths(block - vector) for block in _blocks(embeddings)])
        rows = np.argsort(distances, kind="stable")[:count]
        found.append(list(zip(rows.tolist(), distances[rows].tolist(), strict=True)))
    return found


def spacing(embeddings: Array) -> float | None:
    """The median distance of a word to its nearest other word, over ``SAMPLE`` evenly chosen words; None for one word.

    It is the yardstick for a context's distances: a vector much farther from its nearest word than words are from
    each other is no word. Of an even number of distances it is the lower one of the middle two.
    """
    if len(embeddings) < 2:
        return None
    chosen = np.arange(0, len(embeddings), max(1, len(embeddings) // SAMPLE))[:SAMPLE]
    least = np.full(len(chosen), math.inf)
    words, start = double(embeddings[chosen]), 0
    lengths = np.square(words).sum(1)
    for block in _blocks(embeddings):
        squares = lengths[:, None] + np.square(block, dtype=np.float64).sum(1) - 2 * words @ double(block).T
        own = (chosen >= start) & (chosen < start + len(block))
        squares[own, chosen[own] - start] = math.inf
        least, start = np.minimum(least, squares.min(1)), start + len(block)
    return float(np.sqrt(np.maximum(np.sort(least)[(len(least) - 1) // 2], 0.0)))


def _blocks(embeddings: Array) -> Iterator[Array]:
    """The rows, some at a time."""
    for start in range(0, len(embeddings), BLOCK):
        yield embeddings[start : start + BLOCK]


def _lengths(rows: Array) -> NDArray[np.float64]:
    """The L2 norm of each row."""
    lengths: NDArray[np.float64] = np.sqrt(np.square(rows, dtype=np.float64).sum(1))
    return lengths
