"""Log lines of a service: one JSON object per record for programs, one line of plain text for people."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from types import TracebackType
from typing import ClassVar

from promptfed.shared.plain_text import plain

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


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
