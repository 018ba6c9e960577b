"""Poisson sampling: frequencies, independence, and what the round machine makes of it; rounds that a budget ends."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from promptfed.coordinator.domain.round_machine import NotEnoughTrainers, poisson_sample
from promptfed.coordinator.domain.run_state import Answered, Closed, Failed, JobDone, Moved, Opened, Tick, Withdraw
from tests.support.played_run import Play, rules

KEY = "5e" * 32
NAMES = [f"c{number}" for number in range(12)]


@pytest.mark.parametrize("q", [0.1, 0.5, 0.93])
def test_each_client_is_in_as_often_as_it_should_be_by_itself(q: float) -> None:
    rounds = 3000
    drawn = [set(poisson_sample(KEY, round, NAMES, q)) for round in range(1, rounds + 1)]
    spread = math.sqrt(q * (1 - q) / rounds)
    shares = {name: sum(name in sample for sample in drawn) / rounds for name in NAMES}
    assert all(abs(share - q) < 4 * spread for share in shares.values()), shares
    pair = sum("c1" in sample and "c2" in sample for sample in drawn) / rounds
    assert abs(pair - q * q) < 4 * math.sqrt(q * q * (1 - q * q) / rounds)
    following = [(("c1" in one) - q) * (("c1" in two) - q) for one, two in pairwise(drawn)]
    assert abs(sum(following) / rounds) < 4 * q * (1 - q) / math.sqrt(rounds)
    sizes = [len(sample) for sample in drawn]
    mean = sum(sizes) / rounds
    variance = sum((size - mean) ** 2 for size in sizes) / rounds
    assert abs(mean - 12 * q) < 4 * math.sqrt(12 * q * (1 - q) / rounds)
    assert abs(variance - 12 * q * (1 - q)) < 0.15 * 12 * q * (1 - q), "sizes vary as a binomial's, they are no fixed K"


def test_another_key_or_round_is_another_sample_and_everybody_is_in_at_q_one() -> None:
    assert poisson_sample(KEY, 1, NAMES, 1.0) == NAMES
    assert poisson_sample(KEY, 1, NAMES, 0.5) == poisson_sample(KEY, 1, NAMES, 0.5)
    many = {tuple(poisson_sample(key, round, NAMES, 0.5)) for key in (KEY, "00" * 32) for round in (1, 2, 3)}
    assert len(many) == 6


def playing(q: float = 0.5, **changes: object) -> Play:
    given = {"poisson_key": KEY, "fraction": q, "fixed_divisor": True, "join_when_extended": False, "quorum": 0.5}
    return Play(rules(rounds=40, **(given | {"evaluate_every": 40} | changes)), *NAMES)


def opened(play: Play) -> list[Opened]:
    return [fact for fact in play.facts if isinstance(fact, Opened) and fact.kind == "train"]


def to_the_end(play: Play) -> None:
    while play.run.state == "running":
        play.evaluated() if play.run.stage is not None and play.run.stage.kind == "evaluate" else play.all_answer()
        if play.run.due_job is not None:
            play.send(JobDone(play.now))


def test_the_machine_asks_just_the_sample_expects_q_times_all_and_an_empty_one_closes_at_once() -> None:
    play = playing(0.1).start()
    while play.run.due_job == "join":
        play.send(JobDone(play.now))
    to_the_end(play)
    assert [fact.round for fact in opened(play)] == list(range(1, 41))
    for fact in opened(play):
        assert fact.names == tuple(sorted(poisson_sample(KEY, fact.round, NAMES, 0.1)))
        assert fact.expected == pytest.approx(1.2)
        assert fact.sample_size == len(fact.names)
    closed = [fact for fact in play.facts if isinstance(fact, Closed)]
    empty = [fact for fact in opened(play) if not fact.names]
    assert empty, "with 12 clients and a tenth of them some of 40 rounds ask nobody"
    assert sum(fact.counted == () for fact in closed) == len(empty)


def test_who_stays_away_is_not_replaced_and_the_least_number_of_clients_is_for_the_start_alone() -> None:
    with pytest.raises(NotEnoughTrainers):
        playing(min_clients=13).start()
    play = playing(min_clients=12).start().evaluated()
    stage = play.run.stage
    assert stage is not None
    asked = sorted(stage.asks)
    assert 0 < len(asked) < 12
    for name in asked[: len(asked) // 2 + 1]:
        play.send(Answered(name, play.now))
    play.now += 11
    play.send(Tick(play.now))
    assert play.run.due_job == "aggregate"
    closed = play.run.stage
    assert closed is not None
    assert (sorted(closed.asks), closed.sample_size) == (asked, len(asked))


def test_a_missed_quorum_adds_nobody_and_a_withdrawal_of_all_leaves_the_noise_alone() -> None:
    play = playing().start().evaluated()
    assert play.run.stage is not None
    asked = sorted(play.run.stage.asks)
    play.send(Failed(asked[0], play.now))
    play.now += 11
    play.send(Tick(play.now))
    assert play.run.stage.extended
    assert sorted(play.run.stage.asks) == asked
    for name in asked:
        play.send(Withdraw(name, False, play.now))
    assert play.run.due_job == "aggregate"
    assert [fact.counted for fact in play.facts if isinstance(fact, Closed)][1:] == [()]


def test_fixed_sampling_keeps_its_divisor_where_somebody_is_withdrawn() -> None:
    play = Play(rules(rounds=1, fixed_divisor=True, quorum=0.5), "a", "b", "c", "d").start().evaluated()
    play.send(Withdraw("a", False, play.now))
    for name in "bcd":
        play.send(Answered(name, play.now))
    assert [(fact.expected, fact.sample_size) for fact in opened(play)] == [(4.0, 4)]
    assert [fact.sample_size for fact in play.facts if isinstance(fact, Closed)][1:2] == [4]


def test_rounds_end_with_the_budget_after_a_last_evaluation() -> None:
    play = Play(rules(rounds=9, evaluate_every=9, budget_rounds=2), "a", "b").start()
    to_the_end(play)
    assert play.run.round == 2
    ended = [fact for fact in play.facts if isinstance(fact, Moved)][-1]
    assert (ended.state, ended.reason) == ("finished", "privacy_budget")
    evaluated = [fact.round for fact in play.facts if isinstance(fact, Opened) and fact.kind == "evaluate"]
    assert evaluated[-1] == 2
