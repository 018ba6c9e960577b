"""`promptfed tune`: chooses a learning rate for a run file by held-out training images."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from promptfed.cli.app import app
from promptfed.cli.common import AllowBackbone, Device, Json, Pool, RunFilePath
from promptfed.runtime.run_file import read_run
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import read_spec, write_file
from promptfed.sdk.output import console, note, print_json, say, table
from promptfed.sdk.text import percent, whole_numbers
from promptfed.shared.spec.spec import merged

if TYPE_CHECKING:
    from promptfed.experiments.bench.sweep import Tuned


@app.add(section="Try and simulate")
def tune(
    spec: RunFilePath,
    out: Annotated[Path, typer.Option(help="a new file: the run file with the chosen rate")],
    allow_backbone: AllowBackbone,
    rates: Annotated[str, typer.Option(help="learning rates to try, by commas")] = "0.002,0.01,0.03,0.1,0.3",
    seeds: Annotated[str, typer.Option(help="seeds, by commas")] = "10",
    validation: Annotated[float, typer.Option(help="share of the training images that is held out")] = 0.25,
    pool: Pool = 1,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Choose a learning rate by simulation on held-out training images, and write it into a new run file."""
    from promptfed.experiments.bench.sweep import Grid, rates_of
    from promptfed.experiments.bench.sweep import tune as choose_rate

    grid = Grid(rates_of(rates, "--rates"), whole_numbers(seeds, "--seeds"), validation)
    if out.exists():
        raise CommandError(f"{out} is there already: give --out a new file", Exit.BAD_INPUT)

    def show(done: int, total: int, title: str) -> None:
        note(f"{done + 1} of {total}: {title}")

    run = read_run(spec)
    tuned = choose_rate(run, grid, pool=pool, device=device, allow_backbone=allow_backbone, progress=show)
    write_file(out, _text(spec, tuned, grid.share).encode())
    if as_json:
        print_json(asdict(tuned) | {"out": str(out)})
        return
    rows = [
        [f"{rate:g}" + (" (chosen)" if rate == tuned.chosen else ""), percent(accuracy)]
        for rate, accuracy in tuned.by_rate.items()
    ]
    template = [] if tuned.zero_shot is None else [["zero-shot", percent(tuned.zero_shot)]]
    console.print(table("Accuracy on held-out training images", ["rate", "accuracy"], [*template, *rows]))
    if tuned.at_edge:
        say(f"{tuned.chosen:g} is the smallest or largest rate that was tried: a better one may lie beyond (--rates).")
    say(f"Wrote {out}: run it with `promptfed simulate {out}`.")


def _text(path: Path, tuned: Tuned, share: float) -> str:
    """The run file with the chosen rate, under a comment that names the rates and their accuracies."""
    raw = merged(read_spec(path), {"training": {"learning_rate": tuned.chosen}})
    tried = ", ".join(f"{rate:g}: {100 * accuracy:.1f} %" for rate, accuracy in tuned.by_rate.items())
    head = f"# training.learning_rate by `promptfed tune`, on {share:g} of the training images held out ({tried})\n"
    return head + yaml.safe_dump(raw, sort_keys=False, allow_unicode=True)
