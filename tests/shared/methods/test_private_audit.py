"""An audit of the mechanism in one run (Steinke, Nasr, Jagielski, 2023): canaries that a secret coin lets in.

Each canary's gradient lies in a direction of its own: whoever sees the trained vector guesses as well as can be.
What the guesses show must not be over the ε that the accountant gives; without noise or clipping it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from promptfed.shared.methods.core import training
from promptfed.shared.methods.core.interface import ClientContext, Objective, Protection
from promptfed.shared.methods.core.training import train
from promptfed.shared.privacy.accounting import epsilon_of
from promptfed.shared.privacy.noise import NoiseStream, SeededNoise
from tests.support.one_run import one_run_bound

Make = Callable[..., ClientContext]
CANARIES, DELTA = 1000, 1e-5


def shown(make_context: Make, seed: int, z: float, stream: NoiseStream, batch: int = CANARIES) -> tuple[float, float]:
    """The bound that the guesses show, and the accountant's ε."""
    inside = np.random.default_rng(seed).random(CANARIES) < 0.5
    present = torch.from_numpy(inside.astype(np.float32))
    theta = torch.zeros(CANARIES, requires_grad=True)

    def units(copies: Any, rows: Tensor) -> Tensor:
        return -30.0 * present[rows] * copies[0][torch.arange(len(rows)), rows]

    plain = make_context(CANARIES, batch_size=batch, learning_rate=1.0, momentum=0.0, weight_decay=0.0)
    protection = Protection(0.3, z, CANARIES, batch, 1, stream)
    train(replace(plain, protection=protection), [theta], lambda rows: theta.sum(), objective=Objective(units))
    order = torch.argsort(theta.detach(), stable=True).numpy()
    each = CANARIES // 10  # guesses of either kind, the surest
    right = int(inside[order[-each:]].sum() + (~inside[order[:each]]).sum())
    return one_run_bound(2 * each, right, CANARIES, DELTA), epsilon_of([protection.event], DELTA)


class NoNoise(NoiseStream):
    def normals(self, count: int) -> NDArray[np.float64]:
        return np.zeros(count) + super().normals(count) * 1e-6


def test_one_run_bounds_are_those_of_the_texts_and_hold() -> None:
    assert one_run_bound(1000, 731, 1000, 1e-5) == pytest.approx(0.88, abs=0.01)
    assert one_run_bound(100, 100, 1000, 1e-5) == pytest.approx(3.47, abs=0.02)
    assert one_run_bound(100, 50, 1000, 1e-5) == 0
    random, truth, over = np.random.default_rng(5), 1.0, 0
    for _ in range(200):
        right = int(random.binomial(500, 1 / (1 + math.exp(-truth))))
        over += one_run_bound(500, right, 500, 1e-6) > truth
    assert over <= 20


def test_one_run_shows_no_more_than_the_accountant_gives(make_context: Make) -> None:
    bound, epsilon = shown(make_context, 1, 2.0, SeededNoise(1).stream())
    assert 0 < bound <= epsilon


@pytest.mark.parametrize("broken", ["no noise", "no clip"])
def test_a_mechanism_without_noise_or_clipping_is_found(
    broken: str, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: NoiseStream = SeededNoise(2).stream()
    if broken == "no noise":
        stream = NoNoise(bytes(32))
    else:
        monkeypatch.setattr(training, "clipped", lambda gradients, clip: gradients)
    bound, epsilon = shown(make_context, 2, 2.0, stream)
    assert bound > epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("z", "batch"), [(4.0, CANARIES), (2.0, CANARIES), (1.2, 100)])
def test_in_nineteen_of_twenty_runs_the_bound_holds(make_context: Make, z: float, batch: int) -> None:
    found = [shown(make_context, seed, z, SeededNoise(seed).stream(), batch) for seed in range(20)]
    assert sum(bound <= epsilon for bound, epsilon in found) >= 19
    assert math.isfinite(found[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["no noise", "no clip"])
def test_in_eighteen_of_twenty_runs_a_broken_mechanism_is_found(
    broken: str, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "no clip":
        monkeypatch.setattr(training, "clipped", lambda gradients, clip: gradients)
    found = []
    for seed in range(20):
        stream: NoiseStream = NoNoise(bytes([seed]) * 32) if broken == "no noise" else SeededNoise(seed).stream()
        found.append(shown(make_context, seed, 2.0, stream))
    assert sum(bound > epsilon for bound, epsilon in found) >= 18, found
