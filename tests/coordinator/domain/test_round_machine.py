"""The round machine without a server: each rule of the design by itself."""

from __future__ import annotations

from typing import TypeVar

import pytest

from promptfed.coordinator.domain.round_machine import NotEnoughTrainers, WrongMoment
from promptfed.coordinator.domain.run_state import (
    QUORUM_MISSED,
    Answered,
    Asked,
    Cancel,
    Closed,
    Enrolled,
    Fact,
    Failed,
    JobDone,
    Opened,
    Pause,
    Restarted,
    Resume,
    Rules,
    Settled,
    Withdraw,
    ceil_fraction,
)
from promptfed.shared.seeds import sampling_order
from tests.support.played_run import TWO, TWO_ALL, Play, rules


def training(rules: Rules, *names: str) -> Play:
    """A run whose first round has just opened."""
    return Play(rules, *names).start().evaluated()


Kind = TypeVar("Kind")


def of(kind: type[Kind], facts: list[Fact]) -> list[Kind]:
    return [fact for fact in facts if isinstance(fact, kind)]


def test_a_run_from_start_to_finish() -> None:
    play = Play(rules(), "b", "a", evaluators=("z",)).start()
    assert (play.run.state, play.run.round, play.open) == ("running", 0, ["a", "b", "z"])
    play.evaluated()
    assert (play.run.round, play.open) == (1, ["a", "b"])
    play.all_answer()
    assert play.run.due_job == "aggregate"
    play.done()
    assert (play.run.round, play.open) == (1, ["a", "b", "z"])
    play.evaluated().all_answer().done()
    assert play.run.state == "running", "finished comes only after the last evaluation"
    play.evaluated()
    assert (play.run.state, play.run.reason, play.run.round) == ("finished", None, 2)
    counted = [fact.counted for fact in of(Closed, play.facts)]
    assert counted == [("a", "b", "z"), ("a", "b"), ("a", "b", "z"), ("a", "b"), ("a", "b", "z")]


def test_a_start_needs_the_least_number_of_trainers() -> None:
    play = Play(rules(min_clients=3), "a", "b", evaluators=("z",))
    with pytest.raises(NotEnoughTrainers) as refusal:
        play.start()
    assert (refusal.value.enrolled, refusal.value.needed) == (2, 3)
    assert play.run.state == "enrolling"


@pytest.mark.parametrize(
    ("fraction", "count", "expected"), [(0.7, 10, 7), (0.1, 30, 3), (1.0, 3, 3), (0.34, 3, 2), (0.01, 5, 1)]
)
def test_fractions_are_what_was_written(fraction: float, count: int, expected: int) -> None:
    assert ceil_fraction(fraction, count) == expected


def test_the_sample_is_the_first_k_in_the_order_of_hashes() -> None:
    names = [f"client-{number}" for number in range(10)]
    play = training(rules(fraction=0.3, min_clients=2), *names)
    assert play.open == sorted(sampling_order(3, 1, sorted(names))[:3])
    play.all_answer().done().evaluated()
    assert play.open == sorted(sampling_order(3, 2, sorted(names))[:3])
    assert len(training(rules(fraction=0.1, min_clients=4), *names).open) == 4


def test_evaluation_every_and_after_the_last() -> None:
    play = Play(rules(rounds=5, evaluate_every=2), "a").start()
    while play.run.state == "running":
        play = play.done() if play.run.due_job else play.all_answer()
    evaluated = [fact.round for fact in of(Opened, play.facts) if fact.kind == "evaluate"]
    assert evaluated == [0, 2, 4, 5]


def test_a_method_without_phases_only_evaluates() -> None:
    play = Play(rules(phases=(), rounds=3, evaluate_every=2), "a").start()
    while play.run.state == "running":
        play.all_answer()
    assert [fact.round for fact in of(Opened, play.facts)] == [0, 2, 3]


def test_an_evaluation_closes_at_its_deadline_without_a_quorum() -> None:
    play = Play(rules(), "a", "b").start()
    facts = play.later(10)
    assert [(one.name, one.status) for one in of(Settled, facts)] == [("a", "expired"), ("b", "expired")]
    assert (play.run.round, play.run.stage and play.run.stage.kind) == (1, "train")


def test_a_quorum_closes_a_phase_at_its_deadline_and_no_earlier() -> None:
    play = training(rules(quorum=0.5), "a", "b", "c")
    play.send(Answered("a", play.now))
    play.send(Answered("b", play.now))
    assert play.later(9.9) == []
    facts = play.later(0.1)
    assert of(Closed, facts) == [Closed(("a", "b"), 3)]
    assert play.run.due_job == "aggregate"
    with pytest.raises(WrongMoment):
        play.send(Answered("c", play.now))


def test_a_failure_is_not_waited_for() -> None:
    play = training(rules(quorum=0.5), "a", "b")
    play.send(Failed("a", play.now))
    facts = play.send(Answered("b", play.now))
    assert of(Closed, facts) == [Closed(("b",), 2)]


def test_a_missed_quorum_is_extended_once_and_asks_those_not_yet_asked() -> None:
    names = ["a", "b", "c", "d"]
    play = training(rules(fraction=0.5, quorum=1.0), *names)
    first, spare = play.open, sorted(set(names) - set(play.open))
    play.send(Answered(first[0], play.now))
    facts = play.later(10)
    assert of(Asked, facts) == [Asked(tuple(spare))]
    assert play.open == sorted([first[1], *spare])
    assert play.run.stage is not None
    assert play.run.stage.asks[first[0]] == "answered", "accepted updates stay"
    play.send(Answered(spare[0], play.now))
    facts = play.later(10)
    assert of(Closed, facts) == [Closed(tuple(sorted([first[0], spare[0]])), 2)]


@pytest.mark.parametrize("joins", [True, False])
def test_newcomers_join_an_extended_phase_unless_the_method_says_no(joins: bool) -> None:
    play = training(rules(join_when_extended=joins), "a", "b")
    play.send(Enrolled("c", "trainer"))
    play.send(Answered("a", play.now))
    play.later(10)
    assert play.run.due_job == ("join" if joins else None)
    if joins:
        play.done()
    assert play.open == (["b", "c"] if joins else ["b"])


@pytest.mark.parametrize(("then", "state"), [("pause", "paused"), ("fail", "failed")])
def test_a_quorum_missed_twice_pauses_or_fails(then: str, state: str) -> None:
    play = training(rules(on_missed_quorum=then), "a", "b")
    play.send(Answered("a", play.now))
    play.later(10)
    assert play.run.state == "running"
    play.later(10)
    assert (play.run.state, play.run.reason) == (state, QUORUM_MISSED)


def test_resuming_after_a_missed_quorum_asks_again_and_gives_the_whole_deadline() -> None:
    play = training(rules(), "a", "b", "c")
    play.send(Failed("a", play.now))
    play.send(Answered("b", play.now))
    play.later(10)
    play.later(10)
    play.send(Answered("c", play.now))
    assert play.run.state == "paused", "updates of open tasks are taken while paused"
    play.now = 100
    facts = play.send(Resume(play.now))
    assert of(Asked, facts) == [Asked(("a",))]
    assert play.run.stage is not None
    assert (play.run.stage.deadline, play.run.stage.extended) == (110, False)
    play.send(Answered("a", play.now))
    assert of(Closed, play.facts)[-1] == Closed(("a", "b", "c"), 3)


def test_a_pause_holds_everything_and_a_resume_gives_the_whole_deadline_again() -> None:
    play = training(rules(), "a")
    play.later(5)
    play.send(Pause())
    play.send(Answered("a", play.now))
    assert play.later(100) == []
    play.send(Resume(play.now))
    assert play.run.due_job == "aggregate"
    play.send(Pause())
    play.done()
    assert play.run.stage is None, "work under way is finished, nothing new is opened"
    play.send(Resume(play.now))
    assert play.open == ["a"]


def test_a_restart_gives_the_whole_deadline_again() -> None:
    play = training(rules(), "a")
    play.now = 1000
    play.send(Restarted(play.now))
    assert play.run.stage is not None
    assert (play.run.stage.deadline, play.open) == (1010, ["a"])


def test_a_withdrawn_client_is_not_waited_for() -> None:
    play = training(rules(), "a", "b", "c")
    play.send(Answered("a", play.now))
    play.send(Answered("b", play.now))
    facts = play.send(Withdraw("c", False, play.now))
    assert of(Closed, facts) == [Closed(("a", "b"), 2)]
    play.done().evaluated()
    assert play.open == ["a", "b"]


def test_a_withdrawn_client_s_update_counts_unless_it_is_discarded() -> None:
    for discard, counted in ((False, ("a", "b")), (True, ("b",))):
        play = training(rules(), "a", "b")
        play.send(Answered("a", play.now))
        play.send(Withdraw("a", discard, play.now))
        facts = play.send(Answered("b", play.now))
        assert of(Closed, facts)[0].counted == counted


def test_a_discard_after_the_closing_changes_nothing() -> None:
    play = training(rules(), "a", "b").all_answer()
    facts = play.send(Withdraw("a", True, play.now))
    assert facts == []
    assert of(Closed, play.facts)[-1] == Closed(("a", "b"), 2)


def test_withdrawals_do_not_go_below_the_least_number_of_clients() -> None:
    play = training(rules(min_clients=2), "a", "b")
    play.send(Answered("a", play.now))
    play.send(Withdraw("b", False, play.now))
    assert (play.run.state, play.run.reason) == ("paused", QUORUM_MISSED)


def test_the_second_phase_asks_those_who_answered_the_first() -> None:
    play = training(rules(TWO, quorum=0.5), "a", "b", "c")
    play.send(Answered("a", play.now))
    play.send(Answered("c", play.now))
    play.later(10)
    play.done()
    assert (play.run.step, play.run.stage and play.run.stage.name, play.open) == (1, "aggregators", ["a", "c"])


def test_the_second_phase_asks_all_where_the_method_says_so() -> None:
    play = training(rules(TWO_ALL, fraction=0.34), "a", "b", "c", "d")
    play.all_answer().done()
    assert play.open == ["a", "b", "c", "d"]


def test_the_second_phase_goes_on_without_one_who_was_withdrawn_between_the_phases() -> None:
    play = training(rules(TWO), "a", "b", "c").all_answer()
    play.send(Withdraw("b", False, play.now))
    play.done()
    assert play.open == ["a", "c"]
    play.all_answer()
    assert of(Closed, play.facts)[-1] == Closed(("a", "c"), 2)


def test_newcomers_join_when_a_round_opens() -> None:
    play = training(rules(), "a")
    play.send(Enrolled("b", "trainer"))
    play.send(Enrolled("z", "evaluator"))
    assert play.open == ["a"]
    play.all_answer().done()
    assert play.open == ["a"], "not in this round's evaluation: the state does not know them"
    play.evaluated()
    assert (play.run.due_job, play.run.joining) == ("join", ("b", "z"))
    play.send(Enrolled("c", "trainer"))
    play.done()
    assert (play.run.due_job, play.run.joining) == ("join", ("c",))
    play.done()
    assert play.open == ["a", "b", "c"]


def test_newcomers_can_save_a_missed_quorum() -> None:
    play = training(rules(min_clients=2), "a", "b")
    play.send(Answered("a", play.now))
    play.send(Enrolled("c", "trainer"))
    play.later(10)
    assert play.run.due_job == "join"
    play.done()
    assert play.open == ["b", "c"]
    play.send(Answered("c", play.now))
    play.later(10)
    assert of(Closed, play.facts)[-1] == Closed(("a", "c"), 2)


def test_a_cancelled_run_takes_nothing_any_more() -> None:
    play = training(rules(), "a", "b")
    facts = play.send(Cancel())
    assert [one.status for one in of(Settled, facts)] == ["cancelled", "cancelled"]
    for event in (Answered("a", 0), JobDone(0), Cancel(), Pause(), Resume(0), Withdraw("a", False, 0)):
        with pytest.raises(WrongMoment):
            play.send(event)
    with pytest.raises(WrongMoment):
        play.send(Enrolled("c", "trainer"))
