"""Means with central noise, against the formula written out and against what its noise must look like."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from promptfed.coordinator.aggregation.private_mean import NoiseTerms, private_mean
from promptfed.shared.methods.core.interface import ClientUpdate
from promptfed.shared.privacy.noise import NoiseStream
from promptfed.shared.tensors import Tensors

SHAPES = {"b": (2, 3), "a": (4,)}
KEY = bytes(range(32))


def tensors(seed: int, scale: float = 1.0) -> Tensors:
    draws = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(shape, generator=draws) * scale).numpy() for name, shape in SHAPES.items()}


def flat(given: Tensors) -> list[float]:
    """All numbers in order of name, as Python's floats."""
    return [float(value) for name in sorted(given) for value in given[name].flatten()]


def literal(updates: list[Tensors], base: Tensors, clip: float, z: float, expected: float) -> list[float]:
    """base + (Σ Δ·min(1, S/‖Δ‖) + z·S·ξ)/K̄, number by number."""
    start = flat(base)
    total = [0.0] * len(start)
    for update in updates:
        change = [after - before for after, before in zip(flat(update), start, strict=True)]
        length = math.sqrt(sum(number * number for number in change))
        factor = min(1.0, clip / length) if length else 1.0
        total = [one + number * factor for one, number in zip(total, change, strict=True)]
    drawn = NoiseStream(KEY).normals(len(start)).tolist()
    return [
        before + (one + z * clip * noise) / expected for before, one, noise in zip(start, total, drawn, strict=True)
    ]


@pytest.mark.parametrize("came", [5, 3, 0], ids=["all", "two dropped out", "nobody"])
def test_the_formula_written_out_with_a_divisor_that_nobody_who_stays_away_moves(came: int) -> None:
    base = tensors(0)
    updates = [tensors(number, 0.1 if number == 1 else 3.0) for number in range(1, came + 1)]
    given = [ClientUpdate(f"c{number}", 1 / 5, update) for number, update in enumerate(updates)]
    found = private_mean(given, base, SHAPES, NoiseTerms(1.5, 0.8, 5.0, KEY))
    wanted = literal(updates, base, 1.5, 0.8, 5.0)
    assert flat(found.tensors) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert all(tensor.dtype == np.float32 for tensor in found.tensors.values())
    assert set(found.lengths) == {f"c{number}" for number in range(came)}


def test_one_client_moves_the_sum_by_the_clip_at_most() -> None:
    base, others = tensors(0), [ClientUpdate("a", 0.5, tensors(1))]
    wild = [*others, ClientUpdate("b", 0.5, tensors(2, 1e6))]
    with_it = private_mean(wild, base, SHAPES, NoiseTerms(0.5, 0.3, 2.0, KEY)).tensors
    without = private_mean(others, base, SHAPES, NoiseTerms(0.5, 0.3, 2.0, KEY)).tensors
    moved = np.linalg.norm(np.subtract(flat(with_it), flat(without)))
    assert moved == pytest.approx(0.5 / 2, rel=1e-5)


def test_a_change_of_nothing_is_no_division_by_zero_and_what_is_not_in_the_payload_begins_at_zero() -> None:
    base = {"a": np.ones(4, np.float32)}
    same = ClientUpdate("a", 1.0, {"a": np.ones(4, np.float32), "b": np.zeros((2, 3), np.float32)})
    found = private_mean([same], base, SHAPES, NoiseTerms(1.0, 0.5, 1.0, KEY))
    assert found.lengths == {"a": 0.0}
    noise = 0.5 * NoiseStream(KEY).normals(10)
    assert flat(found.tensors) == pytest.approx([*(1 + noise[:4]), *noise[4:]], rel=1e-6)


def test_the_noise_is_normal_of_the_right_size_and_other_keys_make_other_noise() -> None:
    size = 200_000
    base, terms = {"a": np.zeros(size, np.float32)}, NoiseTerms(0.7, 1.3, 4.0, KEY)
    found = private_mean([], base, {"a": (size,)}, terms).tensors["a"].astype(float)
    scaled = found * 4.0 / (0.7 * 1.3)
    assert abs(scaled.mean()) < 4 / math.sqrt(size)
    assert abs(scaled.var() - 1) < 4 * math.sqrt(2 / size)
    assert stats.kstest(scaled, "norm").pvalue > 1e-6
    lags = [float(np.mean(scaled[lag:] * scaled[:-lag])) for lag in range(1, 65)]
    assert max(map(abs, lags)) < 5 / math.sqrt(size)
    other = private_mean([], base, {"a": (size,)}, NoiseTerms(0.7, 1.3, 4.0, bytes(32))).tensors["a"].astype(float)
    assert abs(float(np.corrcoef(found, other)[0, 1])) < 5 / math.sqrt(size)
