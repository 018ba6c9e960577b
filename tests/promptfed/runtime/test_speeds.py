"""The speeds of clients in virtual time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from promptfed.runtime.run_file import clock_of
from promptfed.runtime.speeds import Clock
from promptfed.sdk.errors import CommandError

NAMES = [f"client-{number}" for number in range(50)]


def first(clock: Clock, seed: int = 3) -> list[float]:
    return [speed for (speed,) in clock.of(NAMES, seed).values()]


def test_the_slowest_needs_as_many_times_as_long_as_the_fastest_as_was_asked() -> None:
    seconds = first(Clock(speeds="lognormal", slowest=20))
    assert max(seconds) / min(seconds) == pytest.approx(20)
    assert np.median(seconds) == pytest.approx(1)


def test_speeds_follow_the_seed() -> None:
    clock = Clock(speeds="lognormal")
    assert first(clock) == first(clock) != first(clock, seed=4)


def test_logarithms_of_speeds_are_normal() -> None:
    """Standardised, 2,000 of them have the quantiles of N(0, 1)."""
    clock = Clock(speeds="lognormal", slowest=20)
    logs = np.log([speed for (speed,) in clock.of([str(number) for number in range(2_000)], 1).values()])
    standard = (logs - logs.mean()) / logs.std()
    assert np.quantile(standard, [0.1, 0.5, 0.9]) == pytest.approx([-1.2816, 0, 1.2816], abs=0.1)


def test_equal_speeds_and_a_single_client() -> None:
    assert set(first(Clock(speeds="lognormal", slowest=1))) == {1.0}
    assert Clock(speeds="lognormal").of(["alone"], 0) == {"alone": [1.0]}


def test_a_trace_gives_each_client_its_lines_in_turn(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,seconds\na,1.5\nb,4\na,2\n")
    speeds = Clock(speeds=f"trace:{trace}").of(["a", "b"], 0)
    assert speeds == {"a": [1.5, 2], "b": [4]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("client;seconds\n", "must begin with the line client,seconds"),
        ("client,seconds\na,1\n", "has no line for client b; add one"),
        ("client,seconds\na,1\nb,0\n", "line 3: write a client's name and a number of seconds above 0"),
        ("client,seconds\na,nan\nb,1\n", "line 2: write"),
        ("client,seconds\na,1,1\n", "line 2: write"),
        ("", "must begin"),
    ],
)
def test_a_trace_that_cannot_be_used_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(CommandError, match=problem):
        Clock(speeds=f"trace:{trace}").of(["a", "b"], 0)


def test_a_trace_that_is_missing_is_named() -> None:
    with pytest.raises(CommandError, match=r"clock.speeds: no.csv cannot be read: there is no such file"):
        Clock(speeds="trace:no.csv").of(["a"], 0)


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ({"speeds": "fast"}, r"clock\.speeds"),
        ({"speeds": "lognormal", "slowest": 0.5}, r"clock\.slowest"),
        (3, "clock"),
    ],
)
def test_a_wrong_section_is_refused_with_its_place(section: object, place: str) -> None:
    with pytest.raises(CommandError, match=f"run.yaml: {place}"):
        clock_of(section, "run.yaml")
