"""Two rows of benches, paired picture by picture: McNemar's exact test and a paired bootstrap.

McNemar, "Note on the sampling error of the difference between correlated proportions", 1947; exact: a two-sided
binomial test of the pairs on which only one of the two is right. Bootstrap: Efron and Tibshirani, 1993.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from scipy import stats

from promptfed.experiments.bench.results import VARIANT, BenchRun, row_label
from promptfed.experiments.protocols.protocols import ELSEWHERE
from promptfed.sdk.errors import CommandError, Exit

DRAWS = 10_000
Floats = NDArray[np.float64]


class Comparison(BaseModel):
    """``difference`` is a minus b (fractions), with a 95 % interval and ``p_bootstrap`` over resampled pictures.

    ``only_a`` and ``only_b`` count the pictures that only one of the two answers rightly; ``p_mcnemar`` follows from
    them. All three are None if several clients' classifiers answered for a picture, since their mean is used then.
    McNemar's test treats the answers of different seeds as independent: if seeds share pictures, use the bootstrap.
    """

    a: str
    b: str
    test_set: str
    pictures: int
    accuracy_a: float
    accuracy_b: float
    difference: float
    low: float
    high: float
    p_bootstrap: float
    only_a: int | None
    only_b: int | None
    p_mcnemar: float | None


@dataclass(frozen=True)
class Answers:
    """Share of classifiers that were right for each picture ``(N,)``, by seed, kind of test set and pictures."""

    label: str
    right: Mapping[tuple[int, str, str], Floats]


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact two-sided p-value of X ~ Bin(a + b, 1/2); 1 if the two never differ."""
    return float(stats.binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0


def paired_bootstrap(differences: Sequence[Floats], seed: int = 0, draws: int = DRAWS) -> tuple[float, float, float]:
    """The 95 % interval and the two-sided p-value of the mean difference of pairs.

    ``differences`` has one array for each list of pictures: ``(N,)``, or ``(seeds, N)`` if several seeds share the
    list. Pictures are resampled within their list, with all their seeds, so every draw has the same number of pictures
    of each list. p = 2·min(P(d ≤ 0), P(d ≥ 0)), each as (count + 1)/(draws + 1), at most 1.
    """
    lists = [np.atleast_2d(rows) for rows in differences]
    rng = np.random.default_rng(seed)
    sums = np.zeros(draws)
    for rows in (each.sum(axis=0) for each in lists):
        for start in range(0, draws, 500):
            size = min(500, draws - start)
            sums[start : start + size] += rows[rng.integers(len(rows), size=(size, len(rows)))].sum(axis=1)
    means = sums / sum(each.size for each in lists)
    low, high = (float(value) for value in np.quantile(means, [0.025, 0.975]))
    tails = [(int(count) + 1) / (draws + 1) for count in ((means <= 0).sum(), (means >= 0).sum())]
    return low, high, min(1.0, 2 * min(tails))


def answers_of(runs: Sequence[BenchRun], label: str) -> Answers:
    """The answers of the row ``label``: an entry's, or ``entry (variant)``.

    Raises:
        CommandError: no run has answers of this row.
    """
    hits: dict[tuple[int, str, str], list[Floats]] = {}
    labels = {row_label(run, outcomes.split) for run in runs for outcomes in run.outcomes}
    if label not in labels:
        known = ", ".join(sorted(labels)) or "none: they were made by an earlier version; run the bench again"
        raise CommandError(f"there are no answers of {label!r}; rows with answers: {known}", Exit.BAD_INPUT)
    for run in runs:
        for outcomes in run.outcomes:
            split = outcomes.split.partition(VARIANT)[0]
            if row_label(run, outcomes.split) == label and not split.startswith(ELSEWHERE):
                right = np.equal(outcomes.labels, outcomes.predicted).astype(float)
                kind = "unseen" if split == "target" or outcomes.client.startswith("target-") else split
                hits.setdefault((run.seed, kind, outcomes.images), []).append(right)
    return Answers(label, {key: np.mean(rows, axis=0) for key, rows in hits.items()})


def compare(a: Answers, b: Answers) -> list[Comparison]:
    """One comparison for each kind of test set (``test``, ``novel``, ``unseen``, ...) that both were tested on.

    Raises:
        CommandError: they were never tested on the same pictures.
    """
    common = [key for key in a.right if key in b.right]
    if not common:
        text = f"{a.label} and {b.label} were not tested on the same pictures: nothing can be paired"
        raise CommandError(f"{text}; compare runs with the same data, shots and seeds", Exit.BAD_INPUT)
    kinds = list(dict.fromkeys(kind for _, kind, _ in common))
    return [_compared(a, b, kind, [key for key in common if key[1] == kind]) for kind in kinds]


def _compared(a: Answers, b: Answers, kind: str, keys: Sequence[tuple[int, str, str]]) -> Comparison:
    first, second = [a.right[key] for key in keys], [b.right[key] for key in keys]
    by_pictures: dict[str, list[Floats]] = {}
    for (_, _, images), x, y in zip(keys, first, second, strict=True):
        by_pictures.setdefault(images, []).append(x - y)
    low, high, p = paired_bootstrap([np.stack(rows) for rows in by_pictures.values()])
    x, y = np.concatenate(first), np.concatenate(second)
    whole = bool(np.isin(x, (0, 1)).all() and np.isin(y, (0, 1)).all())
    only_a, only_b = int((x > y).sum()), int((x < y).sum())
    return Comparison(
        a=a.label,
        b=b.label,
        test_set=kind,
        pictures=len(x),
        accuracy_a=float(x.mean()),
        accuracy_b=float(y.mean()),
        difference=float((x - y).mean()),
        low=low,
        high=high,
        p_bootstrap=p,
        only_a=only_a if whole else None,
        only_b=only_b if whole else None,
        p_mcnemar=mcnemar(only_a, only_b) if whole else None,
    )
