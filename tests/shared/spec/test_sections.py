"""What a section of the spec computes."""

from __future__ import annotations

import pytest

from promptfed.shared.spec.sections import CAPPED_FROM, AggregationSpec


@pytest.mark.parametrize(
    ("share", "clients", "cap"),
    [
        (None, 1, 1.0),
        (None, CAPPED_FROM - 1, 1.0),
        (None, CAPPED_FROM, 2 / CAPPED_FROM),
        (None, 100, 0.02),
        (0.4, 2, 0.5),  # no cap is below an equal share
        (0.4, 3, 0.4),
        (0.4, 100, 0.4),
    ],
)
def test_one_client_weighs_at_most_its_cap(share: float | None, clients: int, cap: float) -> None:
    assert AggregationSpec(max_weight_share=share).weight_cap(clients) == pytest.approx(cap, abs=1e-12)
