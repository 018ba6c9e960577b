"""Options that several commands of an operator's take."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from promptfed.sdk.client import DEFAULT_URL, TOKEN_VARIABLE, URL_VARIABLE
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import messages
from promptfed.shared.plain_text import plain

Url = Annotated[
    str | None, typer.Option("--coordinator", help=f"its URL; default: ${URL_VARIABLE}, else {DEFAULT_URL}")
]
TokenFile = Annotated[Path | None, typer.Option(help=f"file with the operator token; default: ${TOKEN_VARIABLE}")]


def _remember_backbone(path: Path | None) -> Path | None:
    """What the command starts finds the file in the environment: its clients, and whatever loads a backbone."""
    if path is not None:
        for variable in ("PROMPTFED_BACKBONE_FILE", "PROMPTFED_CLIENT_BACKBONE_FILE"):
            os.environ[variable] = str(path.expanduser().absolute())
    return path


BackboneFile = Annotated[
    Path | None,
    typer.Option(
        callback=_remember_backbone,
        help="file of the backbone's weights, or a folder with one, that is read in the place of a download",
    ),
]
AllowBackbone = Annotated[bool, typer.Option(help="permit a backbone outside open_clip's registry")]
Federation = Annotated[str, typer.Argument(help="its name or id")]
Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]
Client = Annotated[str, typer.Argument(help="its name or id")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask whether it is meant")]


def at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def confirm(what: str, yes: bool) -> None:
    """Ask at the terminal whether ``what``, which cannot be undone, is meant; ``yes`` answers beforehand.

    Raises:
        CommandError: nobody is there to be asked.
        typer.Exit: the answer is no, with exit code 13.
    """
    if yes:
        return
    if not at_terminal():
        raise CommandError(f"{what} Nobody is at a terminal to be asked: give --yes if it is meant", Exit.BAD_INPUT)
    messages.print(f"{escape(plain(what))} Go on? [y/N] ", end="", highlight=False, soft_wrap=True, markup=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        messages.print("Nothing was done.", highlight=False)
        raise typer.Exit(Exit.DECLINED)
