"""Output of commands: tables and lines for users, one JSON value for programs."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from textwrap import fill
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from promptfed.shared.plain_text import plain
from promptfed.shared.service.reasons import of_surroundings

NUMBER = re.compile(r"([-+]?\d[\d.,]*( ?(%|[kMG]?B|s))?|-|)( \[.*\])?")
console = Console(emoji=False)  # or `:x:` in a name is drawn as a picture
messages = Console(stderr=True, emoji=False)


class MessageLines(logging.Handler):
    """Warnings of this process as lines on stderr, above a bar of progress.

    Errors of the surroundings have no traceback, and are left out where somebody has ``heard`` them already.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        if getattr(record, "heard", False):
            return
        error = record.exc_info[1] if record.exc_info else None
        reason = of_surroundings(error) if error is not None else None
        shown = f": {reason}" if reason else f"\n{''.join(traceback.format_exception(error))}" if error else ""
        text = plain(record.getMessage() + shown, keep="\n")
        messages.print(text, highlight=False, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON value on stdout; where its encoding does not have all letters, in ASCII."""
    everything = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    sys.stdout.write(json.dumps(value, ensure_ascii=not everything) + "\n")
    sys.stdout.flush()


def table(title: str | None, columns: list[str], rows: list[list[str]]) -> Table:
    """A table of plain text; names given by clients are never interpreted as markup. Numbers are aligned right."""
    shown = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        numbers = index > 0 and all(NUMBER.fullmatch(row[index]) for row in rows)
        shown.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(plain(cell, keep="\n")) for cell in row))
    return shown


def listing(entries: list[tuple[str, str]]) -> None:
    """Print names, each above an indented text, which wraps at the terminal's width; names stay whole, to be copied."""
    for name, text in entries:
        say(plain(name))
        say(fill(plain(text), max(30, console.width), initial_indent="    ", subsequent_indent="    "))


def say(text: object) -> None:
    """Print one line for users on stdout, unchanged: neither wrapped nor interpreted as markup."""
    console.print(str(text), highlight=False, markup=False, soft_wrap=True)


def note(text: object) -> None:
    """Print one line for users on stderr."""
    messages.print(str(text), highlight=False, markup=False, soft_wrap=True)


def tell(as_json: bool, value: Any, text: object) -> None:
    """Print ``value`` as JSON for programs, or ``text`` for users."""
    print_json(value) if as_json else say(text)
