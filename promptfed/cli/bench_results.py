"""`promptfed bench compare` and `promptfed bench verify`: what is done with a bench's results afterwards."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from promptfed.experiments.bench.results import BenchRun, row_label
from promptfed.experiments.bench.verification import chosen, read_runs, verify
from promptfed.experiments.figures.comparison import Comparison, answers_of, compare
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import console, print_json

COMPARE, VERIFY = "compare", "verify"
COMMANDS = (COMPARE, VERIFY)
ROW = "#"  # between a folder and a row of its table
_OPTIONS = {
    COMPARE: {"protocol", "results", "as_json"},
    VERIFY: {"protocol", "results", "cell", "tolerance", "device", "allow_backbone", "as_json"},
}


def folder_for(protocol: str, results: Sequence[str], out: Path | None, given: Set[str]) -> Path:
    """The folder of a bench that is run.

    Raises:
        CommandError: none is given, or something that only `compare` and `verify` look at.
    """
    extra = [*results, *(f"--{name}" for name in sorted({"cell", "tolerance"} & given))]
    if extra:
        raise CommandError(f"bench {protocol} takes no {extra[0]}: leave it out", Exit.BAD_INPUT)
    if out is None:
        raise CommandError(f"bench {protocol} needs a folder for its results: give --out", Exit.BAD_INPUT)
    return out


def run(
    command: str,
    results: Sequence[str],
    cell: str,
    tolerance: float,
    device: str,
    allow_backbone: bool,
    given: Set[str],
    as_json: bool,
) -> None:
    """Carry out ``compare`` or ``verify``; ``given`` are the options of the command line by their parameters.

    Raises:
        CommandError: what is wrong with the results or the options; FAILED where a run did not come out as kept.
    """
    unused = sorted(given - _OPTIONS[command])
    if unused:
        raise CommandError(f"bench {command} takes no --{unused[0].replace('_', '-')}: leave it out", Exit.BAD_INPUT)
    if command == COMPARE:
        _compare(results, as_json)
    else:
        _verify(results, cell, tolerance / 100, device, allow_backbone, as_json)


def _compare(results: Sequence[str], as_json: bool) -> None:
    if len(results) != 2:
        raise CommandError(
            "bench compare takes two of FOLDER[#ROW], as results/a#plan results/a#promptfl", Exit.BAD_INPUT
        )
    (first, row_a), (second, row_b) = (_named(text) for text in results)
    runs_a, runs_b = read_runs(first), read_runs(second)
    found: list[Comparison] = []
    for a, b in _pairs(runs_a, row_a, runs_b, row_b):
        found += compare(answers_of(runs_a, a), answers_of(runs_b, b))
    if as_json:
        print_json([one.model_dump() for one in found])
        return
    for one in found:
        console.print(_line(one), highlight=False, markup=False, soft_wrap=True)


def _named(text: str) -> tuple[Path, str]:
    folder, _, row = text.partition(ROW)
    return Path(folder), row


def _pairs(runs_a: Sequence[BenchRun], row_a: str, runs_b: Sequence[BenchRun], row_b: str) -> list[tuple[str, str]]:
    """The rows named, or every row that both have."""
    if row_a or row_b:
        return [(row_a or row_b, row_b or row_a)]
    rows = [
        dict.fromkeys(row_label(run, one.split) for run in runs for one in run.outcomes) for runs in (runs_a, runs_b)
    ]
    common = [(row, row) for row in rows[0] if row in rows[1]]
    if not common:
        raise CommandError("the two have no row in common: name one of each, as results/a#plan", Exit.BAD_INPUT)
    return common


def _line(one: Comparison) -> str:
    exact = "" if one.p_mcnemar is None else f"McNemar p = {one.p_mcnemar:.2g} ({one.only_a} : {one.only_b}), "
    return (
        f"{one.a} - {one.b}, {one.test_set}, {one.pictures} pictures: "
        f"{100 * one.accuracy_a:.1f} - {100 * one.accuracy_b:.1f} = {100 * one.difference:+.1f} points "
        f"[95 %: {100 * one.low:+.1f}, {100 * one.high:+.1f}], {exact}bootstrap p = {one.p_bootstrap:.2g}"
    )


def _verify(
    results: Sequence[str], cell: str, tolerance: float, device: str, allow_backbone: bool, as_json: bool
) -> None:
    if len(results) != 1:
        raise CommandError("bench verify takes one folder of results, as results/plan", Exit.BAD_INPUT)
    run = chosen(read_runs(Path(results[0])), *_cell(cell))
    verdict = verify(run, device, allow_backbone)
    held = verdict.holds(tolerance)
    if as_json:
        print_json(verdict.model_dump() | {"holds": held})
    where = f"{verdict.label}, seed {verdict.seed}, {verdict.trial}"
    wrong = [
        text
        for good, text in (
            (verdict.same_backbone, "another backbone"),
            (verdict.same_data, "other data"),
            (verdict.apart <= tolerance, f"accuracies up to {100 * verdict.apart:.1f} points apart"),
        )
        if not good
    ]
    if wrong:
        raise CommandError(f"{where} did not come out as kept: {', '.join(wrong)}", Exit.FAILED)
    bits = "the same state, bit for bit" if verdict.same_state else "another state (other machine, torch or threads)"
    if not as_json:
        console.print(
            f"{where}: came out as kept: the same data and accuracies, {bits}.", highlight=False, soft_wrap=True
        )


def _cell(text: str) -> tuple[str | None, int | None, str | None]:
    row, seed, trial = [*(part.strip() for part in text.split(",", 2)), "", ""][:3]
    try:
        return row or None, int(seed) if seed else None, trial or None
    except ValueError:
        raise CommandError(f"--cell {text!r}: write ROW[,SEED[,TRIAL]]", Exit.BAD_INPUT) from None
