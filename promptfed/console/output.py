"""Output of commands: tables and lines for users, one JSON value for programs."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import traceback
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from promptfed.sdk.result import FederationResult
from promptfed.shared.api import report_schemas as shared
from promptfed.shared.errors import BadInput
from promptfed.shared.plain_text import listed, plain
from promptfed.shared.service.reasons import of_surroundings
from promptfed.shared.spec.spec import check_class_names

NUMBER = re.compile(r"([-+]?\d[\d.,]*( ?(%|[kMG]?B|s))?|-|)([ \n](\[.*\]|± [\d.]+))?")
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


@cache
def commit() -> str:
    """The commit that a release was built from (`make dist`), or that a checkout is at; empty if neither is known."""
    written = files("promptfed.shared").joinpath("commit.txt")
    if written.is_file():
        return written.read_text().strip()
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)  # noqa: S603 - git
            return done.stdout.strip()
    return ""


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


def points(zero_shot: float | None, value: float, margin: float | None = None) -> str:
    """What a mean gains on zero-shot, in points, and half of the gain's interval, as +12.3 ± 4.5."""
    if zero_shot is None:
        return "-"
    return f"{100 * (value - zero_shot):+.1f}" + ("" if margin is None else f" ± {100 * margin:.1f}")


def class_names(text: str) -> list[str]:
    """The class names in ``a, b, c``.

    Raises:
        PromptfedError: there is no name, or a name occurs twice.
    """
    try:
        return check_class_names(listed(text))
    except ValueError as error:
        raise BadInput(f"--classes {error}") from None


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Parse distinct whole numbers from 0, separated by commas.

    Raises:
        PromptfedError: the text of ``option`` has another form.
    """
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise BadInput(f"{option} {text!r}: write whole numbers separated by commas") from None
    if len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise BadInput(f"{option} {text!r}: the numbers must be different and not below 0")
    return numbers


def remarks(result: FederationResult) -> list[str]:
    """What looks wrong on the clients' own test images, and what to try: `promptfed.shared.api.report_schemas`."""
    from promptfed.shared.methods import has_rate

    spec = result.federation.spec
    return shared.remarks(spec, result.round_reports, _classes(result), has_rate(spec))


def _classes(result: FederationResult) -> list[int]:
    """How many classes each trainer chooses among."""
    spec = result.federation.spec
    if spec.class_names is not None and spec.method.get("label_space") != "client":
        return [len(spec.class_names)]
    return [client.num_classes for client in result.facts.participants if client.role == "trainer"]
