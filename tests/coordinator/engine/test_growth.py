"""A state that grows without bound: when that is told, and whose change is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from promptfed.coordinator.engine import growth
from promptfed.shared.tensors import Arrays


def state(size: float) -> Arrays:
    """The second tensor is no part of what a method learns."""
    return {"context": np.full((2, 3), size, np.float32), "steps": np.array([10**9])}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [(1.0, 99.0, False), (1.0, 101.0, True), (101.0, 900.0, False), (101.0, 1001.0, True), (0.1, 1e30, True)],
)
def test_each_power_of_ten_from_a_hundred_on_is_told_once(before: float, after: float, told: bool) -> None:
    growth.check(state(before), state(after), {}, accepted=True)
    if not told:
        growth.check(state(before), state(after), {}, accepted=False)
        return
    with pytest.raises(growth.StateGrows, match=r"tensor 'context' have a root mean square of"):
        growth.check(state(before), state(after), {}, accepted=False)


def test_the_change_that_stands_out_most_in_any_phase_is_named() -> None:
    found = growth._longest([{"a": 1e6, "b": 1.1e6, "c": 1e6}, {"a": 0.1, "b": 50.0, "c": 0.1}])
    assert found == ("b", 50.0, pytest.approx(500))


@pytest.mark.parametrize(("committed", "remedy"), [(False, "aggregated without it"), (True, "does not undo it")])
def test_the_reason_offers_withdrawal_only_where_it_helps(
    monkeypatch: pytest.MonkeyPatch, committed: bool, remedy: str
) -> None:
    long, short = {"a": 0.1, "b": 50.0, "c": 0.1}, {"a": 0.1, "c": 0.1, "d": 0.1}
    monkeypatch.setattr(growth, "_earlier", lambda *_: [long if committed else short])
    federation: Any = SimpleNamespace(run=SimpleNamespace(round=3), phase="train")
    session: Any = None
    error = growth.StateGrows("too large", short if committed else long)
    told = growth.reason(session, federation, error)
    assert "The longest change is that of 'b'" in told
    assert remedy in told


def test_of_two_changes_the_longer_one_is_named_without_a_median() -> None:
    assert growth._longest([{"a": 1.0, "b": 7.0}]) == ("b", 7.0, None)
    assert growth._longest([{}, {}]) is None
