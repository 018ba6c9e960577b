"""Figures of answers equal their definitions."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from promptfed.shared.metrics.estimates import Estimate, auroc_estimate, class_figures, precision_estimate
from promptfed.shared.metrics.figures import (
    average_precision,
    calibration_error,
    class_accuracies,
    fitted_temperature,
    largest_share,
    macro_f1,
    mean_auroc,
    mean_average_precision,
    nearly_one_class,
)
from promptfed.shared.metrics.pooling import pool

SIZES = [1, 2, 17, 400]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_every_figure_refuses_scores_that_are_not_finite(wrong: float) -> None:
    """They were sorted somewhere: an AUROC of 0.5 and an average precision of 1.0 came out."""
    truth, scores = np.array([True, False, True, False]), np.array([0.9, 0.2, wrong, 0.4])
    figures = (
        lambda: auroc_estimate(truth, scores),
        lambda: average_precision(truth, scores, np.ones((1, 4))),
        lambda: precision_estimate(truth, scores),
        lambda: class_figures("a", truth, scores, truth),
        lambda: mean_average_precision(truth[:, None].astype(int), scores[:, None]),
        lambda: calibration_error(scores, truth),
        lambda: pool(scores, np.ones(4)),
    )
    for figure in figures:
        with pytest.raises(ValueError, match="1 of 4 scores are not finite"):
            figure()
    with pytest.raises(ValueError, match="finite"):
        Estimate(value=wrong, low=0, high=1)


def test_a_class_without_images_and_answers_has_no_f1() -> None:
    assert macro_f1([0, 0, 2], [0, 2, 2]) == pytest.approx(2 / 3)  # class 1 does not count
    assert macro_f1([-1, -1], [0, 0]) == 0
    assert macro_f1([0, 0, 1], [0, 0, 0]) == macro_f1([0, 0, 0], [0, 0, 1]) == 0.4  # one image of a class counts
    assert macro_f1([0, 0, 1, 2], [0, 0, 0, 2]) == pytest.approx((0.8 + 0 + 1) / 3)


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
    for inside in filter(None, literal_bins(sure, right, bins)):
        accuracy = math.fsum(right[k] for k in inside) / len(inside)
        confidence = math.fsum(sure[k] for k in inside) / len(inside)
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


def test_lists_that_do_not_fit_are_refused() -> None:
    for sure, right in (([], []), ([0.5], [1, 0])):
        with pytest.raises(ValueError, match="confidences for"):
            calibration_error(sure, right)
    with pytest.raises(ValueError, match="2 labels for 1 answers"):
        macro_f1([0, 1], [0])


def test_the_mean_area_is_that_of_the_classes_that_have_both_kinds_of_images() -> None:
    told = np.array([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.3, 0.4, 0.3]])
    labels = [0, 1, 0, 0]
    each = [auroc_estimate(np.array(labels) == k, told[:, k]).value for k in (0, 1)]
    assert mean_auroc(labels, told) == pytest.approx(sum(each) / 2), "nobody has class 2"
    assert mean_auroc([1, 1, 1, 1], told) is None
    assert mean_auroc(labels, np.full((4, 3), 1 / 3)) == 0.5, "ties"


def test_a_temperature_undoes_a_scale_of_the_logits() -> None:
    draws = np.random.default_rng(4)
    logits = draws.normal(size=(4000, 3))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = [draws.choice(3, p=row) for row in shares]
    assert fitted_temperature(labels, 4 * logits) == pytest.approx(4, rel=0.1)
    assert fitted_temperature(labels, logits / 4) == pytest.approx(0.25, rel=0.1)
    assert fitted_temperature(logits.argmax(axis=1), logits) == pytest.approx(0.05, rel=0.01), "the least one"
    assert fitted_temperature([0, 0], [[0.0, 5.0]] * 2) == pytest.approx(20, rel=0.01), "the largest one"


def test_nearly_one_class_is_said_of_answers_that_no_label_explains() -> None:
    assert (largest_share([2, 0, 2, 2]), largest_share([0, -1, -1, -1])) == (0.75, 0.25)
    assert nearly_one_class(0.9)
    assert not nearly_one_class(0.89)
    assert not nearly_one_class(None)
    assert nearly_one_class(0.95, 0.85)
    assert not nearly_one_class(0.95, 0.86)


def test_a_mean_precision_is_of_classes_that_some_images_have_and_some_lack() -> None:
    labels = [[1, 1, 0, -1], [0, 1, 0, 1], [1, 1, 0, 0]]
    scores = np.array([[0.9, 0.1, 0.2, 0.9], [0.8, 0.2, 0.3, 0.1], [0.1, 0.3, 0.4, 0.3]])
    of_first, of_last = (1 + 2 / 3) / 2, 1 / 2
    assert mean_average_precision(labels, scores) == pytest.approx((of_first + of_last) / 2)
    assert mean_average_precision([[1], [1]], scores[:2, :1]) is None
