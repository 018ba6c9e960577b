"""The metrics against literal versions, image by image, and against figures worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from promptfed.shared.metrics import calibration_error, class_accuracies, macro_f1, reliability

SIZES = [1, 2, 17, 400]


def drawn(count: int) -> tuple[list[int], list[int], list[float]]:
    """Labels, answers and confidences, some of them on the edges of bins."""
    rng = random.Random(count)
    labels = [rng.randrange(6) for _ in range(count)]
    predicted = [label if rng.random() < 0.6 else rng.randrange(7) for label in labels]
    sure = [rng.choice([rng.random(), rng.randrange(16) / 15, 1.0, 0.0]) for _ in range(count)]
    return labels, predicted, sure


def literal_bins(sure: list[float], right: list[bool], bins: int) -> list[list[int]]:
    """Which images lie in each bin: the first whose upper edge is not below the confidence."""
    found: list[list[int]] = [[] for _ in range(bins)]
    for index, value in enumerate(sure):
        found[next(k for k in range(bins) if value * bins <= k + 1)].append(index)
    return found


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_the_calibration_error_is_the_papers(count: int, bins: int) -> None:
    labels, predicted, sure = drawn(count)
    right = [a == b for a, b in zip(labels, predicted, strict=True)]
    wanted = 0.0
    for inside, bin in zip(literal_bins(sure, right, bins), reliability(sure, right, bins), strict=True):
        assert bin.count == len(inside)
        if inside:
            accuracy = math.fsum(right[k] for k in inside) / len(inside)
            confidence = math.fsum(sure[k] for k in inside) / len(inside)
            assert abs(bin.accuracy - accuracy) < 1e-12
            assert abs(bin.confidence - confidence) < 1e-12
            assert bin.lower * bins - 1e-9 <= bin.confidence * bins <= bin.upper * bins + 1e-9
            wanted += len(inside) / count * abs(accuracy - confidence)
    assert abs(calibration_error(sure, right, bins) - wanted) < 1e-12


@pytest.mark.parametrize("count", SIZES)
def test_macro_f1_and_class_accuracies_count_one_class_after_the_other(count: int) -> None:
    labels, predicted, _ = drawn(count)
    scores, shares = [], {}
    for k in range(7):
        tp = sum(a == b == k for a, b in zip(labels, predicted, strict=True))
        fp = sum(b == k and a != k for a, b in zip(labels, predicted, strict=True))
        fn = sum(a == k and b != k for a, b in zip(labels, predicted, strict=True))
        if tp + fp + fn:
            scores.append(2 * tp / (2 * tp + fp + fn))
        if tp + fn:
            shares[k] = tp / (tp + fn)
    assert abs(macro_f1(labels, predicted) - sum(scores) / len(scores)) < 1e-12
    found = class_accuracies(labels, predicted)
    assert set(found) == set(shares)
    assert all(abs(found[k] - share) < 1e-12 for k, share in shares.items())


def test_worked_out_by_hand() -> None:
    assert calibration_error([0.9, 0.9, 0.9, 0.9], [1, 1, 1, 0]) == pytest.approx(0.15)
    assert calibration_error([1.0, 1.0], [True, True]) == 0
    assert calibration_error([0.6, 0.95], [0, 1], bins=10) == pytest.approx((0.6 + 0.05) / 2)
    assert macro_f1([0, 0, 1, 1], [0, 0, 0, 1]) == pytest.approx((0.8 + 2 / 3) / 2)
    assert macro_f1([0, 0], [1, 1]) == 0
    assert class_accuracies([0, 0, 1, 1], [0, 0, 0, 1]) == {0: 1.0, 1: 0.5}


def test_lists_that_do_not_fit_are_refused() -> None:
    for sure, right in (([], []), ([0.5], [1, 0])):
        with pytest.raises(ValueError, match="confidences for"):
            calibration_error(sure, right)
    with pytest.raises(ValueError, match="2 labels for 1 answers"):
        macro_f1([0, 1], [0])
