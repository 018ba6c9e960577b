"""`promptfed validate`: sites test one export, and nobody trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Api, Json, Key


@app.add(section="Use a result")
def validate(
    api: Api,
    export: Annotated[
        Path | None, typer.Argument(help="folder that `promptfed export` has written; none: with --federation")
    ] = None,
    spec: Annotated[Path | None, typer.Argument(help="YAML with further fields of the federation")] = None,
    sites: Annotated[int, typer.Option(min=1, help="how many sites: it starts once so many have enrolled")] = 2,
    name: Annotated[
        str | None, typer.Option(help="the federation's name; default: the export's, and -validation")
    ] = None,
    federation: Annotated[
        str | None, typer.Option(help="create none: wait for this one, by name or id, and write its report")
    ] = None,
    token_out: Annotated[
        Path | None, typer.Option(help="write the enrolment token here, readable by you alone; default: print it")
    ] = None,
    out: Annotated[Path, typer.Option(help="a new folder for the report, CSV and forest plot")] = Path("validation"),
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Let sites test an export on their data; wait, and write the signed report with pooled figures.

    Each site starts its client with --role evaluator and the token.
    """
    from promptfed.cli.validating import run_validate

    run_validate(api, export, spec, federation, name, sites, token_out, out, key, as_json)
