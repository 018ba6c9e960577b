"""`promptfed bench`: methods compared under a protocol; `promptfed tune`: a method and a learning rate for a run file.

Tuning chooses by held-out training images.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from promptfed.cli.app import Made, app
from promptfed.cli.bench_options import BenchOptions
from promptfed.cli.common import AllowBackbone, Device, Json, Pool, RunFilePath, Written
from promptfed.console.files import expect_new, expect_suffix, write_file
from promptfed.console.output import console, note, print_json, say, table, whole_numbers
from promptfed.runtime.run_file import read_run
from promptfed.shared.errors import BadInput
from promptfed.shared.plain_text import counted, percent, shortened, size
from promptfed.shared.service.yaml_text import read_mapping

if TYPE_CHECKING:
    from promptfed.experiments.bench.tuning import Chosen, Gain

MOST_ROWS = 12  # candidates that the table shows


@app.add(section="Try and simulate")
def bench(
    protocol: Annotated[
        str,
        typer.Argument(
            help="base-to-novel, leave-one-domain-out, personalisation, cross-dataset, few-shot:ONE_OF_THESE, "
            "multi-label, paper:TABLE, embedded: what needs no download, or photos: what packages bring"
        ),
    ],
    options: Annotated[BenchOptions, Made(BenchOptions)],
    allow_backbone: AllowBackbone,
    written: Written,
    as_json: Json = False,
) -> None:
    """Compare methods under a protocol, in simulation: JSON with provenance and a Markdown table with zero-shot."""
    from promptfed.cli.bench import run_bench

    run_bench(protocol, options, allow_backbone, written, as_json)


@app.add(section="Try and simulate")
def tune(
    spec: RunFilePath,
    out: Annotated[Path, typer.Option(help="a new file: the run file with the chosen method and rate")],
    allow_backbone: AllowBackbone,
    methods: Annotated[
        str | None, typer.Option(help="auto, or methods by commas, beside the run file's own; default: that alone")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="learning rates by commas; default: four decades around each method's default")
    ] = None,
    seeds: Annotated[str, typer.Option(help="of the last candidates: how many, or which, by commas")] = "12,13,14,15",
    validation: Annotated[float, typer.Option(help="share of the training images that is held out")] = 0.25,
    seconds: Annotated[float, typer.Option(min=1, help="time for the search")] = 300,
    pool: Pool = 1,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Choose a method and a learning rate by simulation on held-out training images, and write a new run file."""
    from promptfed.cli.bench import names_of
    from promptfed.experiments.bench.trials import Trials
    from promptfed.experiments.bench.tuning import AUTO, Plan, choose, rates_of
    from promptfed.shared.methods import method_class

    plan = Plan(
        AUTO if methods == "auto" else names_of(methods or ""),
        None if rates is None else rates_of(rates),
        _seeds(seeds),
        seconds,
    )
    expect_suffix(out, ".yaml", "a run file")
    expect_new(out)
    for name in plan.methods:
        method_class(name)  # or there is no such method
    run = read_run(spec)
    with TemporaryDirectory(prefix="promptfed-tune-") as features:
        trials = Trials(run, Path(features), validation, pool=pool, device=device, allow_backbone=allow_backbone)
        if run.chosen is not None:
            note(run.chosen)
        chosen = choose(trials, plan, note)
        changes = trials.changes(chosen.winner.method, chosen.winner.rate)
    write_file(out, _text(spec, changes, chosen, validation).encode())
    if as_json:
        print_json(asdict(chosen) | {"out": str(out)})
    else:
        _show(chosen, out, trials.default.figure)


def _show(chosen: Chosen, out: Path, figure: str) -> None:
    template = [] if chosen.zero_shot is None else [["zero-shot", "", "", "", percent(chosen.zero_shot), ""]]
    rows = [
        [
            row.candidate.method + (" (chosen)" if row.candidate == chosen.winner else ""),
            f"{row.candidate.rate:g}",
            str(row.rounds),
            str(row.seeds),
            percent(row.accuracy),
            size(row.bytes),
        ]
        for row in chosen.tried[:MOST_ROWS]
    ]
    columns = ["method", "rate", "rounds", "seeds", figure.lower(), "bytes of a client"]
    console.print(table(f"{figure} on held-out training images", columns, [*template, *rows]))
    say(f"{_words(chosen)}.")
    for method, reason in chosen.refused.items():
        say(f"Left out: {method}: {reason}")
    for line in _untried(chosen):
        say(line)
    if chosen.at_edge:
        say(f"{chosen.winner.rate:g} is the smallest or largest rate that was tried: a better one may lie beyond.")
    say(f"Wrote {out}: run it with `promptfed simulate {out}`.")


def _untried(chosen: Chosen) -> list[str]:
    """What there was no time for, in at most two lines."""
    never = Counter(row.candidate.method for row in chosen.untried if not row.rounds)
    begun = [f"{row.candidate} (after {counted(row.rounds, 'round')})" for row in chosen.untried if row.rounds]
    rates = [f"{counted(count, 'rate')} of {method}" for method, count in never.items()]
    lines = [("Not tried at all", rates), ("Not tried any further", begun)]
    more = [f"{what} for lack of time: {shortened(names, MOST_ROWS)}" for what, names in lines if names]
    return [f"{line}. Give more --seconds." for line in more]


def _words(chosen: Chosen) -> str:
    """The winner with its gains in one clause each."""
    gains = [
        f"{_points(gain)} over {other}"
        for gain, other in ((chosen.template_gain, "zero-shot"), (chosen.default_gain, f"{chosen.default}"))
        if gain is not None
    ]
    which = "" if chosen.winner != chosen.default else ", which the run file names,"
    measured = f"{percent(chosen.accuracy)} ({counted(chosen.rounds, 'round')}, {counted(chosen.seeds, 'seed')})"
    return f"{chosen.winner}{which} wins with {measured}" + (f": {', '.join(gains)}" if gains else "")


def _points(gain: Gain) -> str:
    between = (
        f" [95 %: {100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
        if gain.low is not None and gain.high is not None
        else ""
    )
    return f"{100 * gain.mean:+.1f} points{between}"


def _seeds(text: str) -> tuple[int, ...]:
    """Those that are listed; a number alone says how many, from 12 on."""
    seeds = whole_numbers(text, "--seeds")
    if seeds == (0,):
        raise BadInput("--seeds 0: give how many seeds, at least 1, or which, as in 0,1,2")
    return seeds if len(seeds) > 1 else tuple(range(12, 12 + seeds[0]))


def _text(path: Path, changes: dict[str, Any], chosen: Chosen, share: float) -> str:
    """The run file with ``changes``, under a comment that names the winner, its gains and how it was chosen."""
    head = f"# By `promptfed tune` on {share:g} of the training images held out: {_words(chosen)}\n"
    return head + yaml.safe_dump(read_mapping(path) | changes, sort_keys=False, allow_unicode=True)
