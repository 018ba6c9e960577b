"""`promptfed tune`: a learning rate for a run file, by held-out training images, written into a new one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import yaml

from promptfed.experiments.bench.sweep import Grid, Tuned, tune
from promptfed.runtime.run_file import read_run
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import read_spec, write_file
from promptfed.sdk.output import console, messages, print_json, table
from promptfed.sdk.text import percent
from promptfed.shared.spec.spec import merged


def run_tune(path: Path, out: Path, grid: Grid, pool: int, device: str, allow_backbone: bool, as_json: bool) -> None:
    """Choose the rate and write the run file with it to ``out``, which must be new.

    Raises:
        CommandError: the run file cannot be read or simulated, or ``out`` cannot be written.
    """
    if out.exists():
        raise CommandError(f"{out} is there already: give --out a new file", Exit.BAD_INPUT)
    run = read_run(path)

    def show(done: int, total: int, what: str) -> None:
        messages.print(f"{done + 1} of {total}: {what}", highlight=False, markup=False, soft_wrap=True)

    tuned = tune(run, grid, pool=pool, device=device, allow_backbone=allow_backbone, progress=show)
    write_file(out, _text(path, tuned, grid).encode())
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
        text = (
            f"{tuned.chosen:g} is at the edge of what was tried: a better one may lie beyond, give more with --rates."
        )
        console.print(text, highlight=False, soft_wrap=True)
    console.print(f"Wrote {out}: run it with `promptfed simulate {out}`.", highlight=False, soft_wrap=True)


def _text(path: Path, tuned: Tuned, grid: Grid) -> str:
    """The run file as it was, with the rate, under a line that says where this comes from."""
    raw = merged(read_spec(path), {"training": {"learning_rate": tuned.chosen}})
    tried = ", ".join(f"{rate:g}: {100 * accuracy:.1f} %" for rate, accuracy in tuned.by_rate.items())
    head = (
        f"# training.learning_rate by `promptfed tune`, on {grid.share:g} of the training images held out ({tried})\n"
    )
    return head + yaml.safe_dump(raw, sort_keys=False, allow_unicode=True)
