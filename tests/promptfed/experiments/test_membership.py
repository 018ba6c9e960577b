"""The attacks' figures: known cases, intervals that cover, and bounds that are never over what is true."""

from __future__ import annotations

import math

import numpy as np
import pytest

from promptfed.experiments.attacks.membership import (
    attack,
    clopper_pearson,
    epsilon_bound,
    interval,
    likelihood_ratio,
    log_odds,
    losses,
    one_run_bound,
    rate_at,
)
from promptfed.shared.metrics import auroc


def test_area_counts_pairs_and_ties_as_halves() -> None:
    assert auroc(np.array([2.0, 3.0]), np.array([1.0, 0.0])) == 1
    assert auroc(np.array([1.0, 1.0]), np.array([1.0])) == 0.5
    assert auroc(np.array([0.0, 2.0]), np.array([1.0])) == 0.5
    random = np.random.default_rng(1)
    members, others = random.normal(1, 1, 300), random.normal(0, 1, 200)
    pairs = (members[:, None] > others).mean()
    assert auroc(members, others) == pytest.approx(pairs)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    random, truth, covered = np.random.default_rng(2), 0.5 * (1 + math.erf(0.5 / 2)), 0
    for _ in range(100):
        low, high = interval(random.normal(0.5, 1, 150), random.normal(0, 1, 150), draws=200)
        covered += low <= truth <= high
    assert truth == pytest.approx(0.638, abs=0.001)
    assert covered >= 88


def test_rates_at_few_false_alarms_need_enough_of_others() -> None:
    random = np.random.default_rng(3)
    members, others = random.normal(3, 1, 1000), random.normal(0, 1, 1000)
    one = rate_at(members, others, 0.01)
    assert one.found == pytest.approx(0.75, abs=0.06)
    assert one.low is not None
    assert one.high is not None
    assert one.low < one.found < one.high
    assert rate_at(members, others, 0.001).found is None
    assert clopper_pearson(0, 10)[0] == 0
    assert clopper_pearson(10, 10)[1] == 1
    assert clopper_pearson(5, 10) == pytest.approx((0.187, 0.813), abs=1e-3)


def test_a_bound_on_epsilon_is_seldom_over_the_truth_and_finds_what_leaks() -> None:
    """Randomised response at ε: the score is the coin, told truly with probability e^ε/(1 + e^ε)."""
    random, over = np.random.default_rng(4), 0
    truth = 1.0
    chance = 1 / (1 + math.exp(-truth))
    for _ in range(100):
        members, others = random.random(400) < chance, random.random(400) < 1 - chance
        over += epsilon_bound(members.astype(float), others.astype(float), 0.0) > truth
    assert over <= 5
    separate = epsilon_bound(random.normal(9, 1, 2000), random.normal(0, 1, 2000), 1e-5)
    assert separate > 4


def test_one_run_bounds_are_those_of_the_texts_and_hold() -> None:
    assert one_run_bound(1000, 731, 1000, 1e-5) == pytest.approx(0.88, abs=0.01)
    assert one_run_bound(100, 100, 1000, 1e-5) == pytest.approx(3.47, abs=0.02)
    assert one_run_bound(100, 50, 1000, 1e-5) == 0
    random, truth, over = np.random.default_rng(5), 1.0, 0
    for _ in range(200):
        right = int(random.binomial(500, 1 / (1 + math.exp(-truth))))
        over += one_run_bound(500, right, 500, 1e-6) > truth
    assert over <= 20


def test_scores_of_logits() -> None:
    logits, labels = np.array([[2.0, 0.0, -1.0], [900.0, 0.0, 899.0]]), np.array([0, 2])
    probability = np.exp(2) / (np.exp(2) + 1 + np.exp(-1))
    assert losses(logits, labels)[0] == pytest.approx(-math.log(probability))
    assert log_odds(logits, labels)[0] == pytest.approx(math.log(probability / (1 - probability)))
    assert log_odds(logits, labels)[1] == pytest.approx(-1)


def test_likelihood_ratios_undo_what_makes_an_image_easy() -> None:
    """Images differ more among themselves than membership moves them: calibrated scores see it, plain ones hardly."""
    random = np.random.default_rng(6)
    easy, member = random.normal(0, 5, 600), np.arange(600) < 300
    references = [easy + random.normal(0, 0.5, 600) for _ in range(6)]
    scores = easy + member * 1.0 + random.normal(0, 0.5, 600)
    plain = auroc(scores[member], scores[~member])
    calibrated = likelihood_ratio(scores, references)
    assert auroc(calibrated[member], calibrated[~member]) > plain + 0.2
    with pytest.raises(ValueError, match="at least 4"):
        likelihood_ratio(scores, references[:3])


def test_no_attack_finds_anything_where_there_is_nothing() -> None:
    random = np.random.default_rng(7)
    found = attack("loss", random.normal(0, 1, 2000), random.normal(0, 1, 2000), 1e-5)
    assert found.auc == pytest.approx(0.5, abs=0.03)
    assert found.auc_low < 0.5 < found.auc_high
    assert found.epsilon < 0.5
