"""`promptfed pull`: an export from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Key
from promptfed.sdk.output import say


@app.add(section="Use a result")
def pull(
    address: Annotated[str, typer.Argument(help="hf:owner/name")],
    out: Annotated[Path, typer.Option(help="a new folder")],
    revision: Annotated[str | None, typer.Option(help="a branch or commit there; default: the newest")] = None,
    key: Key = None,
) -> None:
    """Fetch an export from the Hugging Face hub; `promptfed predict` and `score` take the folder."""
    from promptfed.export.hub import pull as fetch

    fetch(address, out, revision, key)
    signed = f"signed by {key}" if key is not None else "its signature was not checked: no --key"
    say(f"Wrote {out} ({signed})")
