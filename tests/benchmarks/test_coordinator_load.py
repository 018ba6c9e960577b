"""The coordinator's benchmark: its tables, the page that is made from them, and a case of each server."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from benchmarks import beside_flower, coordinator_load, coordinator_tables, players

OURS: dict[str, Any] = {
    "kilobytes": 32,
    "updates": 500,
    "p50_ms": 100.0,
    "p99_ms": 2500.0,
    "too_many_uploads": 50,
    "enrolments_per_second": 1234.5,
    "idle_mb": 500.0,
    "peak_mb": 580.0,
    "cpu_ms_per_update": 1.25,
}


def case(database: str, clients: int, rate: float, **changes: Any) -> dict[str, Any]:
    return OURS | {
        "database": database,
        "clients": clients,
        "updates_per_second": rate,
        "whole_run_updates_per_second": rate / 2,
        **changes,
    }


def flower(clients: int, rate: float) -> dict[str, Any]:
    about = {"flwr": "1.41.0", "idle_mb": 70.0, "peak_mb": 90.0, "cpu_ms_per_update": 0.5}
    measured = {"updates_per_second": rate, "whole_run_updates_per_second": rate}
    return {"database": "flower", "kilobytes": 32, "clients": clients, "updates": 500, **about, **measured}


def test_the_tables_tell_the_median_of_repeats_and_compare_it_with_what_was_wanted() -> None:
    cases = [case("sqlite", 100, rate) for rate in (900.0, 600.0, 750.0)]
    cases += [flower(100, 500.0), case("sqlite", 1000, 700.0), case("postgresql", 100, 250.0)]
    cases += [case("sqlite", 10, 45.0, kilobytes=5120), flower(100, 1500.0) | {"database": "flower_lean"}]
    numbers = {"cases": cases}
    assert coordinator_tables.rates(numbers).splitlines()[2:4] == [
        "| SQLite | 32 KB | 100 | 750 | 375 | 1.25 ms | 100 ms | 2,500 ms | 0.10 | 1,234 | 580 MB (500) |",
        "| Flower, in memory | 32 KB | 100 | 500 | 500 | 0.50 ms |  |  |  |  | 90 MB (70) |",
    ]
    assert coordinator_tables.goals(numbers).splitlines()[2:] == [
        "| updates/s on SQLite over Flower's in memory, 32 KB, 100 clients | 1.2 | **1.50** (750 / 500) |",
        "| updates/s on PostgreSQL over Flower's in memory, 32 KB, 100 clients | 0.6 | **0.50** (250 / 500) |",
        "| updates/s on SQLite over Flower's with lean clients, 32 KB, 100 clients | 1.0 | **0.50** (750 / 1,500) |",
        "| whole-run updates/s on SQLite over Flower's in memory, 32 KB, 100 clients |  | **0.75** (375 / 500) |",
        "| p99 of an update, 1,000 clients in one burst | at most 3 s | **2.50 s** |",
        "| updates/s, 5 MB, 10 clients | 40 | **45** |",
        "| enrolments/s, 1,000 clients | 1,000 | **1,234** |",
        "| memory over idle, 1,000 clients in one burst | at most 100 MB | **80 MB** |",
    ]


def test_rounds_are_timed_each_and_all_together() -> None:
    record = players.Record(spans=[(1, 0.0, 2.0), (1, 0.5, 3.0), (2, 5.0, 6.0), (2, 5.5, 7.0)])
    assert (record.seconds(), record.whole_seconds()) == (5.0, 7.0)


def test_the_page_shows_what_was_measured() -> None:
    numbers = json.loads(coordinator_tables.NUMBERS.read_text())
    page = coordinator_tables.PAGE.read_text()
    assert page.count("<!-- table: coordinator ") == 2
    assert coordinator_tables.filled(page, numbers) == page, "python -m benchmarks.coordinator_tables"


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
    for name in beside_flower.CLIENTS:
        figures = beside_flower.measure(python, name, 32, 10)
        assert figures["updates"] == 200
        assert figures.keys() == flower(10, 1.0).keys() - {"database"}
