"""The noised mean of clipped changes, written out for changes below, at and above the clip."""

from __future__ import annotations

import numpy as np
import pytest

from promptfed.coordinator.aggregation.secure_sums import NoiseTerms, private_mean, size_of
from promptfed.shared.methods.core.interface import ClientUpdate
from promptfed.shared.privacy.noise import NoiseStream

SHAPES = {"b": (2,), "a": (1, 2)}  # one vector in order of name: a, then b
BASE = np.array([1.0, -2.0, 0.5, 0.0])


def updates(*changes: list[float], base: np.ndarray = BASE) -> list[ClientUpdate]:
    moved = [np.asarray(base + change, np.float32) for change in changes]
    return [ClientUpdate(f"c{i}", 1.0, {"a": v[:2].reshape(1, 2), "b": v[2:]}) for i, v in enumerate(moved)]


def mean_of(
    given: list[ClientUpdate], payload: dict[str, np.ndarray], z: float, expected: float, clip: float = 2.0
) -> np.ndarray:
    found = private_mean(given, payload, SHAPES, NoiseTerms(clip, z, expected, bytes(range(32))))
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == SHAPES
    assert all(tensor.dtype == np.float32 for tensor in found.tensors.values())
    return np.concatenate([found.tensors[name].reshape(-1) for name in ("a", "b")])


@pytest.mark.parametrize(
    ("change", "clip", "kept"),
    [
        ([0.0, 0.0, 0.0, 0.0], 2.0, 1.0),
        ([0.3, 0.0, 0.0, 0.4], 2.0, 1.0),  # 0.5: below the clip it is not drawn out to it
        ([1.2, 0.0, 1.6, 0.0], 2.0, 1.0),  # 2: at it
        ([0.0, 6.0, 8.0, 0.0], 2.0, 0.2),  # 10: above it
        ([0.3, 0.0, 0.0, 0.4], 0.25, 0.5),  # above it, and below 1
    ],
)
def test_a_change_is_shortened_to_the_clip_and_never_lengthened(change: list[float], clip: float, kept: float) -> None:
    payload = {"a": BASE[:2].reshape(1, 2), "b": BASE[2:]}
    given = updates(change)
    assert mean_of(given, payload, 0.0, 4.0, clip) == pytest.approx(BASE + kept * np.array(change) / 4.0, abs=1e-6)
    lengths = private_mean(given, payload, SHAPES, NoiseTerms(2.0, 0.0, 4.0, bytes(32))).lengths
    assert lengths == {"c0": pytest.approx(float(np.linalg.norm(change)), abs=1e-6)}


@pytest.mark.parametrize(("expected", "divisor"), [(5.0, 5.0), (0.0, 1.0)])
def test_clients_are_summed_noised_by_the_clip_and_divided_by_who_was_expected(expected: float, divisor: float) -> None:
    """Also tensors that the payload lacks, or has in another shape: they start from 0."""
    given = updates([0.3, 0.0, 0.0, 0.4], [0.0, 6.0, 8.0, 0.0], base=np.zeros(4))
    noise = 3.0 * 2.0 * NoiseStream(bytes(range(32))).normals(4)
    wanted = (np.array([0.3, 1.2, 1.6, 0.4]) + noise) / divisor
    assert mean_of(given, {"a": np.ones(3), "c": np.ones(2)}, 3.0, expected) == pytest.approx(wanted, abs=1e-5)
    assert size_of(SHAPES) == 4
