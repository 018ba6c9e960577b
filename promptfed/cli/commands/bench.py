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
            "multi-label, combined:base-to-novel, ceilings:leave-one-domain-out, ceilings:personalisation, "
            "paper:TABLE; embedded, the whole benchmark on what needs no download; or compare, verify"
        ),
    ],
    options: Annotated[BenchOptions, Made(BenchOptions)],
    allow_backbone: AllowBackbone,
    written: Written,
    results: Annotated[
        list[str] | None, typer.Argument(help="compare: two of FOLDER[#ROW]; verify: one FOLDER", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare methods under a protocol, in simulation: JSON with provenance and a Markdown table with zero-shot.

    `bench compare A B` tests two rows of finished benches against each other, picture by picture; `bench verify A`
    computes a run again and says whether the result is the stored one.
    """
    from promptfed.cli.bench import run_bench
    from promptfed.cli.bench_results import compare_results, verify_result

    if protocol == "compare":
        compare_results(results or [], written, as_json)
    elif protocol == "verify":
        verify_result(results or [], options, allow_backbone, written, as_json)
    else:
        run_bench(protocol, results or [], options, allow_backbone, written, as_json)
