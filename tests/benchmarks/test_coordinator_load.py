"""The coordinator's benchmark: its table, and a case of each server."""

from __future__ import annotations

import os
from typing import Any

import pytest

from benchmarks import coordinator_load, players
from benchmarks.flower import beside

OURS: dict[str, Any] = {
    "kilobytes": 32, "updates": 500, "p50_ms": 100.0, "p99_ms": 2500.0, "too_many_uploads": 50,
    "enrolments_per_second": 1234.5, "idle_mb": 500.0, "peak_mb": 580.0, "cpu_ms_per_update": 1.25,
}  # fmt: skip


def case(database: str, clients: int, rate: float) -> dict[str, Any]:
    return OURS | {
        "database": database, "clients": clients, "updates_per_second": rate, "whole_run_updates_per_second": rate / 2,
    }  # fmt: skip


def flower(clients: int, rate: float) -> dict[str, Any]:
    about = {"flwr": "1.41.0", "idle_mb": 70.0, "peak_mb": 90.0, "cpu_ms_per_update": 0.5}
    measured = {"updates_per_second": rate, "whole_run_updates_per_second": rate}
    return {"database": "flower", "kilobytes": 32, "clients": clients, "updates": 500, **about, **measured}


def test_the_table_tells_the_median_of_repeats() -> None:
    cases = [case("sqlite", 100, rate) for rate in (900.0, 600.0, 750.0)]
    assert coordinator_load.medians([*cases, flower(100, 500.0)]).splitlines()[2:] == [
        "| sqlite | 32 | 100 | 750.0 | 1.2 | 100.0 | 2,500.0 | 1,234.5 | 500.0 | 580.0 |",
        "| flower | 32 | 100 | 500.0 | 0.5 |  |  |  | 70.0 | 90.0 |",
    ]


def test_rounds_are_timed_each_and_all_together() -> None:
    record = players.Record(spans=[(1, 0.0, 2.0), (1, 0.5, 3.0), (2, 5.0, 6.0), (2, 5.5, 7.0)])
    assert (record.seconds(), record.whole_seconds()) == (5.0, 7.0)


@pytest.mark.slow
def test_a_case_of_ours_has_every_figure() -> None:
    figures = coordinator_load.measure([], 32, 10)
    assert figures["updates"] == 200
    assert figures.keys() == case("sqlite", 10, 1.0).keys() - {"database"}
    assert all(figures[name] > 0 for name in figures.keys() - {"too_many_uploads"})


@pytest.mark.slow
def test_a_case_of_flower_s_has_every_figure() -> None:
    python = os.environ.get("PROMPTFED_FLOWER_PYTHON")
    if python is None:
        pytest.skip("Flower's server: PROMPTFED_FLOWER_PYTHON=a Python with flwr make test-all; flwr has its own")
    for name in beside.CLIENTS:
        figures = beside.measure(python, name, 32, 10)
        assert figures["updates"] == 200
        assert figures.keys() == flower(10, 1.0).keys() - {"database"}
