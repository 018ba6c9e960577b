"""The choice of clients: formulas written out, requirements, rests and over-selection."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from promptfed.coordinator.domain.choice import chosen, utilities, weighted_draw
from promptfed.coordinator.domain.events import Answered, Enrolled, Failed, Start
from promptfed.coordinator.domain.facts import Asked, Closed, Opened, Settled
from promptfed.coordinator.domain.run_state import Member, Rules, Run, Told
from promptfed.shared.spec.participation import ParticipationSpec
from tests.support.played_run import ONE, Play, rules

NAMES = [f"c{number:02}" for number in range(20)]
CHOICES = ["uniform", "round_robin", "power_of_choice", "oort"]


def with_choice(phases: Any = ONE, *, fraction: float = 0.25, quorum: float = 1.0, **part: Any) -> Rules:
    choice = ParticipationSpec.model_validate({"fraction": fraction, **part})
    return rules(phases, rounds=40, evaluate_every=40, fraction=fraction, quorum=quorum, choice=choice)


def run_of(told: dict[str, Told], round: int, images: dict[str, int] | None = None) -> Run:
    members = {name: Member("trainer", True, True, images=(images or {}).get(name, 10)) for name in NAMES}
    return Run(state="running", round=round, members=members, told=told)


def test_power_of_choice_asks_the_highest_losses_of_the_candidates_that_are_drawn() -> None:
    rng = np.random.default_rng(0)
    losses = {name: float(loss) for name, loss in zip(NAMES, rng.permutation(20) + 1, strict=True)}
    told = {name: Told(1, loss, None, 1.0) for name, loss in losses.items()}
    given_rules = with_choice(choice="power_of_choice", candidates=3.0)
    for round in range(1, 30):
        run = run_of(told, round)
        drawn = weighted_draw(given_rules, run, dict.fromkeys(NAMES, 10), 12)
        wanted = sorted(drawn, key=lambda name: losses[name], reverse=True)[:4]
        assert list(chosen(given_rules, run, NAMES, 4)) == wanted
    # All as candidates: the highest losses of all. Who has reported none comes first.
    all_of_them = with_choice(choice="power_of_choice", candidates=5.0)
    unknown = {name: one for name, one in told.items() if name != "c07"}
    highest = sorted(unknown, key=lambda name: -losses[name])[:3]
    assert list(chosen(all_of_them, run_of(unknown, 2), NAMES, 4)) == ["c07", *highest]


@pytest.mark.parametrize("choice", ["power_of_choice", "oort"])
def test_who_was_asked_and_told_nothing_is_not_asked_in_every_round(choice: str) -> None:
    """A client that never answers, or whose owner keeps losses, would keep its place for ever."""
    told = {name: Told(1, 1.0 + place, 10.0 + place, 1.0) for place, name in enumerate(NAMES) if name != "c07"}
    given_rules, asked, fresh = with_choice(choice=choice, candidates=5.0), 0, 0
    for round in range(2, 42):
        run = replace(run_of(told, round), asked=dict.fromkeys(NAMES, 1))
        asked += "c07" in chosen(given_rules, run, NAMES, 4)
        fresh += "c07" in chosen(given_rules, replace(run, asked={}), NAMES, 4)
    assert asked == 0, "the mean is not among the highest"
    assert fresh == 40
    for silent in (NAMES, NAMES[1:]):  # all or all but one have told nothing
        few = {name: one for name, one in told.items() if name not in silent}
        run = replace(run_of(few, 2), asked=dict.fromkeys(NAMES, 1))
        assert len(chosen(given_rules, run, NAMES, 4)) == 4


def test_candidates_are_drawn_in_proportion_to_their_images() -> None:
    images = {"c00": 30, "c01": 10, "c02": 60}
    drawn = [weighted_draw(with_choice(), run_of({}, round), images, 1)[0] for round in range(4000)]
    for name, count in images.items():
        share = count / 100
        assert abs(drawn.count(name) / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)


def test_oort_s_utility_is_that_of_the_paper() -> None:
    """n·√(1/n·Σ loss²), clipped, + √(0.1·ln R/L), × (T/t)² for who takes longer than T."""
    rng = np.random.default_rng(1)
    sizes = {name: int(size) for name, size in zip(NAMES, rng.integers(5, 50, 20), strict=True)}
    losses = {name: rng.uniform(0, 3, size) for name, size in sizes.items()}
    last = {name: int(round) for name, round in zip(NAMES, rng.integers(1, 9, 20), strict=True)}
    seconds = {name: float(taken) for name, taken in zip(NAMES, rng.uniform(1, 40, 20), strict=True)}
    told = {name: Told(last[name], 1.0, float(np.sum(losses[name] ** 2)), seconds[name]) for name in NAMES}
    statistical = {name: sizes[name] * np.sqrt(np.mean(losses[name] ** 2)) for name in NAMES}
    clip = sorted(statistical.values())[18]  # 95 % of 20
    wanted = {}
    for name in NAMES:
        utility = min(statistical[name], clip) + np.sqrt(0.1 * np.log(9) / last[name])
        wanted[name] = utility * (20.0 / seconds[name]) ** 2 if seconds[name] > 20.0 else utility
    part = ParticipationSpec(choice="oort", preferred_seconds=20.0)
    made = utilities(part, told, sizes, 9)
    assert made == pytest.approx(wanted, rel=1e-12)
    assert max(made.values()) <= clip + np.sqrt(0.1 * np.log(9))


def test_oort_explores_less_and_less_and_exploits_the_highest_utilities() -> None:
    told = {name: Told(1, 1.0, float(10 ** (number % 2 * 4)), 1.0) for number, name in enumerate(NAMES[:10])}
    good = {name for number, name in enumerate(NAMES[:10]) if number % 2}
    given_rules, explored = with_choice(choice="oort"), {}
    for round in (1, 30, 200):
        counts = []
        for draw in range(300):
            names = chosen(with_draw(given_rules, draw), run_of(told, round), NAMES, 5)
            assert len(names) == 5
            assert {name for name in names if name in told} <= good
            counts.append(sum(name not in told for name in names))
        explored[round] = float(np.mean(counts)) / 5
    assert explored == pytest.approx({1: 0.9, 30: 0.9 * 0.98**29, 200: 0.2}, abs=0.03)
    everybody = {name: Told(1, 1.0, 1.0, 1.0) for name in NAMES}
    assert len(chosen(given_rules, run_of(everybody, 1), NAMES, 5)) == 5, "nobody is left to explore"
    assert len(chosen(given_rules, run_of({}, 1), NAMES, 5)) == 5, "nobody is known yet"


def with_draw(given_rules: Rules, draw: int) -> Rules:
    return rules(ONE, fraction=0.25, choice=given_rules.choice, draw=draw)


def opened(play: Play) -> list[Opened]:
    return [fact for fact in play.facts if isinstance(fact, Opened) and fact.kind == "train"]


def begun(given_rules: Rules, *names: str) -> Play:
    return Play(given_rules, *names).start().evaluated()


def test_turns_go_round() -> None:
    play = begun(with_choice(choice="round_robin"), *NAMES)
    for _ in range(8):
        play.all_answer().done()
    asked = [set(fact.names) for fact in opened(play)[:8]]
    assert set.union(*asked[:4]) == set.union(*asked[4:]) == set(NAMES)
    assert asked[0] == asked[4]
    assert "asked last in round 1" in next(iter(opened(play)[4].reasons.values()))


@given(
    choice=st.sampled_from([*CHOICES, "all_available"]),
    meets=st.lists(st.booleans(), min_size=2, max_size=9),
    cool_down=st.integers(0, 3),
    picks=st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["answer", "fail", "wait"])), max_size=60),
)
@settings(max_examples=120, deadline=None)
def test_who_does_not_meet_the_requirements_is_never_asked_to_train(
    choice: str, meets: list[bool], cool_down: int, picks: list[tuple[int, str]]
) -> None:
    fraction = 1.0 if choice == "all_available" else 0.5
    base = with_choice(choice=choice, cool_down=cool_down, fraction=fraction)
    play = Play(rules(ONE, rounds=40, evaluate_every=40, fraction=fraction, choice=base.choice))
    for number, fits in enumerate(meets):
        play.send(Enrolled(f"c{number}", "trainer", 10 + number, fits))
    fit = {f"c{number}" for number, fits in enumerate(meets) if fits}
    if not fit:
        return
    play.send(Start(play.now))
    for pick, what in picks:
        if play.run.due_job is not None:
            play.done()
        elif what == "wait" or not play.open:
            play.later(11.0)
        else:
            name = play.open[pick % len(play.open)]
            told = Told(play.run.round, pick / 10, pick / 5, 1.0)
            is_training = play.run.stage is not None and play.run.stage.kind == "train"
            answered = Answered(name, play.now, told if is_training else None)
            play.send(answered if what == "answer" else Failed(name, play.now))
    for fact in play.facts:
        if isinstance(fact, Opened) and fact.kind == "train":
            assert set(fact.names) <= fit
            assert fact.names
        if isinstance(fact, Asked) and fact.reasons:
            assert set(fact.names) <= fit


@pytest.mark.parametrize("choice", CHOICES)
def test_clients_rest_as_long_as_there_are_enough_others(choice: str) -> None:
    play = begun(with_choice(choice=choice, cool_down=2), *NAMES)
    for _ in range(12):
        play.all_answer().done()
    rounds = [set(fact.names) for fact in opened(play)]
    for at, names in enumerate(rounds):
        assert len(names) == 5
        for before in rounds[max(0, at - 2) : at]:
            assert not names & before
    tired = begun(with_choice(choice=choice, cool_down=9), *NAMES)
    for _ in range(6):
        tired.all_answer().done()
    assert [len(fact.names) for fact in opened(tired)] == [5] * 7, "rounds go on without enough rested clients"
    assert set(opened(tired)[4].names) == set(opened(tired)[0].names), "those that have rested longest come first"


def test_over_selection_ends_rounds_with_a_fifth_of_dropouts_before_the_deadline() -> None:
    rng = np.random.default_rng(3)
    play = begun(with_choice(fraction=0.5, over_select=1.5), *NAMES)
    for _ in range(20):
        asked = list(play.open)
        assert len(asked) == 15
        silent = set(rng.choice(asked, 3, replace=False).tolist())
        for name in rng.permutation([name for name in asked if name not in silent]).tolist():
            if play.run.due_job is None:
                play.send(Answered(name, play.now))
        assert play.run.due_job == "aggregate", "ten answers close the round"
        play.done()
    assert play.now == 0.0, "no time has passed"
    closed = [fact for fact in play.facts if isinstance(fact, Closed)][1:]
    assert {(len(fact.counted), fact.sample_size) for fact in closed} == {(10, 10)}
    ended = [fact for fact in play.facts if isinstance(fact, Settled) and fact.status == "expired"]
    assert len(ended) == 20 * 5


def test_without_over_selection_the_same_dropouts_wait_for_the_deadline() -> None:
    play = begun(with_choice(fraction=0.5, choice="round_robin", quorum=0.8), *NAMES)
    for name in play.open[2:]:
        play.send(Answered(name, play.now))
    assert play.run.due_job is None
    play.later(11.0)
    assert play.run.due_job == "aggregate"
