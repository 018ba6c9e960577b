"""Changes as whole numbers: exact at the edges, refused beyond them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from promptfed.shared.secagg import SecureError, encoding


@settings(max_examples=50, deadline=None)
@given(
    some.lists(
        some.tuples(some.lists(some.floats(-16, 16), min_size=5, max_size=5), some.integers(1, 65_535)),
        min_size=3,
        max_size=20,
    )
)
def test_the_mean_is_that_of_the_changes_to_half_a_step(clients: list[tuple[list[float], int]]) -> None:
    total = np.zeros(5, dtype=np.uint64)
    for change, weight in clients:
        encoded = encoding.encode_change({"x": torch.tensor(change, dtype=torch.float64)}, {})
        assert np.abs(encoded).max() <= 1 << 36
        total = total + encoding.weighted(encoded, weight)
    weights = sum(weight for _, weight in clients)
    mean = encoding.mean_change(encoding.signed_sum(total), weights)
    for place, found in enumerate(mean.tolist()):
        exact = sum(Fraction(change[place]) * weight for change, weight in clients) / weights
        assert abs(Fraction(found) - exact) <= Fraction(2.0**-33 + 1e-14)  # and what a float rounds


def test_the_largest_sum_does_not_wrap() -> None:
    change = encoding.encode_change({"x": torch.tensor([16.0, -16.0])}, {})
    total = np.zeros(2, dtype=np.uint64)
    for _ in range(1024):
        total = total + encoding.weighted(change, 65_535)
    expected = 1024 * 65_535 * (1 << 36)
    assert encoding.signed_sum(total).tolist() == [expected, -expected]
    with pytest.raises(SecureError) as refused:
        encoding.signed_sum(np.array([1 << 63], dtype=np.uint64))
    assert refused.value.kind == "sum-invalid"


def test_a_change_starts_from_the_payload_and_goes_back_to_it() -> None:
    payload = {"a": torch.randn(2, 3, generator=torch.Generator().manual_seed(1)), "unsent": torch.ones(1)}
    update = {"a": payload["a"] + 0.25, "b": torch.tensor([1.0, -2.0]), "c": torch.tensor(3.0)}
    change = encoding.encode_change(update, payload)
    mean = encoding.mean_change(change, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    back = encoding.as_tensors(mean, payload, shapes)
    assert set(back) == set(update)
    for name, tensor in update.items():
        assert (back[name] - tensor).abs().max() <= 1e-6


@pytest.mark.parametrize("value", [16.001, float("nan"), float("inf")])
def test_what_is_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(SecureError) as refused:
        encoding.encode_change({"x": torch.tensor([0.0, value])}, {})
    assert refused.value.kind == "out-of-range"


def test_an_update_in_the_clear_is_told_from_a_masked_one() -> None:
    some = torch.randn(100, generator=torch.Generator().manual_seed(2))
    clear = encoding.weighted(encoding.encode_change({"x": some}, {}), 3)
    assert encoding.looks_unmasked(clear)
    assert not encoding.looks_unmasked(clear[:10])


def test_weights_keep_their_ratio() -> None:
    assert encoding.whole_weights({"a": 0.25, "b": 0.25}) == {"a": 1, "b": 1}
    assert encoding.whole_weights({"a": 0.5, "b": 0.25, "c": 1e-9}) == {"a": 65_535, "b": 32_768, "c": 1}
