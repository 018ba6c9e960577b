"""Options that several commands of an operator's take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.sdk.client import DEFAULT_URL, TOKEN_VARIABLE, URL_VARIABLE

Url = Annotated[
    str | None, typer.Option("--coordinator", help=f"its URL; default: ${URL_VARIABLE}, else {DEFAULT_URL}")
]
TokenFile = Annotated[Path | None, typer.Option(help=f"file with the operator token; default: ${TOKEN_VARIABLE}")]
Federation = Annotated[str, typer.Argument(help="its name or id")]
Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]
