"""Updates as rows, from memory or files, and how far each has changed what its client was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from promptfed.coordinator.aggregation.rows import Rows, _Laid, change_norm, far_off, measured
from promptfed.coordinator.aggregation.rules import _faulty
from promptfed.shared.methods.core.interface import ClientUpdate
from promptfed.shared.spec.sections import AggregationSpec


def test_a_change_is_what_differs_from_the_payload() -> None:
    payload = {"a": torch.full((3, 4), 100.0), "b": torch.zeros(2)}
    update = {"a": torch.full((3, 4), 101.0), "new": torch.full((4,), 2.0)}
    assert change_norm(update, payload) == pytest.approx((12 * 1.0 + 4 * 4.0) ** 0.5)
    assert change_norm(dict(payload), payload) == 0
    assert change_norm({"b": torch.ones(3)}, payload) == pytest.approx(3**0.5), "of another shape: as it is"


def test_far_off_is_over_ten_times_the_median() -> None:
    assert far_off({"a": 1.0, "b": 1.1, "c": 11.5}) == {"c": pytest.approx(11.5 / 1.1)}
    assert far_off({"a": 1.0, "b": 1.0, "c": 10.0}) == {}
    assert far_off({"a": 1.0, "b": 1000.0}) == {}, "of two, nobody can say which"
    assert far_off({"a": 0.0, "b": 0.0, "c": 1.0}) == {}
    assert far_off({"a": 1.0, "b": 1.0, "c": 10.1}) == {"c": pytest.approx(10.1)}, "three are enough"


def test_what_admission_has_not_measured_is_measured_from_each_client_s_own_payload() -> None:
    payloads = {"a": {"x": np.zeros(2)}, "b": {"x": np.full(2, 3.0)}, "c": {}}
    updates = [ClientUpdate(name, 1.0, {"x": np.array([3.0, 4.0])}) for name in payloads]
    norms = {"a": 7.0}
    asked: list[str] = []
    passed = list(measured(iter(updates), lambda name: asked.append(name) or payloads[name], norms))
    assert (passed, asked) == (updates, ["b", "c"])
    assert norms == {"a": 7.0, "b": 1.0, "c": 5.0}


def test_a_row_has_tensors_in_order_of_name_whatever_the_order_in_which_they_were_sent() -> None:
    sent = {"b": np.array([[3.0], [4.0]], np.float32), "a": np.array([1.0], np.float32)}
    rows = Rows([ClientUpdate("one", 1.0, sent)], {"a": np.array([0.5], np.float32)}, None)
    assert rows.row(0).tolist() == [0.5, 3.0, 4.0]
    back = rows.tensors(rows.row(0))
    assert {name: tensor.tolist() for name, tensor in back.items()} == {"a": [1.0], "b": [[3.0], [4.0]]}


@pytest.mark.parametrize(("start", "stop"), [(0, 9), (0, 1), (1, 4), (3, 7), (4, 6), (2, 9), (8, 9), (6, 8), (4, 7)])
@pytest.mark.parametrize("xp", [np, torch])
def test_entries_of_tensors_in_files_are_those_of_one_vector(start: int, stop: int, xp: Any) -> None:
    """Also of one that has no entries, and of one that is missing: zeros."""
    shapes = {"a": (2, 2), "empty": (0, 3), "missing": (2,), "z": (3,)}
    made = {"a": np.arange(4.0).reshape(2, 2), "empty": np.zeros((0, 3)), "z": np.array([7.0, 8.0, 9.0])}
    tensors = {name: xp.asarray(tensor) for name, tensor in made.items()}
    part = _Laid(tensors, shapes, xp).part(start, stop)
    assert part.tolist() == [0, 1, 2, 3, 0, 0, 7, 8, 9][start:stop]
    assert part.dtype == xp.float32


@pytest.mark.parametrize(
    ("count", "tolerate", "faulty"),
    [(1, 0.4, 0), (3, 0.4, 0), (4, 0.4, 0), (5, 0.4, 1), (7, 0.4, 2), (7, 0.1, 0), (10, 0.1, 1), (100, 0.29, 29)],
)
def test_krum_takes_no_more_for_faulty_than_the_number_of_updates_allows(
    count: int, tolerate: float, faulty: int
) -> None:
    assert _faulty(count, AggregationSpec(rule="krum", tolerate=tolerate)) == faulty
