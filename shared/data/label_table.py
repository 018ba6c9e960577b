"""Several labels per image in a table: one column for each class, or one column of names separated by ``|``."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from promptfed.shared.data.options import UNKNOWN, Options
from promptfed.shared.data.source import DataError
from promptfed.shared.service.reasons import why

NAMES_COLUMN = "labels"
SEPARATOR = "|"
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # other than commas, that tables come with
_CELLS = {"": UNKNOWN, "0": 0, "1": 1, "0.0": 0, "1.0": 1}  # what a cell of a class's column may hold

Rows = Sequence[tuple[int, Mapping[str, str | None]]]  # the lines of a table with their numbers


def read_lines(path: Path, name: str) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The columns of a table that is called ``name``, and its rows with the numbers of their last lines.

    Raises:
        DataError: it is no CSV file in UTF-8, separates by other than commas, or has two columns of one name.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or [])
            rows = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error):
        raise DataError(f"{name} is not a CSV file in UTF-8; save it as one.") from None
    except OSError as error:
        raise DataError(f"{name} cannot be read: {why(error)}.") from None
    found = [words for mark, words in _SEPARATORS.items() if len(columns) == 1 and mark in columns[0]]
    if found:
        raise DataError(f"{name} separates its columns by {found[0]}; separate them by commas.")
    twice = [column for column, count in Counter(columns).items() if count > 1 and column]
    if twice:
        raise DataError(f"{name} has the column {twice[0]} twice; rename or remove one of them.")
    return columns, rows


def check_column(needed: str, columns: Sequence[str], name: str) -> None:
    """Raise DataError if a table that is called ``name`` lacks a column; one that is written otherwise is told."""
    if needed in columns:
        return
    near = [column for column in columns if column.strip().casefold() == needed.casefold()]
    if near:
        raise DataError(f"{name} calls its column {near[0]!r}; call it {needed}.")
    raise DataError(f"{name} has no column {needed}; its first line names the columns, as in path,label.")


@dataclass(frozen=True)
class LabelColumns:
    """Where ``table`` has the labels: a column for each class, or with ``names`` one column that lists the classes."""

    table: Path
    columns: tuple[str, ...]
    names: bool

    def problems(self, number: int, row: Mapping[str, str | None]) -> Iterator[str]:
        """One sentence for each cell of a line that cannot be read."""
        for column in self.columns:
            where, cell = f"{self.table}, line {number}", row.get(column)
            if cell is None:
                yield f"{where}: {column} is missing: give every line {len(row)} cells."
            elif self.names and cell.strip() and not all(map(str.strip, cell.split(SEPARATOR))):
                yield f"{where}: {column} is {cell}, with an empty name; write names separated by one {SEPARATOR}."
            elif not self.names and cell.strip() not in _CELLS:
                advice = "correct it, give columns=NAME,NAME of the classes, or call a column of names label or labels"
                yield f"{where}: {column} is {cell}, not 1 (present), 0 (absent) or empty (unknown); {advice}."

    def read(self, rows: Rows) -> tuple[tuple[str, ...], torch.Tensor]:
        """The class names, and labels ``(N, C)`` int8 of lines without `problems`. Raises DataError without a class."""
        if not self.names:
            cells = [[_CELLS[(row[column] or "").strip()] for column in self.columns] for _, row in rows]
            return tuple(" ".join(column.replace("_", " ").split()) for column in self.columns), _labels(cells)
        listed = [_listed(row[self.columns[0]] or "") for _, row in rows]
        names = tuple(sorted(set().union(*listed)))
        if not names:
            raise DataError(f"{self.table}: the column {self.columns[0]} names no class; write some, as in cat|dog.")
        return names, _labels([[int(name in own) for name in names] for own in listed])


def label_columns(
    table: Path, columns: Sequence[str], others: Collection[str], options: Options
) -> LabelColumns | None:
    """Where ``table`` has several labels per image; None if it has one, in the column ``label``.

    ``labels=COLUMN`` names the column of names (default: labels), ``columns=NAME,NAME`` the columns of classes; without
    either of them these are all columns but ``others``.

    Raises:
        DataError: a named column is missing, or both options are given.
    """
    given, chosen = options.text("labels"), options.text("columns")
    if given is not None and chosen is not None:
        raise DataError(f"{options.uri}: give labels= or columns=, not both.")
    wanted = [given] if given is not None else [] if chosen is None else [name.strip() for name in chosen.split(",")]
    for name in wanted:
        if name not in columns:
            raise DataError(f"{table} has no column {name}; choose one of {', '.join(columns)}.")
    if wanted:
        return LabelColumns(table, tuple(wanted), given is not None)
    if "label" in columns:
        return None
    if NAMES_COLUMN in columns:
        return LabelColumns(table, (NAMES_COLUMN,), True)
    classes = tuple(column for column in columns if column not in others)
    if "" in classes or any(name.strip().casefold() in ("label", NAMES_COLUMN) for name in classes):
        wrong = next(name for name in classes if not name or name.strip().casefold() in ("label", NAMES_COLUMN))
        change = (
            f"calls a column {wrong!r}; call it {wrong.strip().casefold()}" if wrong else "has a column without a name"
        )
        raise DataError(f"{table} {change}, or give columns=NAME,NAME of the classes.")
    return LabelColumns(table, classes, False) if classes else None


def subgroup_columns(options: Options) -> list[str]:
    """The columns of subgroups, as ``groups=sex,scanner`` lists them."""
    return [name.strip() for name in (options.text("groups") or "").split(",") if name.strip()]


def subgroup_of(row: Mapping[str, str | None], column: str) -> str:
    """The value of a line in a column of subgroups."""
    return row.get(column) or "unknown"


def _listed(cell: str) -> set[str]:
    return {name.strip() for name in cell.split(SEPARATOR) if name.strip()}


def _labels(cells: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(cells, dtype=torch.int8)
