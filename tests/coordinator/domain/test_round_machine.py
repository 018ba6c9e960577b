"""The round machine without a server: each rule of the design by itself."""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from promptfed.coordinator.domain import run_state
from promptfed.coordinator.domain.round_machine import (
    KINDS,
    Machine,
    NotEnoughTrainers,
    WrongMoment,
    answers_needed,
    poisson_sample,
    present,
    steps_of,
)
from promptfed.coordinator.domain.run_state import (
    Answered,
    AnsweredLast,
    Closed,
    Enrolled,
    Event,
    Fact,
    JobDone,
    Opened,
    PhasePlan,
    Resume,
    Rules,
    Run,
    Stage,
    Start,
    Tick,
    Withdraw,
)
from promptfed.shared.messages import ENDED
from promptfed.shared.secagg import MOST_CLIENTS
from promptfed.shared.seeds import sampling_order
from promptfed.shared.spec.sections import FINAL, SecureAggregationSpec

ONE = (PhasePlan("train"),)
TWO = (PhasePlan("prompts"), PhasePlan("aggregators"))
TWO_ALL = (PhasePlan("prompts"), PhasePlan("aggregators", "all"))


def rules(phases: tuple[PhasePlan, ...] = ONE, **changes: object) -> Rules:
    """Of two rounds in which everybody is asked and must answer; ``changes`` are laid over them."""
    base = Rules(
        draw=3, rounds=2, min_clients=1, fraction=1.0, quorum=1.0, deadline_seconds=10.0, on_missed_quorum="pause",
        evaluate_every=1, phases=lambda round: phases,
    )  # fmt: skip
    return replace(base, **changes)


def recorded(before: Run, facts: Iterable[Fact], now: float) -> Run:
    """``before`` as a store knows it that has written down ``facts`` alone: its state, its stage and who has joined."""
    run = before
    for fact in facts:
        stage: Any = run.stage
        match fact:
            case run_state.Moved(state, reason):
                assert state not in ENDED or stage is None or not stage.having("open")
                run = replace(run, state=state, reason=reason, stage=None if state in ENDED else stage)
            case Opened():
                asks: Any = dict.fromkeys(fact.names, "open")
                run = replace(run, stage=Stage(fact.kind, fact.name, asks, fact.sample_size, math.nan))
            case run_state.Asked(names):
                run = replace(run, stage=replace(stage, asks=stage.asks | dict.fromkeys(names, "open")))
            case run_state.Settled(name, status):
                run = replace(run, stage=replace(stage, asks=stage.asks | {name: status}))
            case run_state.Extended(extended):
                run = replace(run, stage=replace(stage, extended=extended))
            case run_state.DeadlineSet(seconds):
                run = replace(run, stage=replace(stage, deadline=now + seconds))
            case Closed():
                run = replace(run, stage=replace(stage, closed=True, sample_size=fact.sample_size))
            case run_state.Completed() | run_state.AttemptFailed():
                assert not stage.having("open"), "what nobody waits for any more is settled"
                run = replace(run, stage=None)
            case run_state.Joined(names):
                joined = {name: replace(run.members[name], joined=True) for name in names}
                run = replace(run, members={**run.members, **joined})
    return run


class Play:
    """A run that is played by hand; ``now`` is its clock. One machine that takes all events comes to the same run.

    The facts say all of it that a store keeps.
    """

    def __init__(self, rules: Rules, *names: str, evaluators: tuple[str, ...] = ()):
        self.rules, self.run, self.now = rules, Run(), 0.0
        self.facts: list[Fact] = []
        self._machine = Machine(rules, self.run)
        for name in names:
            self.send(Enrolled(name, "trainer"))
        for name in evaluators:
            self.send(Enrolled(name, "evaluator"))

    def send(self, event: Event) -> list[Fact]:
        if self._machine.run != self.run or self._machine.rules is not self.rules:  # a test has changed it
            self._machine = Machine(self.rules, self.run)
        fresh = Machine(self.rules, self.run)
        facts = fresh.advance(event)
        kept = recorded(self.run, facts, getattr(event, "now", self.now))
        self.run = fresh.run
        assert (kept.state, kept.reason, kept.stage) == (self.run.state, self.run.reason, self.run.stage)
        assert {name for name in kept.members if kept.members[name].joined} == {
            name for name, member in self.run.members.items() if member.joined
        }
        assert self._machine.advance(event) == facts
        assert self._machine.run == self.run
        self.facts += facts
        return list(facts)

    def start(self) -> Play:
        self.send(Start(self.now))
        return self

    def evaluated(self) -> Play:
        """All evaluate."""
        assert self.run.stage is not None
        assert self.run.stage.kind == "evaluate"
        return self.all_answer()

    def all_answer(self) -> Play:
        assert self.run.stage is not None
        for name in self.run.stage.having("open"):
            self.send(Answered(name, self.now))
        return self

    def done(self) -> Play:
        self.send(JobDone(self.now))
        return self

    def later(self, seconds: float) -> list[Fact]:
        self.now += seconds
        return self.send(Tick(self.now))

    @property
    def open(self) -> list[str]:
        return self.run.stage.having("open") if self.run.stage else []


def training(rules: run_state.Rules, *names: str) -> Play:
    """A run whose first round has just opened."""
    return Play(rules, *names).start().evaluated()


Kind = TypeVar("Kind")


def of(kind: type[Kind], facts: list[run_state.Fact]) -> list[Kind]:
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
    assert rules(fraction=fraction).sample_size(count) == expected


def test_the_sample_is_the_first_k_in_the_order_of_hashes() -> None:
    names = [f"client-{number}" for number in range(10)]
    play = training(rules(fraction=0.3, min_clients=2), *names)
    assert play.open == sorted(sampling_order(3, 1, sorted(names))[:3])
    play.all_answer().done().evaluated()
    assert play.open == sorted(sampling_order(3, 2, sorted(names))[:3])
    for least, fraction, asked in ((10, 0.1, 1), (4, 0.1, 1), (1, 0.11, 2), (10, 1.0, 10)):
        assert len(training(rules(fraction=fraction, min_clients=least), *names).open) == asked, "it gates the start"
    secure = SecureAggregationSpec(minimum=4)
    assert [rules(fraction=0.3, min_clients=9, secure=secure).sample_size(of) for of in (9, 10, 14, 9000)] == [
        *(4, 4, 5), MOST_CLIENTS,
    ]  # fmt: skip


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
    assert (play.run.answered_first, play.run.sample_size) == ((), 0), "of training alone"


def test_an_evaluation_closes_at_its_deadline_without_a_quorum() -> None:
    play = Play(rules(), "a", "b").start()
    facts = play.later(10)
    assert [(one.name, one.status) for one in of(run_state.Settled, facts)] == [("a", "expired"), ("b", "expired")]
    assert (play.run.round, play.run.stage and play.run.stage.kind) == (1, "train")


def test_a_quorum_closes_a_phase_at_its_deadline_and_no_earlier() -> None:
    play = training(rules(quorum=0.5), "a", "b", "c")
    answer(play, "a", "b")
    assert play.later(9.9) == []
    facts = play.later(0.1)
    assert of(Closed, facts) == [Closed(("a", "b"), 3)]
    assert play.run.due_job == "aggregate"
    with pytest.raises(WrongMoment):
        play.send(Answered("c", play.now))


def test_a_failure_is_not_waited_for() -> None:
    play = training(rules(quorum=0.5), "a", "b")
    play.send(run_state.Failed("a", play.now))
    facts = play.send(Answered("b", play.now))
    assert of(Closed, facts) == [Closed(("b",), 2)]


def test_a_missed_quorum_is_extended_once_and_asks_those_not_yet_asked() -> None:
    names = ["a", "b", "c", "d"]
    play = training(rules(fraction=0.5, quorum=1.0), *names)
    first, spare = play.open, sorted(set(names) - set(play.open))
    play.send(Answered(first[0], play.now))
    facts = play.later(10)
    assert of(run_state.Asked, facts) == [run_state.Asked(tuple(spare))]
    assert play.open == sorted([first[1], *spare])
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
    assert (play.run.state, play.run.reason) == (state, run_state.QUORUM_MISSED)


def test_resuming_after_a_missed_quorum_asks_again_and_gives_the_whole_deadline() -> None:
    play = training(rules(), "a", "b", "c")
    play.send(run_state.Failed("a", play.now))
    play.send(Answered("b", play.now))
    play.later(10)
    play.later(10)
    play.send(Answered("c", play.now))
    assert play.run.state == "paused", "updates of open tasks are taken while paused"
    play.now = 100
    facts = play.send(Resume(play.now))
    assert of(run_state.Asked, facts) == [run_state.Asked(("a",))]
    assert (play.run.stage.deadline, play.run.stage.extended) == (110, False)
    play.send(Answered("a", play.now))
    assert of(Closed, play.facts)[-1] == Closed(("a", "b", "c"), 3)


@pytest.mark.parametrize("state", ["enrolling", "running", "paused"])
def test_damage_pauses_until_it_is_mended_and_a_start_may_be_refused(state: str) -> None:
    play = Play(rules(), "a")
    play.send(run_state.StartRefused("no state"))
    assert (play.run.state, play.run.reason, play.run.is_damaged) == ("enrolling", "no state", False)
    if state != "enrolling":
        play.start()
        with pytest.raises(WrongMoment):
            play.send(run_state.StartRefused("too late"))
    if state == "paused":
        play.send(run_state.NotComputed("no torch"))
        assert (play.run.state, play.run.reason) == ("paused", "no torch")
        for event in (run_state.Damaged("a blob"), run_state.NotComputed("again"), run_state.Pause()):
            with pytest.raises(WrongMoment):
                play.send(event)
        return
    play.send(run_state.Damaged("a blob"))
    paused = "paused" if state == "running" else "enrolling"
    assert (play.run.state, play.run.reason, play.run.is_damaged) == (paused, run_state.DAMAGED + "a blob", True)


def test_a_pause_holds_everything_and_a_resume_gives_the_whole_deadline_again() -> None:
    play = training(rules(), "a")
    play.later(5)
    play.send(run_state.Pause())
    play.send(Answered("a", play.now))
    assert play.later(100) == []
    play.send(Resume(play.now))
    assert play.run.due_job == "aggregate"
    play.send(run_state.Pause())
    play.done()
    assert play.run.stage is None, "work under way is finished, nothing new is opened"
    play.send(Resume(play.now))
    assert play.open == ["a"]
    play = training(rules(), "a", "b")
    play.send(run_state.Failed("a", play.now))
    for event in (run_state.Pause(), Resume(play.now)):
        play.send(event)
    assert (play.open, play.run.stage.having("failed")) == (["b"], ["a"]), "who failed is asked again after a quorum"


def test_a_restart_gives_the_whole_deadline_again() -> None:
    play = training(rules(), "a")
    play.now = 1000
    play.send(run_state.Restarted(play.now))
    assert (play.run.stage.deadline, play.open) == (1010, ["a"])
    play.run = replace(play.run, stage=None)  # ended between two stages
    play.send(run_state.Restarted(play.now))
    assert play.open == ["a"]


@pytest.mark.parametrize(
    ("given", "step", "gone", "there", "needed"),
    [
        ({}, 0, 0, 4, 2), ({}, 0, 1, 3, 2), ({}, 0, 2, 2, 1), ({}, 0, 4, 1, 1), ({}, 1, 4, 1, 1),
        ({"least_answers": 3}, 0, 2, 2, 3), ({"poisson_key": "5e" * 32}, 0, 3, 1, 1),
        ({"poisson_key": "5e" * 32, "least_answers": 2}, 0, 4, 0, 0),
        ({"secure": SecureAggregationSpec()}, 0, 3, 3, 2), ({"secure": SecureAggregationSpec()}, 5, 3, 1, 1),
    ],
)  # fmt: skip
def test_so_many_answers_close_a_stage(given: Any, step: int, gone: int, there: int, needed: int) -> None:
    own = rules(quorum=0.5, **given)
    for statuses in (("withdrawn", "discarded"), ("discarded", "withdrawn")):
        asks = {f"c{place}": statuses[place % 2] if place < gone else "open" for place in range(4)}
        stage = run_state.Stage("train", "train", asks, 4, 10.0)
        assert (present(own, Run(step=step), stage), answers_needed(own, Run(step=step), stage)) == (there, needed)
        more = replace(stage, asks=asks | {"spare": "open"})
        assert present(own, Run(step=step), more) == (there if gone == 0 else max(there, 4 - (gone - 1)))


def test_a_withdrawn_client_is_not_waited_for() -> None:
    play = training(rules(), "a", "b", "c")
    answer(play, "a", "b")
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


@pytest.mark.parametrize("least", [1, 2])
def test_withdrawals_do_not_go_below_what_the_rule_can_take(least: int) -> None:
    play = training(rules(min_clients=2, least_answers=least), "a", "b")
    play.send(Answered("a", play.now))
    play.send(Withdraw("b", False, play.now))
    ended = ("running", None) if least == 1 else ("paused", run_state.QUORUM_MISSED)
    assert (play.run.state, play.run.reason) == ended


def test_the_second_phase_asks_those_who_answered_the_first() -> None:
    play = training(rules(TWO, quorum=0.5), "a", "b", "c")
    answer(play, "a", "c")
    play.later(10)
    play.done()
    assert (play.run.step, play.run.stage and play.run.stage.name, play.open) == (1, "aggregators", ["a", "c"])


def test_the_second_phase_asks_all_where_the_method_says_so() -> None:
    play = training(rules(TWO_ALL, fraction=0.34), "a", "b", "c", "d")
    play.all_answer().done()
    assert play.open == ["a", "b", "c", "d"]


def test_a_third_phase_asks_those_who_answered_the_first() -> None:
    play = training(rules((*TWO, PhasePlan("third")), quorum=0.3), "b", "a", "c")
    assert list(play.run.stage.asks) == ["a", "b", "c"], "whatever the order in which they came"
    play.send(run_state.Failed("c", play.now))
    play.send(Answered("b", play.now))
    play.send(Answered("a", play.now))
    play.done()
    play.send(run_state.Failed("b", play.now))
    play.send(Answered("a", play.now))
    play.done()
    assert (play.run.stage.name, play.open) == ("third", ["a", "b"])


@pytest.mark.parametrize(("ask", "added"), [("all", ["c", "d"]), ("answered", [])])
def test_an_extended_second_phase_asks_more_only_where_it_asks_all(ask: Any, added: list[str]) -> None:
    phases = (PhasePlan("prompts"), PhasePlan("aggregators", ask))
    play = training(rules(phases, fraction=0.5), "a", "b", "c", "d")
    first = play.open
    play.all_answer().done()
    assert play.open == (sorted("abcd") if ask == "all" else first)
    assert play.run.stage is not None
    if ask == "all":
        play.run = replace(play.run, stage=replace(play.run.stage, asks=dict.fromkeys("ab", "open")))
    facts = play.later(10)
    assert of(run_state.Asked, facts) == ([run_state.Asked(tuple(added))] if added else [])


def test_an_extension_of_a_secure_sum_takes_no_more_than_a_sum_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptfed.coordinator.domain.round_machine.MOST_CLIENTS", 3)
    for own, asked in ((secure(), 3), (rules(quorum=0.6), 5)):
        play = Play(replace(own, fraction=0.4), *FIVE).start().evaluated()
        assert play.run.stage is not None
        play.run = replace(play.run, stage=replace(play.run.stage, asks=dict.fromkeys(play.open[:2], "open")))
        play.later(11)
        assert len(play.run.stage.asks) == asked


def test_the_second_phase_goes_on_without_one_who_was_withdrawn_between_the_phases() -> None:
    play = training(rules(TWO), "a", "b", "c").all_answer()
    play.send(Withdraw("b", False, play.now))
    play.done()
    assert play.open == ["a", "c"]
    play.all_answer()
    assert of(Closed, play.facts)[-1] == Closed(("a", "c"), 2)


def test_a_phase_that_asks_all_goes_on_without_those_of_the_first() -> None:
    play = training(rules(TWO_ALL, fraction=0.5), "a", "b", "c", "d")
    first = play.open
    play.all_answer()
    for name in first:
        play.send(Withdraw(name, False, play.now))
    play.done()
    assert (play.open, play.run.stage.sample_size) == (sorted(set("abcd") - set(first)), 1)


def test_the_best_round_is_tested_once_after_the_last() -> None:
    for budget, last in ((None, 2), (1, 1), (3, 2)):
        play = Play(rules(selects=True, budget_rounds=budget, evaluate_every=5), "a").start()
        to_the_end(play)
        found = [(one.round, one.name) for one in of(Opened, play.facts) if one.kind == "evaluate"]
        assert found == [(0, "evaluation"), (last, "evaluation"), (last, FINAL)]
        assert play.run.reason == ("privacy_budget" if last == 1 else None)


def test_without_rounds_whoever_is_there_is_enough_to_start() -> None:
    play = Play(rules(rounds=0, phases=()), evaluators=("z",)).start().evaluated()
    assert play.run.state == "finished"
    with pytest.raises(NotEnoughTrainers):
        Play(rules(), evaluators=("z",)).start()


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
    over = training(rules(), "a").all_answer()
    over.send(run_state.Cancel())
    assert (over.run.stage, over.run.due_job, over.run.state) == (None, None, "cancelled"), "also what was due"
    facts = play.send(run_state.Cancel())
    assert [one.status for one in of(run_state.Settled, facts)] == ["cancelled", "cancelled"]
    ended = [run_state.JobDone(0), run_state.Cancel(), run_state.Pause(), Resume(0), Withdraw("a", False, 0)]
    for event in (*ended, Answered("a", 0), Enrolled("c", "trainer")):
        with pytest.raises(WrongMoment):
            play.send(event)


# Poisson sampling: frequencies, independence, and what the round machine makes of it; rounds that a budget ends.


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


def test_who_is_drawn_has_a_word_below_q_and_not_at_it() -> None:
    words = {
        name: int.from_bytes(hmac.digest(bytes.fromhex(KEY), f"1|{name}".encode(), "sha256")[:8], "big")
        for name in (f"c{number}" for number in range(20_000))
    }
    edge = next(name for name, word in words.items() if word % 2048 == 0)  # a float has it exactly
    q = words[edge] / 2**64
    assert poisson_sample(KEY, 1, words, q) == [name for name, word in words.items() if word < words[edge]]
    assert poisson_sample(KEY, 1, [edge], math.nextafter(q, 1)) == [edge]


def playing(q: float = 0.5, **changes: object) -> Play:
    given = {"poisson_key": KEY, "fraction": q, "fixed_divisor": True, "join_when_extended": False, "quorum": 0.5}
    return Play(rules(rounds=40, **(given | {"evaluate_every": 40} | changes)), *NAMES)


def opened(play: Play) -> list[Opened]:
    return [fact for fact in play.facts if isinstance(fact, Opened) and fact.kind == "train"]


def to_the_end(play: Play) -> None:
    while play.run.state == "running":
        play.evaluated() if play.run.stage is not None and play.run.stage.kind == "evaluate" else play.all_answer()
        if play.run.due_job is not None:
            play.send(run_state.JobDone(play.now))


def test_the_machine_asks_just_the_sample_expects_q_times_all_and_an_empty_one_closes_at_once() -> None:
    play = playing(0.1).start()
    while play.run.due_job == "join":
        play.send(run_state.JobDone(play.now))
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
    asked = sorted(stage.asks)
    assert 0 < len(asked) < 12
    for name in asked[: len(asked) // 2 + 1]:
        play.send(Answered(name, play.now))
    play.now += 11
    play.send(run_state.Tick(play.now))
    assert play.run.due_job == "aggregate"
    closed = play.run.stage
    assert (sorted(closed.asks), closed.sample_size) == (asked, len(asked))


def test_a_missed_quorum_adds_nobody_and_a_withdrawal_of_all_leaves_the_noise_alone() -> None:
    play = playing().start().evaluated()
    asked = sorted(play.run.stage.asks)
    play.send(run_state.Failed(asked[0], play.now))
    play.now += 11
    play.send(run_state.Tick(play.now))
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
    ended = [fact for fact in play.facts if isinstance(fact, run_state.Moved)][-1]
    assert (ended.state, ended.reason) == ("finished", "privacy_budget")
    evaluated = [fact.round for fact in play.facts if isinstance(fact, Opened) and fact.kind == "evaluate"]
    assert evaluated[-1] == 2


# The round machine without a server: events in any order, and what they must never do.


class Steered(RuleBasedStateMachine):
    """What may happen to any run."""

    play: Play

    def send(self, event: run_state.Event) -> None:
        raise NotImplementedError

    @rule(pick=st.integers(0, 100), discard=st.booleans())
    def withdraw(self, pick: int, discard: bool) -> None:
        names = sorted(self.play.run.members)
        self.send(Withdraw(names[pick % len(names)], discard, self.play.now))

    @rule()
    def work(self) -> None:
        self.send(run_state.JobDone(self.play.now))

    @rule()
    def resume(self) -> None:
        self.send(Resume(self.play.now))


class AnyOrder(Steered):
    """Events in any order; what they must never do is checked after each."""

    @initialize(
        phases=st.sampled_from([(), ONE, TWO, TWO_ALL]), rounds=st.integers(1, 3), min_clients=st.integers(1, 3),
        fraction=st.sampled_from([0.1, 0.5, 1.0]), quorum=st.sampled_from([0.1, 0.5, 0.67, 1.0]),
        on_missed_quorum=st.sampled_from(["pause", "fail"]), evaluate_every=st.integers(1, 3),
        clients=st.integers(1, 5),
    )  # fmt: skip
    def begin(self, clients: int, **given: Any) -> None:
        self.rules = rules(**given)
        self.play = Play(self.rules, *(f"c{number}" for number in range(clients)), evaluators=("e",))
        self.closed: dict[tuple[int, int], tuple[str, ...]] = {}
        self.completed: list[tuple[int, int]] = []
        self.answered: dict[tuple[int, int], set[str]] = {}
        self.extra = 0

    def send(self, event: run_state.Event) -> None:
        before = self.play.run
        try:
            facts = self.play.send(event)
        except (WrongMoment, NotEnoughTrainers):
            assert self.play.run == before, "a refused event changes nothing"
            return
        here = (before.round, before.step)
        if isinstance(event, Answered):
            assert not before.stage.closed
            assert before.stage.asks[event.name] == "open"
            self.answered.setdefault(here, set()).add(event.name)
        for fact in facts:
            if isinstance(fact, Opened):
                here = (fact.round, fact.step)
                self.check_asked(fact)
            elif isinstance(fact, Closed):
                assert here not in self.closed, "a stage closes once"
                assert set(fact.counted) <= self.answered.get(here, set())
                self.closed[here] = fact.counted
            elif isinstance(fact, run_state.Completed):
                assert here in self.closed
                assert here not in self.completed, "a stage is aggregated once"
                self.completed.append(here)
            elif isinstance(fact, run_state.Moved) and fact.state == "finished":
                assert here[0] == self.rules.rounds

    def check_asked(self, fact: Opened) -> None:
        members = self.play.run.members
        assert all(members[name].joined for name in fact.names)
        if fact.kind == "train":
            assert all(members[name].role == "trainer" for name in fact.names), "evaluators are never sampled"

    @rule(pick=st.integers(0, 100))
    def answer(self, pick: int) -> None:
        names = sorted(self.play.run.members)
        self.send(Answered(names[pick % len(names)], self.play.now))

    @precondition(lambda self: bool(self.play.open))
    @rule(pick=st.integers(0, 100))
    def answer_when_asked(self, pick: int) -> None:
        self.send(Answered(self.play.open[pick % len(self.play.open)], self.play.now))

    @rule(pick=st.integers(0, 100))
    def fail(self, pick: int) -> None:
        names = sorted(self.play.run.members)
        self.send(run_state.Failed(names[pick % len(names)], self.play.now))

    @rule(role=st.sampled_from(["trainer", "evaluator"]))
    def enrol(self, role: str) -> None:
        self.extra += 1
        self.send(Enrolled(f"late{self.extra}", role))

    @rule(seconds=st.sampled_from([0.0, 3.0, 10.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.play.now += seconds
        self.send(run_state.Tick(self.play.now))

    @rule()
    def start(self) -> None:
        self.send(run_state.Start(self.play.now))

    @rule()
    def pause(self) -> None:
        self.send(run_state.Pause())

    @rule()
    def restart(self) -> None:
        self.play.now += 1000
        self.send(run_state.Restarted(self.play.now))

    @invariant()
    def what_runs_waits_for_something_that_ends(self) -> None:
        run = self.play.run
        if run.state == "running" and run.due_job is None:
            assert not run.stage.closed
            assert run.stage.deadline <= self.play.now + self.rules.deadline_seconds
        if run.due_job == "aggregate":
            assert run.stage.closed
        if run.state in ENDED:
            assert run.stage is None
            assert run.due_job is None

    @invariant()
    def completed_stages_are_in_order(self) -> None:
        assert self.completed == sorted(self.completed)

    def teardown(self) -> None:
        """However it stands: if nobody ever answers again, it ends or asks for the operator in a bounded time."""
        for _ in range(10 * (self.rules.rounds + 1) * 4 + 20):
            if self.play.run.state != "running":
                return
            if self.play.run.due_job is not None:
                self.work()
            else:
                self.wait(self.rules.deadline_seconds)
        raise AssertionError("it waits without end")


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_run_starts_once_has_its_time_again_after_a_restart_and_fails_with_its_reason() -> None:
    run = Play(rules(), "a", "b").start()
    with pytest.raises(WrongMoment):
        run.send(Start(run.now))
    run.now += 9
    run.send(run_state.Restarted(run.now))
    assert (run.run.stage.deadline, run.run.stage.having("open")) == (19.0, ["a", "b"])
    run.send(run_state.Fail("ValueError: no"))
    assert (run.run.state, run.run.reason) == ("failed", "ValueError: no")


def test_an_evaluation_is_judged_where_a_round_may_follow_and_only_then() -> None:
    run = Play(rules(rounds=1, patience=5), "a").start()
    with pytest.raises(WrongMoment):
        run.send(run_state.NoRise(run.now))
    run.evaluated()
    assert (run.run.round, run.run.due_job) == (0, "judge")
    run.done().all_answer().done()
    assert (run.run.round, run.run.due_job, run.run.stage.kind) == (1, None, "evaluate")
    run.evaluated()
    assert run.run.due_job is None, "no round follows"
    ended = Play(rules(patience=5), "a").start().evaluated()
    ended.send(run_state.NoRise(ended.now))
    assert (ended.run.due_job, ended.run.stage.name) == (None, FINAL)
    with pytest.raises(WrongMoment):
        ended.send(run_state.NoRise(ended.now))
    ended.evaluated()
    assert (ended.run.state, ended.run.round) == ("finished", 0)
    alone = Play(rules(patience=5), "a").start().evaluated()
    alone.send(Withdraw("a", False, alone.now))
    alone.send(run_state.NoRise(alone.now))
    assert alone.run.state == "finished", "nobody is left to be tested"


# The five steps of a secure sum in the round machine: who is asked, what fails an attempt, what no order may do.


FIVE = ("a", "b", "c", "d", "e")


def secure(phases: tuple = ONE, **changes: object) -> run_state.Rules:
    spec = SecureAggregationSpec(step_seconds=5, **changes)
    plans = steps_of(phases, spec)
    return replace(rules(plans, quorum=0.6), secure=spec)


def play(**changes: object) -> Play:
    """Five clients whose first round has just opened."""
    return Play(secure(**changes), *FIVE).start().evaluated()


def answer(play: Play, *names: str) -> None:
    for name in names:
        play.send(Answered(name, play.now))


def late(play: Play) -> None:
    """The deadline and the one extension pass."""
    play.later(11)
    play.later(11)


def test_each_step_asks_those_who_answered_the_one_before() -> None:
    run = play()
    stage = run.run.stage
    assert (stage.kind, stage.name, run.open) == ("train", "train", list(FIVE))
    run.all_answer()
    assert (run.run.stage.kind, run.run.stage.name) == ("share", "train/share")
    assert run.run.stage.deadline == run.now + 5
    answer(run, "a", "b", "c", "d")
    run.later(6)
    assert (run.run.stage.kind, run.open) == ("mask", ["a", "b", "c", "d"])
    answer(run, "a", "b", "c")
    run.later(6)
    assert (run.run.stage.kind, run.open) == ("confirm", ["a", "b", "c"])
    assert run.run.answered_first == ("a", "b", "c")
    run.all_answer()
    answer(run, "b")
    run.send(AnsweredLast("c", run.now))
    assert run.run.due_job == "aggregate"
    run.done()
    assert (run.run.round, run.run.stage.kind) == (1, "evaluate")


def test_too_few_in_a_step_begin_another_attempt_with_those_of_the_first() -> None:
    run = play()
    run.all_answer()
    answer(run, "a", "b")
    late(run)
    assert [fact for fact in run.facts if isinstance(fact, run_state.AttemptFailed)] == [run_state.AttemptFailed(1)]
    assert (run.run.step, run.run.stage.name, run.open) == (5, "train/2", list(FIVE))
    run.send(Withdraw("e", False, run.now))
    run.all_answer().all_answer().all_answer().all_answer()
    run.send(AnsweredLast("a", run.now))
    run.done()
    assert run.run.stage.kind == "evaluate"
    assert run.run.step == 10


def test_a_second_attempt_takes_the_least_number_whatever_the_first_needed() -> None:
    run = Play(replace(secure(), quorum=1.0), *FIVE).start().evaluated()
    answer(run, "a", "b", "c", "d")
    run.later(11)
    assert run.run.stage.kind == "train", "all five are wanted"
    answer(run, "e")
    late(run)
    assert run.run.stage.name == "train/2"
    answer(run, "a", "b", "c")
    run.later(11)
    assert run.run.stage.name == "train/2/share"


def test_the_last_attempt_pauses_and_can_be_resumed() -> None:
    run = play()
    for attempt in ("train", "train/2"):
        assert run.run.stage.name == attempt
        run.all_answer()
        run.send(run_state.Failed("e", run.now))
        late(run)
    assert (run.run.state, run.run.reason) == ("paused", run_state.QUORUM_MISSED)
    run.send(Resume(run.now))
    assert run.open == list(FIVE), "who failed is asked again"


def test_after_a_reveal_there_is_no_other_attempt() -> None:
    run = play()
    run.all_answer().all_answer().all_answer().all_answer()
    assert run.run.stage.kind == "unmask"
    answer(run, "a", "b")
    late(run)
    assert (run.run.state, run.run.reason, run.run.stage.kind) == ("paused", run_state.QUORUM_MISSED, "unmask")
    run.send(Resume(run.now))
    run.send(AnsweredLast("c", run.now))
    assert run.run.due_job == "aggregate"
    closed = play().all_answer().all_answer().all_answer().all_answer()
    answer(closed, *FIVE)
    late(closed)
    assert (closed.run.state, closed.run.stage.kind) == ("paused", "unmask"), "no answer has opened the sum"
    with pytest.raises(WrongMoment):
        run.send(run_state.StartRefused("too late"))


def test_a_sum_without_enough_members_fails_where_the_spec_says_so() -> None:
    run = Play(replace(secure(), on_missed_quorum="fail"), *FIVE).start().evaluated()
    late(run)
    assert (run.run.state, run.run.reason) == ("failed", run_state.QUORUM_MISSED)


def test_a_sum_that_cannot_be_pauses_with_its_reason() -> None:
    run = play()
    run.all_answer().all_answer().all_answer().all_answer()
    run.send(AnsweredLast("c", run.now))
    run.send(run_state.SumInvalid("sum-invalid: the mean's norm"))
    assert (run.run.state, run.run.reason) == ("paused", "sum-invalid: the mean's norm")
    with pytest.raises(WrongMoment):
        run.send(run_state.JobDone(run.now)) if run.run.due_job is None else run.send(AnsweredLast("a", run.now))


def test_nobody_is_asked_again_for_a_sum_that_was_opened_while_it_was_paused() -> None:
    run = play().all_answer().all_answer().all_answer().all_answer()
    run.send(run_state.Failed("a", run.now))
    late(run)
    assert (run.run.state, run.run.reason) == ("paused", run_state.QUORUM_MISSED)
    run.send(AnsweredLast("b", run.now))
    facts = run.send(Resume(run.now))
    assert not [fact for fact in facts if isinstance(fact, run_state.Asked)]
    assert (run.run.state, run.run.due_job, run.run.stage.having("failed", "open")) == ("running", "aggregate", ["a"])
    run.done()
    assert run.run.stage.kind == "evaluate"


def test_two_phases_each_have_their_own_steps() -> None:
    run = Play(secure(TWO), *FIVE).start().evaluated()
    for name in ("prompts", "aggregators"):
        assert run.run.stage.name == name
        run.all_answer().all_answer().all_answer().all_answer()
        run.send(AnsweredLast("a", run.now))
        run.done()
    assert run.run.stage.kind == "evaluate"


def test_who_is_left_out_of_shares_is_missed_in_this_attempt_and_later_in_the_next() -> None:
    run = play().all_answer()
    answer(run, "a", "b", "c")
    run.send(run_state.LeftOut(("e",), run.now))
    assert (run.run.stage.name, run.open, run.run.cohort) == ("train/share", ["d"], ("a", "b", "c", "d"))
    assert run.run.stage.having("failed") == ["e"]
    answer(run, "d")
    assert (run.run.stage.name, run.open) == ("train/mask", ["a", "b", "c", "d"])
    answer(run, "a", "b")
    run.send(run_state.LeftOut(("b",), run.now))
    assert (run.run.stage.name, run.open) == ("train/2", ["a", "c", "d"]), "a roster was told: the next attempt"
    assert (run.run.cohort, run.run.previous) == (("a", "c", "d"), ())
    for wrong in (run_state.LeftOut(("a",), run.now), AnsweredLast("a", run.now)):
        with pytest.raises(WrongMoment):
            run.send(wrong)
    run.all_answer()
    run.send(run_state.LeftOut(("a",), run.now))
    assert (run.run.state, run.run.reason) == ("paused", run_state.QUORUM_MISSED), "two are too few, and none follows"


def test_who_counts_in_the_first_sum_is_asked_for_the_second() -> None:
    run = Play(secure(TWO), *FIVE).start().evaluated().all_answer().all_answer()
    answer(run, "a", "b", "c", "d")
    run.later(6)
    run.all_answer()
    for wrong in ("e", "nobody"):
        with pytest.raises(WrongMoment):
            run.send(AnsweredLast(wrong, run.now))
    run.send(AnsweredLast("a", run.now))
    run.done()
    assert (run.run.stage.name, run.open, run.run.stage.sample_size) == ("aggregators", ["a", "b", "c", "d"], 5)
    run.all_answer().all_answer()
    answer(run, "a", "b", "c")
    run.later(6)
    assert (run.run.stage.name, run.run.answered_first) == ("aggregators/confirm", ("a", "b", "c", "d"))


def test_another_attempt_asks_nobody_new() -> None:
    run = Play(replace(secure(), fraction=0.6), *FIVE).start().evaluated()
    first = run.open
    run.all_answer()
    late(run)
    assert (run.run.stage.name, run.open) == ("train/2", first)
    late(run)
    assert (run.run.state, sorted(run.run.stage.asks)) == ("paused", first)


class SecureInAnyOrder(Steered):
    """Events in any order: later sets are within earlier ones, and after a reveal no attempt begins."""

    @initialize(clients=st.integers(3, 6), two=st.booleans())
    def begin(self, clients: int, two: bool) -> None:
        names = [f"c{number}" for number in range(clients)]
        base = secure(TWO if two else ONE)
        self.play = Play(replace(base, min_clients=3), *names).start().evaluated()
        self.closed: dict[tuple[int, int], set[str]] = {}
        self.revealed: set[tuple[int, int]] = set()
        self.finish(self.play.facts)

    def finish(self, facts: list) -> None:
        for fact in facts:
            if isinstance(fact, Opened):
                self.here = (fact.round, fact.step)
                plan = self.play.rules.plan(*self.here)
                if plan is None or plan.secure is None:
                    continue
                if plan.secure.index:
                    assert set(fact.names) <= self.closed[(fact.round, fact.step - 1)]
                else:
                    assert (fact.round, plan.secure.number) not in self.revealed, "no attempt after a reveal"
            elif isinstance(fact, Closed):
                self.closed[self.here] = set(fact.counted)

    def send(self, event: run_state.Event) -> None:
        stage, run = self.play.run.stage, self.play.run
        try:
            facts = self.play.send(event)
        except WrongMoment:
            return
        if stage is not None and stage.kind == "unmask" and isinstance(event, Answered | AnsweredLast):
            plan = self.play.rules.plan(run.round, run.step)
            self.revealed.add((run.round, plan.secure.number))
        self.finish(facts)

    @rule(picks=st.sets(st.sampled_from(FIVE), min_size=1))
    def leave_out(self, picks: set[str]) -> None:
        self.send(run_state.LeftOut(tuple(picks), self.play.now))

    @rule(pick=st.integers(0, 99), last=st.booleans())
    def answer(self, pick: int, last: bool) -> None:
        if self.play.open:
            name, stage = self.play.open[pick % len(self.play.open)], self.play.run.stage
            unmask = stage is not None and stage.kind == "unmask"
            self.send(AnsweredLast(name, self.play.now) if unmask and last else Answered(name, self.play.now))

    @rule()
    def all_but_the_sum(self) -> None:
        stage = self.play.run.stage
        if stage is not None and stage.kind != "unmask":
            for name in list(self.play.open):
                self.send(Answered(name, self.play.now))

    @rule(pick=st.integers(0, 99))
    def fail(self, pick: int) -> None:
        if self.play.open:
            self.send(run_state.Failed(self.play.open[pick % len(self.play.open)], self.play.now))

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.play.now += seconds
        self.send(run_state.Restarted(self.play.now) if seconds == 1.0 else run_state.Tick(self.play.now))

    @invariant()
    def a_stage_is_of_its_plan(self) -> None:
        run = getattr(self, "play", None) and self.play.run
        if run and run.stage is not None and run.state not in ENDED:
            plan = self.play.rules.plan(run.round, run.step)
            assert run.stage.kind == ("evaluate" if plan is None else plan.kind)
            assert plan is None or plan.secure is None or KINDS[plan.secure.index] == plan.kind


TestSecureInAnyOrder = SecureInAnyOrder.TestCase
TestSecureInAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
