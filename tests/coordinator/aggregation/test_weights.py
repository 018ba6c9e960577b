"""Shares and the weighted mean."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.methods.core.interface import ClientUpdate
from promptfed.shared.spec.sections import AggregationSpec, shares
from promptfed.shared.tensors import CHUNK


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 10**9), min_size=1, max_size=12),
    st.floats(0.01, 1.0),
    st.sampled_from(["samples", "uniform"]),
)
def test_shares_sum_to_one_and_none_is_over_the_cap(samples: dict[str, int], cap: float, weighting: str) -> None:
    found = shares(samples, AggregationSpec(weighting=weighting, max_weight_share=cap))
    assert list(found) == sorted(samples)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert max(found.values()) <= max(cap, 1 / len(samples)) * (1 + 1e-9)
    assert min(found.values()) >= 0
    by_samples = sorted(samples, key=lambda name: samples[name])
    weights = [found[name] for name in by_samples]
    assert all(a <= b + 1e-12 for a, b in pairwise(weights)), "more samples never weigh less"


def test_what_the_cap_takes_goes_to_the_others_in_proportion() -> None:
    found = shares({"a": 97, "b": 1, "c": 2}, AggregationSpec(max_weight_share=0.7))
    assert found == pytest.approx({"a": 0.7, "b": 0.1, "c": 0.2})


def test_a_cap_that_cannot_be_met_means_equal_weights() -> None:
    assert shares({"a": 9, "b": 1}, AggregationSpec(max_weight_share=0.1)) == pytest.approx({"a": 0.5, "b": 0.5})


def test_clients_without_samples_share_what_the_cap_leaves() -> None:
    found = shares({"a": 5, "b": 0, "c": 0}, AggregationSpec(max_weight_share=0.5))
    assert found == pytest.approx({"a": 0.5, "b": 0.25, "c": 0.25})


def test_the_mean_is_summed_in_float64() -> None:
    parts = [1e8, 1.0, -1e8]
    updates = [ClientUpdate(str(i), 1 / 3, {"x": torch.tensor([value])}) for i, value in enumerate(parts)]
    mean = weighted_mean(iter(updates))["x"]
    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(1 / 3, abs=1e-7), "float32 sums would have lost the 1"


def test_the_mean_takes_updates_one_by_one() -> None:
    alive = 0

    def stream() -> object:
        nonlocal alive
        for number in range(100):
            alive += 1
            assert alive == 1
            yield ClientUpdate(str(number), 0.01, {"x": torch.ones(2)})
            alive -= 1

    assert torch.allclose(weighted_mean(stream())["x"], torch.ones(2))


def test_no_update_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no update"):
        weighted_mean([])


def test_large_tensors_are_summed_entry_by_entry_as_small_ones() -> None:
    draws = torch.Generator().manual_seed(1)
    tensors = [torch.randn(3, CHUNK + 7, generator=draws) for _ in range(3)]
    tensors[0][0, 0] = tensors[1][0, 0] = tensors[2][0, 0] = -0.0
    weights = [0.2, 0.5, 0.3]
    updates = [ClientUpdate(str(i), w, {"x": t}) for i, (w, t) in enumerate(zip(weights, tensors, strict=True))]
    found = weighted_mean(updates)["x"]
    literal = tensors[0].double() * 0.2 + tensors[1].double() * 0.5 + tensors[2].double() * 0.3
    assert torch.equal(found, literal.float())
    assert torch.signbit(found[0, 0])


def test_from_five_clients_on_none_weighs_more_than_twice_its_even_share_unless_the_spec_says_so() -> None:
    liar = {"liar": 10**9, **{f"c{k}": 10 for k in range(4)}}
    assert shares(liar, AggregationSpec())["liar"] == pytest.approx(2 / 5)
    assert shares(liar, AggregationSpec(max_weight_share=1.0))["liar"] == pytest.approx(1.0)
    four = {name: liar[name] for name in list(liar)[:4]}
    assert shares(four, AggregationSpec())["liar"] == pytest.approx(1.0), "one of few may have most of the images"
    even = {f"c{k}": 10 + k for k in range(10)}
    assert shares(even, AggregationSpec()) == shares(even, AggregationSpec(max_weight_share=1.0))
