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
        scores=draws.dirichlet(np.ones(len(classes)), len(rows)),
        subgroups={"scanner": [str(group) for group in rows[:, 0]]} if len(confusion) > 1 else {},
    )
