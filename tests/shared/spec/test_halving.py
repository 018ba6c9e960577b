"""Successive halving: rungs, survivors and grids of rates."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from promptfed.experiments.bench.tuning import Rung, grid, ranked, rungs, survivors


def test_a_rung_has_a_third_of_the_candidates_and_twice_the_rounds() -> None:
    assert rungs(18, 20) == (Rung(18, 5), Rung(6, 10), Rung(2, 20))
    assert rungs(27, 27, last=1) == (Rung(27, 4), Rung(9, 7), Rung(3, 14), Rung(1, 27))
    assert rungs(2, 10) == (Rung(2, 10),)
    assert rungs(18, 2) == (Rung(18, 1), Rung(6, 1), Rung(2, 2))
    for numbers in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            rungs(numbers[0], numbers[1], last=numbers[2])


@given(st.integers(1, 300), st.integers(1, 500), st.integers(1, 5))
def test_rungs_lead_from_all_candidates_to_all_rounds(candidates: int, rounds: int, last: int) -> None:
    steps = rungs(candidates, rounds, last=last)
    assert (steps[0].candidates, steps[-1].rounds) == (candidates, rounds)
    assert steps[-1].candidates <= max(last, 1)
    for before, after in pairwise(steps):
        assert after.candidates < before.candidates
        assert 1 <= before.rounds <= after.rounds


def test_the_best_survive_and_the_default_always() -> None:
    scores = {"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.9}
    assert ranked(scores) == ["b", "d", "c", "a"]
    assert survivors(scores, 3, "c") == ["b", "d", "c"]
    assert survivors(scores, 2, "a") == ["b", "a"]
    assert survivors(scores, 1, "a") == ["a"]
    assert survivors(scores, 9, "a") == ["b", "d", "c", "a"]
    with pytest.raises(ValueError, match="default"):
        survivors(scores, 2, "e")


def test_of_a_group_only_some_survive_beside_the_default() -> None:
    scores = {"a1": 0.9, "a2": 0.8, "a3": 0.7, "b1": 0.1}
    assert survivors(scores, 3, "b1", group=lambda key: key[0]) == ["a1", "a2", "b1"]
    assert survivors(scores, 2, "a1", group=lambda key: key[0], most=1) == ["a1", "b1"]
    assert survivors(scores, 4, "a3", group=lambda key: key[0], most=1) == ["a1", "b1", "a3"]


@given(st.floats(1e-6, 10), st.integers(1, 4))
def test_a_grid_covers_four_decades_around_its_centre(centre: float, per_decade: int) -> None:
    rates = grid(centre, per_decade=per_decade)
    assert rates[0] < rates[len(rates) // 2] < rates[-1]
    assert rates[len(rates) // 2] == centre
    assert math.log10(rates[-1] / rates[0]) >= 4 - 0.05
    assert len(rates) == 4 * per_decade + 1
    assert grid(0.002) == (2e-5, 2e-4, 2e-3, 2e-2, 0.2)
