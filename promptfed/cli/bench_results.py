"""`promptfed bench compare` and `promptfed bench verify`: finished benches compared and computed again."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from promptfed.cli.bench_options import BenchOptions
from promptfed.cli.common import refuse
from promptfed.experiments.bench.results import BenchRun, row_label
from promptfed.experiments.bench.verification import chosen, read_runs, verify
from promptfed.experiments.figures.comparison import Comparison, answers_of, compare
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import print_json, say
from promptfed.shared.spec.spec import AllowedBackbones

ROW = "#"  # between a folder and a row of its table
_COMPARE = {"protocol", "results", "as_json"}
_VERIFY = _COMPARE | {"cell", "tolerance", "device", "allow_backbone"}


def compare_results(results: Sequence[str], written: Set[str], as_json: bool) -> None:
    """Compare two rows, or all rows that two finished benches have in common.

    Raises:
        CommandError: the results or the options are wrong.
    """
    refuse(written - _COMPARE, "leave it out", "bench compare takes no ")
    if len(results) != 2:
        raise CommandError(
            "bench compare takes two of FOLDER[#ROW], as results/a#plan results/a#promptfl", Exit.BAD_INPUT
        )
    (first, row_a), (second, row_b) = (_named(text) for text in results)
    runs_a, runs_b = read_runs(first), read_runs(second)
    comparisons = [
        comparison
        for a, b in _pairs(runs_a, row_a, runs_b, row_b)
        for comparison in compare(answers_of(runs_a, a), answers_of(runs_b, b))
    ]
    if as_json:
        print_json([comparison.model_dump() for comparison in comparisons])
        return
    for comparison in comparisons:
        say(_line(comparison))


def _named(text: str) -> tuple[Path, str]:
    folder, _, row = text.partition(ROW)
    return Path(folder), row


def _pairs(runs_a: Sequence[BenchRun], row_a: str, runs_b: Sequence[BenchRun], row_b: str) -> list[tuple[str, str]]:
    """The rows named, or every row that both have."""
    if row_a or row_b:
        return [(row_a or row_b, row_b or row_a)]
    rows = [
        dict.fromkeys(row_label(run, answers.split) for run in runs for answers in run.outcomes)
        for runs in (runs_a, runs_b)
    ]
    common = [(row, row) for row in rows[0] if row in rows[1]]
    if not common:
        raise CommandError("the two have no row in common: name one of each, as results/a#plan", Exit.BAD_INPUT)
    return common


def _line(row: Comparison) -> str:
    exact = "" if row.p_mcnemar is None else f"McNemar p = {row.p_mcnemar:.2g} ({row.only_a} : {row.only_b}), "
    return (
        f"{row.a} - {row.b}, {row.test_set}, {row.pictures} pictures: "
        f"{100 * row.accuracy_a:.1f} - {100 * row.accuracy_b:.1f} = {100 * row.difference:+.1f} points "
        f"[95 %: {100 * row.low:+.1f}, {100 * row.high:+.1f}], {exact}bootstrap p = {row.p_bootstrap:.2g}"
    )


def verify_result(
    results: Sequence[str], options: BenchOptions, allow_backbone: AllowedBackbones, written: Set[str], as_json: bool
) -> None:
    """Compute one run of a finished bench again.

    Raises:
        CommandError: the results or the options are wrong; FAILED if the run gives another result.
    """
    refuse(written - _VERIFY, "leave it out", "bench verify takes no ")
    if len(results) != 1:
        raise CommandError("bench verify takes one folder of results, as results/plan", Exit.BAD_INPUT)
    run = chosen(read_runs(Path(results[0])), *_cell(options.cell))
    verdict = verify(run, options.device, allow_backbone)
    tolerance = options.tolerance / 100
    if as_json:
        print_json(verdict.model_dump() | {"holds": verdict.holds(tolerance)})
    where = f"{verdict.label}, seed {verdict.seed}, {verdict.trial}"
    checks = {
        "another backbone": verdict.same_backbone,
        "other data": verdict.same_data,
        f"accuracies up to {100 * verdict.apart:.1f} points apart": verdict.apart <= tolerance,
    }
    wrong = [difference for difference, passed in checks.items() if not passed]
    if wrong:
        raise CommandError(f"{where} did not come out as kept: {', '.join(wrong)}", Exit.FAILED)
    bits = "the same state, bit for bit" if verdict.same_state else "another state (other machine, torch or threads)"
    if not as_json:
        say(f"{where}: came out as kept: the same data and accuracies, {bits}.")


def _cell(text: str) -> tuple[str | None, int | None, str | None]:
    row, seed, trial = [*(part.strip() for part in text.split(",", 2)), "", ""][:3]
    try:
        return row or None, int(seed) if seed else None, trial or None
    except ValueError:
        raise CommandError(f"--cell {text!r}: write ROW[,SEED[,TRIAL]]", Exit.BAD_INPUT) from None
