"""Writes the tables of `benchmarks.coordinator_load` into docs/explanation/performance.md.

python -m benchmarks.coordinator_tables
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.harness import BENCHMARKS, DOCS, fill_tables, table

NUMBERS = BENCHMARKS / "coordinator.json"
PAGE = DOCS / "explanation" / "performance.md"
NAMES = {
    "sqlite": "SQLite",
    "postgresql": "PostgreSQL",
    "flower": "Flower, in memory",
    "flower_lean": "the same, lean clients",
}
COLUMNS = (
    *("server", "update", "clients", "updates/s", "over the whole run", "CPU per update", "p50", "p99"),
    *("503s per update", "enrolments/s", "peak memory (idle)"),
)
RATES = {"updates_per_second": "updates/s", "whole_run_updates_per_second": "whole-run updates/s"}
# Comparisons with Flower: the database, the kind of Flower's clients, their name in the table, the rate, the number of
# clients and the wanted ratio.
RATIOS = (
    ("sqlite", "flower", "Flower's in memory", "updates_per_second", {10: "1.2", 100: "1.2"}),
    ("postgresql", "flower", "Flower's in memory", "updates_per_second", {10: "0.6", 100: "0.6"}),
    ("sqlite", "flower_lean", "Flower's with lean clients", "updates_per_second", {10: "0.8", 100: "1.0"}),
    ("sqlite", "flower", "Flower's in memory", "whole_run_updates_per_second", {10: "0.9", 100: ""}),
)

Case = dict[str, Any]
# Goals for a case on SQLite: KB, clients, the name in the table, the goal, and a function that formats the figure.
FIGURES: tuple[tuple[int, int, str, str, Callable[[Case], str]], ...] = (
    (32, 1000, "p99 of an update, 1,000 clients in one burst", "at most 3 s",
     lambda case: f"{case['p99_ms'] / 1e3:.2f} s"),
    (5120, 10, "updates/s, 5 MB, 10 clients", "40", lambda case: f"{case['updates_per_second']:.0f}"),
    (32, 1000, "enrolments/s, 1,000 clients", "1,000", lambda case: f"{case['enrolments_per_second']:,.0f}"),
    (32, 1000, "memory over idle, 1,000 clients in one burst", "at most 100 MB",
     lambda case: f"{case['peak_mb'] - case['idle_mb']:.0f} MB"),
)  # fmt: skip


def update_size(kilobytes: int) -> str:
    """``32 KB`` or ``5 MB``."""
    return f"{kilobytes} KB" if kilobytes < 1024 else f"{kilobytes // 1024} MB"


def typical(cases: Iterable[Case]) -> dict[tuple[str, int, int], Case]:
    """The run with the median updates/s of each case, by server, KB and clients."""
    repeats: dict[tuple[str, int, int], list[Case]] = {}
    for case in cases:
        repeats.setdefault((case["database"], case["kilobytes"], case["clients"]), []).append(case)
    return {
        key: sorted(runs, key=lambda run: run["updates_per_second"])[len(runs) // 2] for key, runs in repeats.items()
    }


def rates(numbers: dict[str, Any]) -> str:
    """A table with a row for each case."""
    rows = []
    for case in typical(numbers["cases"]).values():
        cells = [NAMES[case["database"]], update_size(case["kilobytes"]), f"{case['clients']:,}"]
        cells += [f"{case['updates_per_second']:,.0f}", f"{case['whole_run_updates_per_second']:,.0f}"]
        cells += [f"{case['cpu_ms_per_update']:.2f} ms"]
        if "p50_ms" in case:
            cells += [f"{case['p50_ms']:,.0f} ms", f"{case['p99_ms']:,.0f} ms"]
            cells += [f"{case['too_many_uploads'] / case['updates']:.2f}", f"{case['enrolments_per_second']:,.0f}"]
        else:
            cells += [""] * 4
        rows.append([*cells, f"{case['peak_mb']:.0f} MB ({case['idle_mb']:.0f})"])
    return table(COLUMNS, rows)


def goals(numbers: dict[str, Any]) -> str:
    """A table of the goals and the measured figures."""
    cases, rows = typical(numbers["cases"]), []
    for database, kind, title, rate, wanted in RATIOS:
        for clients, ratio in wanted.items():
            ours, theirs = cases.get((database, 32, clients)), cases.get((kind, 32, clients))
            if ours and theirs:
                name = f"{RATES[rate]} on {NAMES[database]} over {title}, 32 KB, {clients} clients"
                rows.append(
                    [name, ratio, f"**{ours[rate] / theirs[rate]:.2f}** ({ours[rate]:,.0f} / {theirs[rate]:,.0f})"]
                )
    for kilobytes, clients, name, goal, read in FIGURES:
        if case := cases.get(("sqlite", kilobytes, clients)):
            rows.append([name, goal, f"**{read(case)}**"])
    return table(["what", "wanted", "measured"], rows)


def filled(page: str, numbers: dict[str, Any]) -> str:
    """``page`` with both tables made from ``numbers``."""
    return fill_tables(page, "coordinator", {"rates": rates(numbers), "goals": goals(numbers)})


def main() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text(), json.loads(NUMBERS.read_text())))


if __name__ == "__main__":
    main()
