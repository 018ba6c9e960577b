"""Client level: the design's table of hopeless and useful settings, budgets in rounds."""

from __future__ import annotations

import math

import pytest

from promptfed.shared.privacy.accounting import (
    Drowned,
    PrivacyError,
    budget_rounds,
    calibrate,
    client_event,
    epsilon_of,
)

NUMBERS = 8192

# K̄, q, R, δ; ε; z, r, ρ as printed in the design (two figures)
TABLE = [
    (10, 1.0, 25, 1e-2, 8.0, 2.04, 18, 3.7),
    (10, 1.0, 25, 1e-2, 3.0, 4.13, 37, 7.5),
    (100, 1.0, 50, 1e-3, 8.0, 3.39, 3.1, 0.43),
    (100, 1.0, 50, 1e-3, 3.0, 7.33, 6.6, 0.94),
    (100, 0.1, 100, 1e-4, 8.0, 0.86, 0.78, 0.08),
    (100, 0.1, 100, 1e-4, 3.0, 1.49, 1.4, 0.14),
    (1000, 1.0, 50, 1e-4, 8.0, 3.84, 0.35, 0.05),
    (1000, 1.0, 50, 1e-4, 3.0, 8.65, 0.78, 0.11),
]


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"K{row[0]}-q{row[1]}-eps{row[4]}")
def test_the_table_of_what_is_refused_warned_and_works(row: tuple[float, ...]) -> None:
    expected, q, rounds, delta, epsilon, z, ratio, after = row
    found = calibrate(epsilon, delta, q, int(rounds))
    assert found == pytest.approx(z, abs=0.006)
    assert epsilon_of([client_event(found, q, int(rounds))], delta) <= epsilon
    drowned = Drowned(found, NUMBERS, expected, int(rounds))
    assert drowned.ratio == pytest.approx(ratio, rel=0.04)
    assert drowned.after_rounds == pytest.approx(after, rel=0.08)


def test_one_row_of_it_and_its_words() -> None:
    drowned = Drowned(2.04, NUMBERS, 10, 25)
    assert (round(drowned.ratio), round(drowned.after_rounds, 1)) == (18, 3.7)
    assert drowned.told().startswith(
        "noise z = 2.04 on 8,192 numbers over 10 expected clients is r = 18 times as long as the longest mean change, "
        "and ρ = 3.7 times as long as 25 of them"
    )
    assert Drowned(1.0, NUMBERS, 0.0, 5).ratio == math.inf


def test_as_many_rounds_as_the_budget_allows() -> None:
    allowed = budget_rounds(4.0, 1.0, 1, 100, 4.0, 1e-3)
    assert 1 < allowed < 100
    assert epsilon_of([client_event(4.0, 1.0, allowed)], 1e-3) <= 4.0
    assert epsilon_of([client_event(4.0, 1.0, allowed + 1)], 1e-3) > 4.0
    assert budget_rounds(4.0, 1.0, 1, allowed, 4.0, 1e-3) == allowed
    assert budget_rounds(4.0, 1.0, 2, 100, 4.0, 1e-3) == allowed // 2
    with pytest.raises(PrivacyError, match=r"one round with noise_multiplier 0\.5 costs ε = "):
        budget_rounds(0.5, 1.0, 1, 10, 1.0, 1e-3)
