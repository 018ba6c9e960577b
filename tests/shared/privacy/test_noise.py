"""The noise's distributions, and that no two attempts share a key."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from promptfed.shared.privacy import noise
from promptfed.shared.privacy.noise import NoiseStream, SecretNoise, SeededNoise

N = 1_000_000


def test_normals_are_normal_and_independent_of_what_came_before() -> None:
    drawn = SeededNoise(1).stream("normals").normals(N)
    assert abs(drawn.mean()) < 4 / math.sqrt(N)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / N)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    for lag in (1, 2, 3, 7, 16, 64):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 5 / math.sqrt(N)


def test_streams_of_different_attempts_clients_and_rounds_are_uncorrelated() -> None:
    source = SeededNoise(1)
    streams = [source.stream(*purpose).normals(100_000) for purpose in (("a", 1), ("a", 2), ("b", 1), ("a", 1, "x"))]
    correlations = np.corrcoef(streams)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(100_000)
    again = SeededNoise(1).stream("a", 1).normals(100_000)
    assert (again == streams[0]).all()


def test_a_poisson_sample_takes_each_unit_by_itself() -> None:
    stream = SeededNoise(2).stream()
    counts, sizes = np.zeros(50), []
    for _ in range(20_000):
        chosen = stream.poisson_sample(50, 0.1)
        counts[chosen] += 1
        sizes.append(len(chosen))
    assert np.abs(counts / 20_000 - 0.1).max() < 5 * math.sqrt(0.09 / 20_000)
    assert np.var(sizes) == pytest.approx(50 * 0.09, rel=0.06)
    assert 0 in sizes
    assert (stream.poisson_sample(7, 1.0) == np.arange(7)).all()


def test_secret_streams_never_share_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []

    class Told(NoiseStream):
        def __init__(self, key: bytes):
            keys.append(key)
            super().__init__(key)

    monkeypatch.setattr(noise, "NoiseStream", Told)
    source = SecretNoise()
    first = [source.stream("the same", 1).normals(4) for _ in range(100)]
    assert len(set(keys)) == 100
    assert {len(key) for key in keys} == {32}
    assert len({row.tobytes() for row in first}) == 100


def fits(drawn: list[int], weight: object, reach: int) -> float:
    """p of χ² against P(k) ∝ weight(k), the tails beyond ± reach as one cell each."""
    support = range(-60 * reach, 60 * reach + 1)
    weights = {k: weight(k) for k in support}
    total = sum(weights.values())
    cells = {k: weights[k] for k in range(-reach, reach + 1)}
    tail = sum(weights[k] for k in support if k > reach)
    expected = [tail, *cells.values(), tail]
    seen = Counter(max(-reach - 1, min(reach + 1, k)) for k in drawn)
    observed = [seen[k] for k in range(-reach - 1, reach + 2)]
    return float(stats.chisquare(observed, np.array(expected) * len(drawn) / total).pvalue)


def test_discrete_draws_are_exact() -> None:
    stream = SeededNoise(3).stream()
    laplace = [stream.discrete_laplace(0.5) for _ in range(20_000)]
    assert fits(laplace, lambda k: math.exp(-abs(k) / 2), 10) > 1e-4
    assert Counter(stream.below(5) for _ in range(10_000)).keys() == {0, 1, 2, 3, 4}
