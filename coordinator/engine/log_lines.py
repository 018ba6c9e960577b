"""Log lines as JSON or text: with federation, round, phase and client where they are known.

Events of a federation have their kind as message and what else there is to say under ``data``.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from promptfed.shared.service import process

if TYPE_CHECKING:
    from promptfed.coordinator.domain.federation import Federation

PLURALS = {"task-settled": "tasks-settled"}
FIELDS = ("federation", "round", "phase", "client")
MOST_ITEMS = 20  # of a list: a line is for reading, the whole stands in the reports


def of_event(federation: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """A record's extra fields for an event of a federation."""
    place = {"federation": federation} | {name: data[name] for name in FIELDS if name in data}
    return place | {"data": {name: _short(value) for name, value in data.items() if name not in FIELDS}}


def together(events: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Events as lines: neighbours that tell the same of several clients are one, which names them all.

    Its kind is the plural, and ``clients`` is a text with commas between: a list would be cut.
    """
    for (kind, about), group in groupby(events, lambda event: (event[0], _without_client(event[1]))):
        some = list(group)
        if about is None or len(some) == 1 or kind not in PLURALS:
            yield from some
        else:
            yield PLURALS[kind], {**about, "clients": ", ".join(data["client"] for _, data in some)}


def _without_client(data: Mapping[str, Any]) -> dict[str, Any] | None:
    return {name: value for name, value in data.items() if name != "client"} if "client" in data else None


def where(federation: Federation) -> dict[str, Any]:
    """A record's extra fields for something that befell a federation as it stands."""
    return {"federation": federation.name, "round": federation.run.round} | (
        {"phase": federation.phase} if federation.phase else {}
    )


def _short(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) > MOST_ITEMS:
        return [*value[:MOST_ITEMS], f"... and {len(value) - MOST_ITEMS} more"]
    return value


class JsonFormatter(process.JsonLines):
    """A record as JSON; secrets never get here, because nothing logs headers or bodies."""

    fields = (*FIELDS, "data")


class TextFormatter(process.TextLines):
    """A record as a line for people: message, place, and ``KEY=VALUE`` for all else that an event tells."""

    def words(self, record: logging.LogRecord) -> str:
        """Message, place and facts."""
        where = [f"{name} {getattr(record, name)}" for name in FIELDS if getattr(record, name, None) is not None]
        facts = [f"{name}={_shown(value)}" for name, value in getattr(record, "data", {}).items() if value is not None]
        place = [f"({', '.join(where)})"] if where else []
        return " ".join([record.getMessage(), *place, *facts])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def configure(level: str, format: Literal["auto", "text", "json"] = "json") -> None:
    """Send everything to stderr: as JSON, as text, or ``auto``, as text where a terminal is watching."""
    as_text = format == "text" or (format == "auto" and sys.stderr.isatty())
    process.log_to_stderr(TextFormatter() if as_text else JsonFormatter(), level.upper())
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
