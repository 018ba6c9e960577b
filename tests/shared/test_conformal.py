"""Prediction sets: the histogram's quantile against sorted scores, and coverage over many splits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from promptfed.shared.metrics.conformal import BINS, Calibration, added, calibration_of, prediction_set

NAMES = ["a", "b", "c", "d"]


def answers(count: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Labels and probabilities of an overconfident classifier that is worse at some classes."""
    draws = np.random.default_rng(seed)
    labels = draws.integers(0, 4, count)
    logits = draws.normal(size=(count, 4))
    logits[np.arange(count), labels] += np.array([2.5, 1.5, 1.0, 0.3])[labels]
    shares = np.exp(2 * logits)
    return labels, shares / shares.sum(axis=1, keepdims=True)


def exact(scores: NDArray[Any], coverage: float) -> float:
    rank = math.ceil((len(scores) + 1) * coverage)
    return float(np.sort(scores)[rank - 1]) if rank <= len(scores) else 1.0


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.99])
def test_a_threshold_is_the_exact_one_rounded_up_to_a_bin(coverage: float) -> None:
    for seed in range(50):
        labels, told = answers(int(np.random.default_rng(seed).integers(5, 400)), seed)
        scores = 1 - told[np.arange(len(labels)), labels]
        calibration = calibration_of(labels, told, NAMES)
        assert calibration.images == len(labels)
        found, wanted = calibration.threshold(coverage), exact(scores, coverage)
        assert wanted <= found < wanted + 1 / BINS + 1e-12 or found == wanted == 1.0
        for k, name in enumerate(NAMES):
            own = exact(scores[labels == k], coverage) if (labels == k).any() else 1.0
            assert own <= calibration.thresholds(coverage).get(name, 1.0)


def test_sites_add_up_to_one_site() -> None:
    labels, told = answers(300, 1)
    parts = [calibration_of(labels[rows], told[rows], NAMES) for rows in np.split(np.arange(300), [50, 170])]
    assert added(parts) == calibration_of(labels, told, NAMES)
    assert Calibration.model_validate_json(added(parts).model_dump_json()) == added(parts)


def test_sets_are_those_of_the_definition() -> None:
    told = {"a": 0.6, "b": 0.3, "c": 0.1}
    assert prediction_set(told, 0.7) == ["a", "b"]
    assert prediction_set(told, 0.39) == []
    assert prediction_set(told, 0.0, {"a": 0.3, "c": 0.9}) == ["b", "c"]  # b has no calibration images


def test_an_image_of_no_class_does_not_count() -> None:
    labels, told = answers(10, 2)
    labels[:4] = -1
    assert calibration_of(labels, told, NAMES).images == 6


@pytest.mark.extended
@pytest.mark.parametrize("by_class", [False, True])
def test_sets_cover_what_they_promise_in_the_mean_over_200_splits(by_class: bool) -> None:
    labels, told = answers(12_000, 3)
    covered: list[list[float]] = []
    for seed in range(200):
        order = np.random.default_rng(seed).permutation(len(labels))
        held, new = order[:6_000], order[6_000:]
        calibration = calibration_of(labels[held], told[held], NAMES)
        assert min(sum(bins.values()) for bins in calibration.by_class.values()) >= 1000
        if by_class:
            limits = np.array([calibration.thresholds(0.9)[name] for name in NAMES])
        else:
            limits = np.full(4, calibration.threshold(0.9))
        inside = 1 - told[new, labels[new]] <= limits[labels[new]]
        groups = [labels[new] == k for k in range(4)] if by_class else [np.ones(len(new), dtype=bool)]
        covered.append([float(inside[group].mean()) for group in groups])
    for mean in np.mean(covered, axis=0):
        assert 0.89 <= mean <= 0.91
