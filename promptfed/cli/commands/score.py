"""`promptfed score`: an export's figures on labelled images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import AllowBackbone, Json, Key


@app.add(section="Use a result")
def score(
    export: Annotated[Path, typer.Argument(help="folder that `promptfed export` has written, or the page's .zip")],
    data: Annotated[str, typer.Argument(help="data URI of labelled images, as in folder:/data/pets")],
    allow_backbone: AllowBackbone,
    out: Annotated[Path, typer.Option(help="a new folder for figures and the confusion matrix")] = Path("score"),
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Test an export on labelled images: accuracy, calibration error, and which class is taken for which."""
    from promptfed.cli.scoring import run_score

    run_score(export, data, out, allow_backbone, as_json, key)
