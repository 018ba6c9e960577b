"""A service as a process: its command line, where every setting is an option, and its log lines."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from types import TracebackType
from typing import Any, ClassVar

from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from promptfed.shared.plain_text import plain
from promptfed.shared.service.reasons import Exit

UVICORN = "0.54"
"""The series whose inner classes `http_connection` extends; requirements/services.txt has the same bounds."""
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class SettingsHelp(argparse.RawDescriptionHelpFormatter):
    """Leaves out pydantic's remark on a default if there is none, or if the description names it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        for remark in (" (default: null)", " (default: False)", " (default: [])"):
            text = text.removesuffix(remark)
        return text.removesuffix(" (required)") if "default:" in text else text


def given_settings(settings: type[BaseSettings], program: str, arguments: list[str] | None = None) -> dict[str, Any]:
    """The settings that ``arguments`` (default: the process's) give, by name; ``--help`` and errors end the process."""
    source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        settings, cli_prog_name=program, cli_implicit_flags=True, cli_kebab_case=True, formatter_class=SettingsHelp
    )
    source.env_ignore_empty = False  # An option without a value is given, unlike an empty variable.
    try:
        return source(args=True if arguments is None else arguments)()
    except SettingsError as error:  # of a list that does not end, for one
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(Exit.USAGE)


def unfit_server() -> str | None:
    """Why no server can be started with the uvicorn that is installed; None where one can."""
    major, minor, found = *UVICORN.split("."), version("uvicorn")
    if found.startswith(f"{UVICORN}."):
        return None
    bounds = f"uvicorn>={UVICORN},<{major}.{int(minor) + 1}"
    return f"uvicorn {found} is installed, whose inner classes are others: pip install '{bounds}'"


class JsonLines(logging.Formatter):
    """A record as one JSON object. ``fields``: attributes of records that are added where they are set."""

    fields: ClassVar[tuple[str, ...]] = ()
    time_field = "at"

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        entry: dict[str, object] = {
            self.time_field: datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in self.fields if getattr(record, name, None)}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """A record as one line: the time, the level of warnings and errors, and `words`. Tracebacks keep their lines."""

    def __init__(self, fmt: str = "%(asctime)s %(message)s"):
        super().__init__(fmt, "%H:%M:%S")

    def words(self, record: logging.LogRecord) -> str:
        """What the record says."""
        return record.getMessage()

    def format(self, record: logging.LogRecord) -> str:
        """The record as plain text."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        shown = {"msg": plain(level + self.words(record)), "args": None, "exc_text": None}
        return super().format(logging.makeLogRecord(record.__dict__ | shown))

    def formatException(self, ei: ExceptionInfo) -> str:
        """The traceback as plain text."""
        return plain(super().formatException(ei), keep="\n")


def log_to_stderr(formatter: logging.Formatter, level: str) -> None:
    """Send records of at least ``level`` to stderr, and nowhere else."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
