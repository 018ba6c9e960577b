"""Changes as whole numbers: exact at the edges, refused beyond them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from promptfed.shared.secagg import SecureError, primitives
from promptfed.shared.spec.sections import WHOLE_WEIGHT, Weighting, whole_weights
from tests.support.secure_sums import BY_SAMPLES, UNIFORM, encode_change


@settings(max_examples=50, deadline=None)
@given(
    some.lists(
        some.tuples(some.lists(some.floats(-16, 16), min_size=5, max_size=5), some.integers(1, 65_535)),
        min_size=3,
        max_size=20,
    )
)
def test_the_mean_is_the_weighted_one_of_the_changes_to_half_a_step_of_each(
    clients: list[tuple[list[float], int]],
) -> None:
    """Each x is half a whole number off at most: the mean is within 2^-33·K/Σ a."""
    whole = whole_weights({place: samples for place, (_, samples) in enumerate(clients)}, BY_SAMPLES)
    weights = [whole[place] / WHOLE_WEIGHT for place in range(len(clients))]
    total = np.zeros(5, dtype=np.uint64)
    for (change, _), weight in zip(clients, weights, strict=True):
        x = primitives.encoded(np.array(change), weight)
        assert np.abs(x).max() <= 1 << 36
        total = total + x.view(np.uint64)
    mean = primitives.mean_change(primitives.signed_sum(total), sum(weights))
    bound = Fraction(len(clients), 2**33) / sum(map(Fraction, weights))
    for place, found in enumerate(mean.tolist()):
        parts = zip(clients, weights, strict=True)
        exact = sum(Fraction(change[place]) * Fraction(weight) for (change, _), weight in parts)
        assert abs(Fraction(found) - exact / sum(map(Fraction, weights))) <= bound + Fraction(1e-14)  # a float's


def test_the_largest_sum_does_not_wrap() -> None:
    change = primitives.encoded(np.array([16.0, -16.0])).view(np.uint64)
    total = np.zeros(2, dtype=np.uint64)
    for _ in range(1024):
        total = total + change
    assert primitives.signed_sum(total).tolist() == [1 << 46, -(1 << 46)]
    with pytest.raises(SecureError) as refused:
        primitives.signed_sum(np.array([1 << 63], dtype=np.uint64))
    assert refused.value.kind == "sum-invalid"


def odd_one_out(weights: list[float], payload: torch.Tensor, seed: int) -> tuple[primitives.Whole, primitives.Whole]:
    """The sum of clients' changes from ``payload``, and what the last, smallest one has added to it."""
    draws = torch.Generator().manual_seed(seed)
    parts = []
    for weight in weights:
        update = {"x": (payload + 1e-3 * torch.randn(payload.shape, generator=draws)).numpy()}
        parts.append(encode_change(update, {"x": payload.numpy()}, weight))
    return sum(parts), parts[-1]


def chance_of_the_digits(total: primitives.Whole, part: primitives.Whole, modulus: int) -> float:
    """How often the sum modulo ``modulus`` is that of the one part."""
    return float(np.mean(total % modulus == part % modulus))


def test_a_sum_modulo_the_others_weight_tells_nothing_of_one_client() -> None:
    """Four clients have the largest weight, one another: with whole numbers times weights all 16 digits were told."""
    total, part = odd_one_out([1.0, 1.0, 1.0, 1.0, 0.3], torch.zeros(100_000), 1)
    for modulus in (1 << 16, 65_536 - 1, 65_535 * 3):
        assert chance_of_the_digits(total, part, modulus) < 1e-3  # by chance 1.5e-5


def test_the_grid_of_float32_tells_nothing_of_a_client_on_a_finer_one() -> None:
    """Near 0.75 numbers of float32 are multiples of 2^-24, so that whole numbers of weight 1 are multiples of 256."""
    total, part = odd_one_out([1.0, 1.0, 1.0, 1.0, 0.3], torch.full((100_000,), 0.75), 2)
    digits = chance_of_the_digits(total, part, 256)
    assert abs(digits - 1 / 256) < 5 * (1 / 256 / 100_000) ** 0.5
    residues = np.bincount((total - part) % 256, minlength=256)
    assert ((residues - 100_000 / 256) ** 2 / (100_000 / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5, "uniform"


def test_blurring_stays_within_half_a_step_and_is_the_same_again() -> None:
    payload = {"x": np.array([0.75, 1.0, 0.0, -3.0], np.float32)}
    update = {"x": np.array([0.75, 1.0 + 2**-10, 0.0, -3.5], np.float32)}
    change = primitives.flat_change(update, payload)
    moved = primitives.blurred(change, update)
    step = np.spacing(update["x"]).astype(np.float64)
    assert (np.abs(moved - change) <= np.abs(step) / 2).all()
    assert np.array_equal(moved, primitives.blurred(change, update))
    assert (moved[[0, 1, 3]] != change[[0, 1, 3]]).all()
    mean = primitives.as_tensors(moved, payload, {"x": (4,)})["x"]
    assert np.array_equal(mean[[0, 2]], payload["x"][[0, 2]]), "what has not changed stays as it was"


def test_a_change_starts_from_the_payload_and_goes_back_to_it() -> None:
    start = np.random.default_rng(1).standard_normal((2, 3)).astype(np.float32)
    payload = {"a": start, "unsent": np.ones(1, np.float32)}
    update = {"a": start + 0.25, "b": np.array([1.0, -2.0], np.float32), "c": np.array(3.0, np.float32)}
    change = encode_change(update, payload)
    mean = primitives.mean_change(change, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    back = primitives.as_tensors(mean, payload, shapes)
    assert set(back) == set(update)
    for name, tensor in update.items():
        assert np.abs(back[name] - tensor).max() <= 1e-6


@pytest.mark.parametrize("value", [16.001, float("nan"), float("inf")])
def test_what_is_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(SecureError) as refused:
        encode_change({"x": np.array([0.0, value], np.float32)}, {})
    assert refused.value.kind == "out-of-range"


def test_an_update_in_the_clear_is_told_from_a_masked_one() -> None:
    some = torch.randn(100, generator=torch.Generator().manual_seed(2))
    clear = encode_change({"x": some.numpy()}, {}).view(np.uint64)
    assert primitives.looks_unmasked(clear)
    assert not primitives.looks_unmasked(clear[:10])


def test_weights_keep_their_ratio() -> None:
    assert whole_weights({"a": 5, "b": 5}, BY_SAMPLES) == {"a": 65_536, "b": 65_536}
    assert whole_weights({"a": 5, "b": 50}, UNIFORM) == {"a": 65_536, "b": 65_536}
    assert whole_weights({"a": 1 << 30, "b": 1 << 29, "c": 1}, BY_SAMPLES) == {"a": 65_536, "b": 32_768, "c": 1}
    capped = Weighting(weighting="samples", max_weight_share=0.4)
    assert whole_weights({"a": 80, "b": 10, "c": 10}, capped) == {"a": 65_536, "b": 49_152, "c": 49_152}
