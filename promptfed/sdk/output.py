"""How commands speak: tables and progress for people, one JSON value for programs, one line for errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.plain_text import plain

console = Console()
messages = Console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def table(title: str | None, columns: list[str], rows: list[list[str]]) -> Table:
    """A table of plain text: what clients named is never read as markup."""
    shown = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        shown.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(plain(cell, keep="\n")) for cell in row))
    return shown


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn a CommandError into one line on stderr and its exit code, and Ctrl-C into 130."""
    try:
        yield
    except CommandError as error:
        text = escape(plain(error, keep="\n"))
        messages.print(f"promptfed: {text}", soft_wrap=True, highlight=False)
        raise typer.Exit(error.exit) from None
    except KeyboardInterrupt:
        messages.print("promptfed: interrupted")
        raise typer.Exit(Exit.INTERRUPTED) from None
