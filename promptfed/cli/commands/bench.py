"""`promptfed bench`: methods compared under a protocol."""

from __future__ import annotations

from typing import Annotated

import typer

from promptfed.cli.app import Made, app
from promptfed.cli.bench_options import BenchOptions
from promptfed.cli.common import AllowBackbone, Json, Written


@app.add(section="Try and simulate")
def bench(
    protocol: Annotated[
        str,
        typer.Argument(
            help="base-to-novel, leave-one-domain-out, personalisation, cross-dataset, few-shot:ONE_OF_THESE, "
            "multi-label, combined:base-to-novel, paper:TABLE, or embedded: what needs no download"
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
