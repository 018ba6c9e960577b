"""The choice of a method and a rate, with accuracies that are given instead of trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from promptfed.cli.commands.tune import _seeds, _words
from promptfed.experiments.bench.tuning import AUTO, Candidate, Plan, Trial, choose, gain
from promptfed.sdk.client import CommandError, Exit
from promptfed.shared.methods import METHODS, resolve_spec
from promptfed.shared.spec.spec import FederationSpec

IMAGES = 100
NAMES = ["a", "b"]


def right(share: float) -> dict[tuple[str, str], Any]:
    return {("site", "images"): (np.arange(IMAGES) < round(share * IMAGES)).astype(float)}


@dataclass
class Given:
    """Runs whose accuracy is ``best[method]`` at a rate and falls by a tenth for each decade from it.

    A method without an entry in ``peaks`` has no learning rate. Each round takes one second.
    """

    best: dict[str, float]
    peaks: dict[str, float]
    bytes_round: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    ran: list[tuple[Candidate, int, int]] = field(default_factory=list)
    default: FederationSpec = field(
        default_factory=lambda: resolve_spec({"name": "x", "method": {"name": "promptfl"}, "rounds": 8})
    )

    def spec(self, method: str) -> FederationSpec:
        if method not in self.best:
            raise CommandError(f"there is no method {method!r}", Exit.BAD_INPUT)
        spec = {"name": "x", "method": {"name": method}, "rounds": 8, "class_names": NAMES}
        return resolve_spec(spec)

    def run(self, candidate: Candidate, rounds: int, seed: int) -> Trial:
        self.seconds += rounds
        self.ran.append((candidate, rounds, seed))
        peak = self.peaks.get(candidate.method)
        off = abs(math.log10(candidate.rate / peak)) if peak else 0.0
        share = self.best[candidate.method] - off / 10
        return Trial(
            candidate, rounds, right(share), right(0.3), ((share,),), rounds,
            self.bytes_round.get(candidate.method, 100),
        )  # fmt: skip

    def clock(self) -> float:
        return self.seconds


def test_the_best_method_wins_at_a_rate_inside_its_grid() -> None:
    runs = Given(
        {"promptfl": 0.5, "fedclip": 0.8, "fedtaskres": 0.6}, {"promptfl": 0.1, "fedclip": 0.01, "fedtaskres": 0.1}
    )
    chosen = choose(runs, Plan(("fedclip", "fedtaskres"), seconds=1e6), clock=runs.clock)
    assert chosen.winner.method == "fedclip"
    assert abs(math.log10(chosen.winner.rate / 0.01)) < 0.3
    assert not chosen.at_edge
    rates = [row.candidate.rate for row in chosen.tried if row.candidate.method == "fedclip" and row.rounds == 8]
    assert min(rates) < chosen.winner.rate < max(rates)
    assert chosen.default == Candidate("promptfl", 0.1)
    assert chosen.default_gain is not None
    assert chosen.default_gain.mean == pytest.approx(chosen.accuracy - 0.5, abs=0.011)
    assert chosen.default_gain.low <= chosen.default_gain.mean <= chosen.default_gain.high
    assert chosen.template_gain is not None
    assert chosen.template_gain.mean == pytest.approx(chosen.accuracy - 0.3)
    assert chosen.zero_shot == pytest.approx(0.3)


def test_a_best_rate_beyond_the_four_decades_is_followed() -> None:
    runs = Given({"promptfl": 0.2, "fedclip": 0.9}, {"promptfl": 0.1, "fedclip": 40.0})
    chosen = choose(runs, Plan(("fedclip",), seconds=1e6), clock=runs.clock)
    assert chosen.winner.method == "fedclip"
    assert 20 < chosen.winner.rate < 80
    assert not chosen.at_edge
    fixed = choose(runs, Plan(("fedclip",), rates=(1.0, 10.0), seconds=1e6), clock=runs.clock)
    assert (fixed.winner.rate, fixed.at_edge) == (10.0, True)


def test_the_default_is_in_every_rung_and_wins_if_nothing_is_better() -> None:
    others = {"fedclip": 0.6, "fedtaskres": 0.6, "coop": 0.6, "fedlora": 0.6}
    runs = Given({"promptfl": 0.7} | others, {"promptfl": 0.1, **dict.fromkeys(others, 0.01)})
    chosen = choose(runs, Plan(tuple(others), seconds=1e6), clock=runs.clock)
    assert chosen.winner == chosen.default
    assert chosen.default_gain is None
    worst = Given({"promptfl": 0.35} | others, {"promptfl": 0.1, **dict.fromkeys(others, 0.01)})
    choose(worst, Plan(tuple(others), seconds=1e6), clock=worst.clock)
    for given in (runs, worst):
        rungs = {rounds for _, rounds, _ in given.ran}
        assert {rounds for candidate, rounds, _ in given.ran if candidate == chosen.default} == rungs
        assert {seed for candidate, _, seed in given.ran if candidate == chosen.default} == {12, 13, 14, 15}


def test_the_search_ends_with_its_time_and_says_what_was_not_tried() -> None:
    methods = {"promptfl": 0.5, "fedclip": 0.8, "fedtaskres": 0.6}
    runs = Given(methods, {"promptfl": 0.1, "fedclip": 1e-3, "fedtaskres": 0.1})
    chosen = choose(runs, Plan(tuple(methods), seconds=60), clock=runs.clock)
    assert runs.seconds <= 60 + 64  # the default may go over it, since it is always tried
    assert chosen.untried > 0
    assert chosen.accuracy >= 0.5


def test_the_best_of_a_first_rung_without_time_for_more_is_still_tried_to_the_end() -> None:
    runs = Given({"promptfl": 0.5, "fedclip": 0.8}, {"promptfl": 0.1, "fedclip": 5e-3})
    chosen = choose(runs, Plan(("fedclip",), seconds=8), clock=runs.clock)
    assert chosen.winner == Candidate("fedclip", 5e-3)
    assert {candidate for candidate, rounds, _ in runs.ran if rounds == 8} == {chosen.winner, chosen.default}
    assert chosen.untried > 0


def test_a_method_that_sends_too_much_is_left_out() -> None:
    methods = {"promptfl": 0.5, "fedclip": 0.8, "fedtaskres": 0.6}
    runs = Given(methods, {"promptfl": 0.1, "fedclip": 1e-3, "fedtaskres": 0.1}, {"fedclip": 1000})
    chosen = choose(runs, Plan(tuple(methods), seconds=1e6, bytes=7999), clock=runs.clock)
    assert chosen.winner.method == "fedtaskres"
    assert "8,000 bytes" in chosen.refused["fedclip"]
    over = Given(methods, {"promptfl": 0.1, "fedclip": 1e-3, "fedtaskres": 0.1}, {"promptfl": 1000})
    over.best["promptfl"] = 0.9
    assert choose(over, Plan(tuple(methods), seconds=1e6, bytes=7999), clock=over.clock).winner.method == "fedclip"


def test_a_method_without_a_rate_is_tried_once_in_a_rung() -> None:
    runs = Given({"promptfl": 0.5, "fedlp": 0.8}, {"promptfl": 0.1})
    chosen = choose(runs, Plan(("fedlp",), seconds=1e6), clock=runs.clock)
    assert chosen.winner.method == "fedlp"
    assert not chosen.at_edge
    assert (
        len({candidate.rate for candidate, rounds, _ in runs.ran if candidate.method == "fedlp" and rounds == 8}) == 1
    )


def test_candidates_that_are_all_alike_are_an_error() -> None:
    runs = Given({"promptfl": 0.5, "coop": 0.5}, {})
    with pytest.raises(CommandError, match="every candidate has the same accuracy"):
        choose(runs, Plan(("coop",), seconds=1e6), clock=runs.clock)


def test_one_seed_has_no_interval_and_rates_of_every_rung_are_no_edge() -> None:
    runs = Given({"promptfl": 0.9}, {"promptfl": 1.0})
    chosen = choose(runs, Plan(rates=(0.1, 1.0, 10.0), seeds=(12,), seconds=1e6), clock=runs.clock)
    assert (chosen.winner.rate, chosen.at_edge) == (1.0, False)
    assert chosen.template_gain is not None
    assert (chosen.template_gain.low, chosen.template_gain.high) == (None, None)
    assert _words(chosen).endswith("+60.0 points over zero-shot, +10.0 points over promptfl, rate 0.1")
    many = [Candidate("promptfl", 10.0**k) for k in range(-6, 7)]
    later = choose(runs, Plan(rates=tuple(one.rate for one in many), seconds=1e6), clock=runs.clock)
    finals = {row.candidate.rate for row in later.tried if row.rounds == 8}
    assert len(finals) < len(many), "most were tried in earlier rungs alone"
    assert not later.at_edge


def test_seeds_are_listed_or_counted() -> None:
    assert _seeds("3") == (12, 13, 14)
    assert _seeds("0,1,2") == (0, 1, 2)
    with pytest.raises(CommandError, match="how many seeds, at least 1"):
        _seeds("0")


def test_a_gain_is_paired_image_by_image() -> None:
    a = Trial(Candidate("x", 1.0), 1, right(0.8), right(0.5), (), 1.0, 0.0)
    found = gain([a], [a.template])
    assert found is not None
    assert found.mean == pytest.approx(0.3)
    # The standard error of the mean of 30 ones among 100 zeros.
    assert found.low == pytest.approx(0.3 - 1.96 * math.sqrt(0.3 * 0.7 / 100), abs=0.02)
    assert gain([a], [{}]) is None


def test_the_methods_of_auto_are_there() -> None:
    assert set(AUTO) <= set(METHODS.own())
    assert len(set(AUTO)) == len(AUTO)
