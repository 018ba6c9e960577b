"""Two of ten clients poisoned: the mean loses what it has learned and more, robust rules keep it.

With a backdoor: the mean obeys the trigger, the median does not.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.poisoning import ATTACKS, RULES, Bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS = 4


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    torch.set_num_threads(1)
    return Bench(tmp_path_factory.mktemp("features"), ROUNDS)


@pytest.fixture(scope="module")
def clean(bench: Bench) -> tuple[float, float]:
    """Accuracy without poison under the mean, and zero-shot."""
    return bench.accuracy(None, "mean", seed=0)


def test_without_poison_it_learns(clean: tuple[float, float]) -> None:
    assert clean[0] > clean[1] + 0.03


@pytest.mark.parametrize("attack", sorted(ATTACKS.keys() - {"noise"}))
def test_the_mean_falls_far_below_zero_shot(bench: Bench, clean: tuple[float, float], attack: str) -> None:
    assert bench.accuracy(attack, "mean", seed=0)[0] < clean[1] - 0.2


def test_under_noise_the_mean_loses_what_it_has_learned(bench: Bench, clean: tuple[float, float]) -> None:
    """Random prompts classify about as well as the template: 66 %, zero-shot 67 %."""
    assert bench.accuracy("noise", "mean", seed=0)[0] < clean[1] + 0.02


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("rule", [name for name in RULES if not name.startswith("mean")])
def test_robust_rules_keep_the_accuracy(bench: Bench, clean: tuple[float, float], rule: str, attack: str) -> None:
    assert bench.accuracy(attack, rule, seed=0)[0] > clean[1], "better than zero-shot"


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    torch.set_num_threads(1)
    return Bench(tmp_path_factory.mktemp("features"), rounds=5)


def test_the_mean_obeys_a_trigger_and_the_median_does_not(longer: Bench) -> None:
    clean = longer.backdoor("mean", 0, boost=None)
    assert clean.success < 0.1, "nothing about the trigger itself looks like the target"
    assert longer.backdoor("mean", 0).success > 0.8
    withstood = longer.backdoor("median", 0)
    assert withstood.success < 0.2
    assert withstood.accuracy > clean.accuracy - 0.1
