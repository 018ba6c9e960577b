"""Invented answers of a classifier, with counts that lie on and beside the ends of ranges."""

from __future__ import annotations

import numpy as np

from promptfed.shared.metrics.site_figures import Answered


def confusion_of(draws: np.random.Generator) -> np.ndarray:
    """Confusion matrices (subgroups, classes, classes) of a site: small, large, or full of ranges' first and last."""
    classes, groups = int(draws.integers(2, 6)), int(draws.integers(1, 4))
    mean = float(draws.choice([2, 6, 12, 40]))
    counts = draws.poisson(mean * draws.random((groups, classes, classes)) ** 2)
    counts += np.eye(classes, dtype=int)[None] * draws.poisson(mean * 3, (groups, classes, 1))
    kind = draws.integers(0, 4)
    if kind == 1:
        counts = counts // 10 * 10
    elif kind == 2:
        counts = np.minimum(counts, 9)
    elif kind == 3:
        counts = counts // 10 * 10 + 9 * (draws.random(counts.shape) < 0.7)
    counts[0, 0, 0] += counts.sum() == 0
    return counts


def answered(confusion: np.ndarray, draws: np.random.Generator) -> Answered:
    """Answers with these confusion matrices; their scores are random."""
    rows = np.repeat(np.argwhere(confusion >= 0), confusion.ravel(), axis=0)
    classes = np.arange(confusion.shape[1])
    return Answered(
        names=[str(k) for k in classes],
        truth=rows[:, 1:2] == classes,
        decided=rows[:, 2:3] == classes,
        scores=_scores(rows[:, 2], draws.dirichlet(np.full(len(classes), draws.choice([0.3, 1.0])), len(rows))),
        subgroups={"scanner": [str(group) for group in rows[:, 0]]} if len(confusion) > 1 else {},
    )


def _scores(answers: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The scores with each image's highest one exchanged for that of its answer."""
    every, likeliest = np.arange(len(scores)), scores.argmax(axis=1)
    changed = scores.copy()
    changed[every, answers], changed[every, likeliest] = scores[every, likeliest], scores[every, answers]
    return changed


def tables_of(draws: np.random.Generator) -> np.ndarray:
    """Tables (subgroups, classes, 2, 2) of images with several labels: small, large, or of ranges' first and last."""
    classes, groups = int(draws.integers(1, 6)), int(draws.integers(1, 4))
    sizes = draws.poisson(float(draws.choice([4, 15, 40, 120])), groups)
    sizes[0] += sizes.sum() == 0
    if draws.random() < 0.5:
        sizes = sizes // 10 * 10 + 9 * (draws.random(groups) < 0.5)
        sizes[0] += 10 * (sizes.sum() == 0)
    shares = draws.dirichlet([0.5, 0.5, 0.5, 1.5], (groups, classes))
    each = [[draws.multinomial(size, share) for share in row] for size, row in zip(sizes, shares, strict=True)]
    return np.array(each).reshape(groups, classes, 2, 2)


def answered_several(tables: np.ndarray, draws: np.random.Generator) -> Answered:
    """Answers with these tables, classes independent of one another; their scores are random."""
    groups, classes = tables.shape[:2]
    sizes = tables[:, 0].sum(axis=(1, 2))
    drawn = [
        np.stack([draws.permutation(np.repeat(np.arange(4), table.ravel())) for table in tables[group]], axis=1)
        for group in range(groups)
    ]
    cells = np.concatenate(drawn)
    return Answered(
        names=[str(k) for k in range(classes)],
        truth=cells >= 2,
        decided=cells % 2 == 1,
        scores=draws.random(cells.shape),
        subgroups={"scanner": [str(group) for group in np.repeat(range(groups), sizes)]} if groups > 1 else {},
        exclusive=False,
    )
