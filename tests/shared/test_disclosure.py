"""The disclosure floor against an attacker: by subtraction, from fractions, between rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import pytest

from promptfed.shared.metrics import clinical
from promptfed.shared.metrics.disclosure import FLOOR, Range, coded, coded_accuracy, coded_mean, share
from promptfed.shared.metrics.site_figures import site_figures
from tests.support.answers import answered, answered_several, confusion_of, tables_of
from tests.support.attacker import Attacker, SeveralAttacker, small_counts, small_tables

COUNTED = ("tp", "fn")  # every number below the floor stays possible, and of fp over all images; of other counts half


def attack(seed: int) -> int:
    """Try to narrow every small count of an invented site; how many there were."""
    draws = np.random.default_rng(seed)
    confusion = confusion_of(draws)
    attacker = Attacker(site_figures(answered(confusion, draws), FLOOR), confusion.shape[1])
    return narrowed(seed, attacker, len(confusion), small_counts(confusion, FLOOR))


def attack_several(seed: int) -> int:
    """The same of a site whose images have several labels."""
    draws = np.random.default_rng(seed)
    tables = tables_of(draws)
    attacker = SeveralAttacker(site_figures(answered_several(tables, draws), FLOOR), tables.shape[1])
    return narrowed(seed, attacker, len(tables), small_tables(tables, FLOOR))


def narrowed(seed: int, attacker: Attacker, groups: int, small: Iterable[tuple[int | None, str, int]]) -> int:
    """Expect that no small count can be narrowed; how many there are."""
    goals, about = [], []
    for place, name, k in small:
        value = None if place is None or groups == 1 else str(place)
        if value is None or value in attacker.values:
            least = 0 if name in COUNTED or (name == "fp" and value is None) else FLOOR / 2
            goals.append((attacker.cells(value, name, k), least, FLOOR - 1))
            about.append((value, name, k))
    assert [(seed, *about[place]) for place in attacker.narrowed(goals)] == []
    return len(goals)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bootstrap intervals are not attacked."""
    monkeypatch.setattr(clinical, "DRAWS", 2)


def test_no_count_below_the_floor_can_be_narrowed() -> None:
    assert sum(attack(seed) for seed in range(15)) > 100
    assert sum(attack_several(seed) for seed in range(15)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_report_sets(part: int) -> None:
    seeds = range(1000 * part, 1000 * part + 1000)
    assert sum(attack(seed) for seed in seeds) > 5000
    assert sum(attack_several(seed) for seed in seeds) > 5000


def test_the_attacker_finds_counts_where_there_is_no_floor() -> None:
    confusion = np.array([[[40, 3], [5, 60]]])
    attacker = Attacker(site_figures(answered(confusion, np.random.default_rng(0)), 1), 2)
    assert attacker.bounds(None, "fn", 0) == pytest.approx((3, 3))
    # And by subtraction, of totals that leave exactly.
    rounded = Attacker(site_figures(answered(confusion, np.random.default_rng(0)), FLOOR), 2)
    rounded.note(None, "fn", 1, Range(low=5, high=5))
    rounded.note(None, "wrong", 0, Range(low=8, high=8))
    assert rounded.bounds(None, "fn", 0) == pytest.approx((3, 3))


def test_accuracies_tell_nothing_in_any_number_of_rounds() -> None:
    """An attacker who knows the exact number of test images cannot narrow few right or wrong answers, in any round."""
    for count in range(251):
        right_by_answer: dict[object, set[int]] = defaultdict(set)
        for right in range(count + 1):
            right_by_answer[coded_accuracy(right, count, FLOOR)].add(right)
        for rights in right_by_answer.values():
            for few in ({right for right in rights if right < FLOOR}, {count - r for r in rights if count - r < FLOOR}):
                assert few in (set(), set(range(min(FLOOR, count + 1))))
    # The range of the number of images is the same whatever was answered.
    for count in range(20, 120):
        ranges = {told.images for right in range(count + 1) if (told := coded_accuracy(right, count, FLOOR))}
        assert ranges == {coded(count, FLOOR)}


def test_three_of_seven_is_not_told() -> None:
    assert coded_accuracy(3, 7, FLOOR) is None
    assert coded_accuracy(9, 19, FLOOR) is None
    assert coded_accuracy(200, 300, FLOOR, patients=19) is None
    assert coded_accuracy(3, 7, 1) is not None
    seven = coded(7, FLOOR)
    assert (str(seven), str(coded(37, FLOOR)), str(coded(7, 1))) == ("<10", "30 to 39", "7")
    assert share(coded(3, FLOOR), coded(4, FLOOR), FLOOR) is None


def test_ranges_of_many_images_of_few_patients_say_nothing() -> None:
    told = coded(500, FLOOR, patients=9)
    assert told.low == 0
    assert str(told) == "few patients"
    assert share(told, coded(500, FLOOR), FLOOR) is None
    assert coded(500, FLOOR, patients=10) == Range(low=500, high=509)


def test_a_share_of_ranges_contains_those_of_its_counts() -> None:
    told = share(coded(271, FLOOR), coded(34, FLOOR), FLOOR)
    assert told is not None
    for hits in range(270, 280):
        for misses in range(30, 40):
            own = clinical.proportion(hits, hits + misses)
            assert own is not None
            assert told.low <= own.low <= own.high <= told.high
            assert abs(told.value - own.value) < 0.02


def test_figures_of_groups_are_those_of_their_images() -> None:
    draws = np.random.default_rng(3)
    confusion = np.array([[[30, 12], [11, 40]], [[20, 15], [5, 3]]])
    whole = answered(confusion, draws)
    told = site_figures(whole, 1)
    assert [(group.column, group.value) for group in told.groups] == [
        (None, None),
        ("scanner", "0"),
        ("scanner", "1"),
    ]
    first = told.groups[1].classes[0]
    rows = np.array(whole.subgroups["scanner"]) == "0"
    exact = clinical.class_figures("0", whole.truth[rows, 0], whole.scores[rows, 0], whole.decided[rows, 0])
    for name in ("auroc", "average_precision", "sensitivity", "specificity", "balanced_accuracy"):
        mine, theirs = getattr(first, name), getattr(exact, name)
        assert getattr(mine, "value", mine) == pytest.approx(getattr(theirs, "value", theirs), abs=1e-9)


def test_a_mean_over_images_leaves_as_a_count_does() -> None:
    assert coded_mean(0.123, 1000, 1) == 0.123
    assert coded_mean(0.123, 1000, 10) == pytest.approx(124.5 / 1004.5)
    assert {coded_mean(k / 41, 41, 10) for k in range(10)} == {4.5 / 44.5}
    assert coded_mean(1.0, 20, 10) == 1.0


def test_a_column_of_free_text_is_refused() -> None:
    draws = np.random.default_rng(0)
    told = answered(np.full((1, 2, 2), 20), draws)
    told.subgroups["note"] = [str(row) for row in range(80)]
    with pytest.raises(ValueError, match="the column note has 80 values"):
        site_figures(told, FLOOR)
