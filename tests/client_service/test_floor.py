"""The disclosure floor against an attacker: by subtraction, from fractions, between rounds."""

from __future__ import annotations

from collections import defaultdict

import pytest

from promptfed.client_service.privacy.floor import coded_accuracy, coded_mean, lowest
from promptfed.client_service.privacy.policy import FLOOR


def test_accuracies_tell_nothing_in_any_number_of_rounds() -> None:
    """An attacker who knows the exact number of test images cannot narrow few right or wrong answers, in any round."""
    for count in range(251):
        right_by_answer: dict[object, set[int]] = defaultdict(set)
        for right in range(count + 1):
            right_by_answer[coded_accuracy(right, count, FLOOR)].add(right)
        for rights in right_by_answer.values():
            for few in ({right for right in rights if right < FLOOR}, {count - r for r in rights if count - r < FLOOR}):
                assert few in (set(), set(range(min(FLOOR, count + 1))))


def test_three_of_seven_is_not_told() -> None:
    assert coded_accuracy(3, 7, FLOOR) is None
    assert coded_accuracy(9, 19, FLOOR) is None
    assert coded_accuracy(200, 300, FLOOR, patients=19) is None
    assert coded_accuracy(3, 7, 1) is not None
    assert (lowest(7, FLOOR), lowest(37, FLOOR), lowest(7, 1)) == (0, 30, 7)


def test_a_mean_over_images_leaves_as_a_count_does() -> None:
    assert coded_mean(0.123, 1000, 1) == 0.123
    assert coded_mean(0.123, 1000, 10) == pytest.approx(124.5 / 1004.5)
    assert {coded_mean(k / 41, 41, 10) for k in range(10)} == {4.5 / 44.5}
    assert coded_mean(1.0, 20, 10) == 1.0
