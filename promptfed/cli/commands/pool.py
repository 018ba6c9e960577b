"""`promptfed pool`: several sites' scores of one export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Json


@app.add(section="Use a result")
def pool(
    scores: Annotated[list[str], typer.Argument(help="each site's score.json or its folder, or NAME=FILE")],
    only: Annotated[str | None, typer.Option("--class", help="only this class")] = None,
    out: Annotated[Path, typer.Option(help="a new folder for the figures and the forest plot")] = Path("pooled"),
    as_json: Json = False,
) -> None:
    """Pool what several sites have measured with `promptfed score`: random-effects means and a forest plot."""
    from promptfed.cli.pooling import run_pool

    run_pool(scores, only, out, as_json)
