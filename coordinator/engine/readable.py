"""Rows as reports read them: one that cannot be read is named, and keeps nothing else from being told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import JSON, Select, select, type_coerce

from promptfed.coordinator.engine.recovery import DAMAGE
from promptfed.coordinator.problems import first_error
from promptfed.coordinator.store.backend import one_line
from promptfed.coordinator.store.tables import Base, Lenient

T = TypeVar("T")


def leniently(column: Any) -> Any:
    """A column, whose JSON may be damaged."""
    return type_coerce(column, Lenient()).label(column.key) if isinstance(column.type, JSON) else column


def rows_of(table: type[Base]) -> Select[Any]:
    """A query of all columns of the rows, whose JSON may be damaged."""
    return select(*map(leniently, table.__table__.c))


class Reading:
    """Reads rows one by one. ``unreadable``: what could not be read, and why."""

    def __init__(self) -> None:
        self.unreadable: list[str] = []

    def row(self, what: str, read: Callable[[], T]) -> T | None:
        """What ``read`` makes of a row; None where that fails."""
        try:
            return read()
        except ValidationError as error:
            why = first_error(error, "all of it")
        except (*DAMAGE, ArithmeticError) as error:
            why = f"{type(error).__name__}: {one_line(error)}"
        self.unreadable.append(f"{what}: {why[:300]}")
        return None
