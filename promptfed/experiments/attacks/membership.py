"""Membership inference: how well scores tell training images from others, and the lower bound on ε that follows.

Scores are higher for members. If the lower bound on ε is above the claimed ε, the mechanism has a defect. Sources: Yeom
et al., 2018 (loss); Carlini et al., "Membership Inference Attacks From First Principles", 2022 (likelihood ratios,
rates at few false alarms); Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special, stats

from promptfed.shared.methods.core.interface.base import Classifier, Split
from promptfed.shared.metrics import auroc

Scores = NDArray[np.float64]
LabelledLogits = tuple[NDArray[np.float64], NDArray[np.int64]]  # (n, C) and (n,)
CHUNK = 256  # images that are classified at once
ENOUGH = 10  # expected false alarms that an estimate of a rate needs
LEAST_REFERENCES = 4
OWN_SPREAD = 16  # references from which on each image has a standard deviation of its own
CONFIDENCE = 0.95
MOST_EPSILON = 50.0


@dataclass(frozen=True)
class Rate:
    """Share of members found at a bound on false alarms, with its exact interval; None: too few non-members."""

    at: float
    found: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Attack:
    """The result of one attack on so many ``members`` and ``others``."""

    name: str
    members: int
    others: int
    auc: float
    auc_low: float
    auc_high: float
    rates: tuple[Rate, ...]
    epsilon: float


def interval(members: Scores, others: Scores, draws: int = 1000, seed: int = 0) -> tuple[float, float]:
    """A 95 % interval of the area under the ROC curve, by resampling members and others."""
    random = np.random.default_rng(seed)
    areas = [auroc(random.choice(members, len(members)), random.choice(others, len(others))) for _ in range(draws)]
    low, high = np.quantile(areas, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def rate_at(members: Scores, others: Scores, at: float) -> Rate:
    """Share of members above the threshold that at most the share ``at`` of the others reach."""
    if len(others) < ENOUGH / at:
        return Rate(at, None, None, None)
    threshold = np.sort(others)[::-1][math.floor(at * len(others))]
    above = int((members > threshold).sum())
    low, high = clopper_pearson(above, len(members))
    return Rate(at, above / len(members), low, high)


def clopper_pearson(successes: int, trials: int) -> tuple[float, float]:
    """The exact two-sided interval of a binomial rate, with 95 % confidence."""
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if successes == 0 else float(stats.beta.ppf(tail, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(stats.beta.ppf(1 - tail, successes + 1, trials - successes))
    return low, high


def epsilon_bound(members: Scores, others: Scores, delta: float) -> float:
    """ε ≥ ln((TPR_low − δ)/FPR_high), with 95 % confidence; the threshold from one half, the rates from the other.

    At least 0. Both rates' one-sided bounds hold together with 95 %.
    """
    threshold = _best_threshold(members[::2], others[::2], delta)
    return _bound(members[1::2], others[1::2], threshold, delta)


def _best_threshold(members: Scores, others: Scores, delta: float) -> float:
    candidates = np.unique(others)
    return float(max(candidates, key=lambda threshold: _bound(members, others, float(threshold), delta)))


def _bound(members: Scores, others: Scores, threshold: float, delta: float) -> float:
    # Two-sided intervals of 95 %, each used on one side: 2.5 % + 2.5 %.
    low, _ = clopper_pearson(int((members > threshold).sum()), len(members))
    _, high = clopper_pearson(int((others > threshold).sum()), len(others))
    return max(0.0, math.log((low - delta) / high)) if low > delta else 0.0


def one_run_bound(guesses: int, right: int, canaries: int, delta: float, chance: float = 0.05) -> float:
    """The largest ε that ``right`` of ``guesses`` rule out, if each of ``canaries`` took part by a fair coin.

    Steinke et al., 2023, Theorem 5.2: under (ε, δ) at least v right have probability f(v) + 2mδ·max_i (f(v − i) −
    f(v))/i at most, f(v) = P[Bin(r, e^ε/(1 + e^ε)) ≥ v].
    """
    if guesses == 0 or _one_run_chance(0.0, guesses, right, canaries, delta) > chance:
        return 0.0
    low, high = 0.0, MOST_EPSILON
    while high - low > 1e-4:
        middle = (low + high) / 2
        if _one_run_chance(middle, guesses, right, canaries, delta) <= chance:
            low = middle
        else:
            high = middle
    return low


def _one_run_chance(epsilon: float, guesses: int, right: int, canaries: int, delta: float) -> float:
    sure = 1 / (1 + math.exp(-epsilon))
    at_least = stats.binom.sf(right - 1, guesses, sure)
    if right == 0 or delta == 0:
        return float(at_least)
    steps = np.arange(1, right + 1)
    more = (stats.binom.sf(right - 1 - steps, guesses, sure) - at_least) / steps
    return float(at_least + 2 * canaries * delta * more.max())


def attack(name: str, members: Scores, others: Scores, delta: float = 0.0) -> Attack:
    """The result of an attack with these scores."""
    low, high = interval(members, others)
    rates = tuple(rate_at(members, others, at) for at in (0.01, 0.001))
    bound = epsilon_bound(members, others, delta)
    return Attack(name, len(members), len(others), auroc(members, others), low, high, rates, bound)


def loss_attacks(
    parts: Sequence[LabelledLogits], references: Sequence[Sequence[LabelledLogits]], delta: float = 0.0
) -> list[Attack]:
    """The attacks on members and others, the two ``parts``.

    ``loss``: minus the loss. ``lira``: the likelihood ratio of the log odds, if there are at least four ``references``,
    the same parts' logits by classifiers that were not trained on these images.
    """
    members, others = parts
    attacks = [attack("loss", -losses(*members), -losses(*others), delta)]
    if len(references) >= LEAST_REFERENCES:
        first, second = (
            likelihood_ratio(log_odds(*own), [log_odds(*reference[part]) for reference in references])
            for part, own in enumerate(parts)
        )
        attacks.append(attack("lira", first, second, delta))
    return attacks


def likelihood_ratio(scores: Scores, references: Sequence[Scores], own_spread: float = OWN_SPREAD) -> Scores:
    """LiRA, offline: Φ((φ − μ)/σ) ``(n,)``, with μ and σ of the references' scores of each image.

    ``references`` are at least four, each scores ``(n,)`` of the same images by what was not trained on them. Fewer
    than ``own_spread`` of them share one σ.

    Raises:
        ValueError: there are fewer than four references.
    """
    if len(references) < LEAST_REFERENCES:
        raise ValueError(f"{len(references)} references are too few for a likelihood ratio: give at least 4")
    table = np.stack(references)
    variance = table.var(axis=0, ddof=1)
    spread = np.sqrt(variance if len(table) >= own_spread else variance.mean())
    ratio: Scores = stats.norm.cdf((scores - table.mean(axis=0)) / np.maximum(spread, 1e-9))
    return ratio


def logits_of(classifier: Classifier, split: Split) -> LabelledLogits:
    """Logits ``(n, C)`` and labels ``(n,)`` of a split's images."""
    with torch.no_grad():
        chunks = [classifier.logits(split, rows) for rows in torch.split(torch.arange(len(split.labels)), CHUNK)]
    return torch.cat(chunks).double().cpu().numpy(), split.labels.numpy()


def log_odds(logits: NDArray[np.float64], labels: NDArray[np.int64]) -> Scores:
    """φ = ln p_y/(1 − p_y) ``(n,)`` of ``logits (n, C)``, in a form that does not overflow."""
    others = np.where(np.arange(logits.shape[1]) == labels[:, None], -np.inf, logits)
    odds: Scores = logits[np.arange(len(labels)), labels] - special.logsumexp(others, axis=1)
    return odds


def losses(logits: NDArray[np.float64], labels: NDArray[np.int64]) -> Scores:
    """Cross-entropy ``(n,)`` of ``logits (n, C)``."""
    entropies: Scores = special.logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]
    return entropies
