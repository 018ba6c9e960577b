"""Prediction sets: the histogram's quantile against sorted scores, and coverage over many splits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from promptfed.shared.metrics.conformal import BINS, Calibration, Histograms, added, calibration_of, prediction_set
from promptfed.shared.metrics.score_sums import ScoreSums, UnknownGroup

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


def thresholds(calibration: Calibration, coverage: float, group: tuple[str, str] | None = None) -> dict[str, float]:
    by_class = calibration.of(group).thresholds(coverage)
    assert by_class is not None
    return by_class


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.99])
def test_a_threshold_is_the_exact_one_rounded_up_to_a_bin(coverage: float) -> None:
    for seed in range(50):
        labels, told = answers(int(np.random.default_rng(seed).integers(5, 400)), seed)
        scores = 1 - told[np.arange(len(labels)), labels]
        calibration = calibration_of(labels, told, NAMES)
        assert calibration.images == len(labels)
        found, wanted = calibration.of(None).threshold(coverage), exact(scores, coverage)
        assert wanted <= found < wanted + 1 / BINS + 1e-12 or found == wanted == 1.0
        for k, name in enumerate(NAMES):
            own = exact(scores[labels == k], coverage) if (labels == k).any() else 1.0
            assert own <= thresholds(calibration, coverage)[name]


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


def test_histograms_of_a_subgroup_are_those_of_its_images() -> None:
    labels, told = answers(200, 4)
    scanners = np.random.default_rng(4).choice(["old", "new"], 200)
    whole = calibration_of(labels, told, NAMES, subgroups={"scanner": tuple(scanners)})
    assert list(whole.by_group["scanner"]) == ["new", "old"]
    for value in ("old", "new"):
        rows = scanners == value
        own = calibration_of(labels[rows], told[rows], NAMES)
        assert whole.by_group["scanner"][value] == own.by_class
        assert whole.of(("scanner", value)).threshold(0.9) == own.of(None).threshold(0.9)
    other = calibration_of(labels, told, NAMES)
    both = added([whole, other])
    assert both.by_group == whole.by_group
    assert both.images == 400
    for group in (("scanner", "broken"), ("sex", "f")):
        with pytest.raises(UnknownGroup, match="scanner=new, scanner=old"):
            whole.of(group)


def test_one_image_of_a_patient_counts() -> None:
    labels, told = answers(60, 5)
    labels[0] = -1  # of no class: the patient's next image counts
    patients = [f"patient {row % 20}" for row in range(60)]
    kept = [20, *range(1, 20)]
    assert calibration_of(labels, told, NAMES, patients=patients) == calibration_of(labels[kept], told[kept], NAMES)


@pytest.mark.extended
@pytest.mark.parametrize("by", ["all", "class", "group", "class and group"])
def test_sets_cover_what_they_promise_in_the_mean_over_200_splits(by: str) -> None:
    """In every group by itself: a classifier that is worse at some classes, and on images of the old scanner."""
    draws = np.random.default_rng(3)
    labels, told = answers(24_000, 3)
    old = draws.random(24_000) < 0.5
    blurred = told[old] ** 0.4
    told[old] = blurred / blurred.sum(axis=1, keepdims=True)
    scanners, values = np.where(old, "old", "new"), ("old", "new")
    classes, column = len(NAMES) * ("class" in by), "scanner" if "group" in by else None
    layout = Histograms(BINS, classes, column, values if column else ())
    covered: list[list[float]] = []
    for seed in range(200):
        order = np.random.default_rng(seed).permutation(24_000)
        held, new = order[:12_000], order[12_000:]
        counts = layout.counts(labels[held], told[held], {"scanner": tuple(scanners[held])})
        assert counts.sum(axis=1).min() >= 1000
        sums = ScoreSums(counts, 1, classes=tuple(NAMES) if classes else (), column=column, values=layout.values)
        limits = np.zeros((2, 4))
        for k, value in enumerate(values):
            own = sums.of((column, value) if column else None)
            by_class = own.thresholds(0.9)
            limits[k] = own.threshold(0.9) if by_class is None else [by_class[name] for name in NAMES]
        place = np.where(old[new], 0, 1)
        inside = 1 - told[new, labels[new]] <= limits[place, labels[new]]
        own = (labels[new] if classes else 0) + 10 * (place if column else 0) + np.zeros(len(new))
        covered.append([float(inside[own == group].mean()) for group in np.unique(own)])
    means = np.mean(covered, axis=0)
    assert len(means) == layout.rows
    for mean in means:
        assert 0.89 <= mean <= 0.91
