"""``python -m client_service --coordinator URL --federation NAME ...``: one client process."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from pydantic import ValidationError

from client_service.exits import Exit
from client_service.settings import Settings, one_line
from shared.leaving import leave


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record with its event and facts, where it has them."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "message": record.getMessage()}
        for key in ("event", "facts"):
            if hasattr(record, key):
                line[key] = getattr(record, key)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(log_format: Literal["text", "json"]) -> None:
    """Log to stderr: our own events, and only warnings of libraries."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("promptfed").setLevel(logging.INFO)


def start(settings: Settings) -> int:
    """Run a client with logging set up; torch is imported here and not before. The exit code."""
    set_up_logging(settings.log_format)
    from client_service.worker import run

    return run(settings)


def main(arguments: list[str] | None = None) -> int:
    """The command line: every setting is an option."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        settings = Settings(_cli_parse_args=given, _cli_prog_name="client_service", _cli_implicit_flags=True)  # type: ignore[call-arg]
    except ValidationError as error:
        print(one_line(error), file=sys.stderr)
        return Exit.USAGE
    return start(settings)


if __name__ == "__main__":
    leave(main())
