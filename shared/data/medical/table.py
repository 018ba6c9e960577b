"""The table of labels of medical files: which column finds a line's files, and the labels of each line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from promptfed.shared.data.label_table import (
    LabelColumns,
    check_column,
    label_columns,
    read_lines,
    subgroup_columns,
    subgroup_of,
)
from promptfed.shared.data.options import Options
from promptfed.shared.data.source import DataError

COLUMNS = {
    "SOPInstanceUID": "sop",
    "SeriesInstanceUID": "series",
    "StudyInstanceUID": "study",
    "AccessionNumber": "accession",
    "PatientID": "patient",
}
"""Columns by which a line finds its files, the finest first, and the facts that they are compared with."""
PATH = "path"
_KEYS = (*COLUMNS, PATH)
_SPLITS = ("train", "test")
_TABLE = "the table of labels"


@dataclass(frozen=True)
class Table:
    """Lines of a table: ``values`` of the column ``key``, ``labels`` (N,) or (N, C), and their splits and groups.

    ``subgroups``: the value of each line by column, as in `csv:`.
    """

    key: str
    values: tuple[str, ...]
    numbers: tuple[int, ...]
    names: tuple[str, ...]
    labels: torch.Tensor
    splits: tuple[str | None, ...]
    groups: tuple[str, ...] | None
    subgroups: Mapping[str, tuple[str, ...]]


def read_table(path: Path, options: Options) -> Table:
    """Read a table whose lines find their files by the first of `COLUMNS` and the path that it has.

    Raises:
        DataError: it cannot be read. The message names lines and columns; only ``problems`` quote cells.
    """
    if not path.is_file():
        raise DataError(f"{options.uri}: there is no table of labels; make one, and name it with labels=FILE.")
    name = f"{options.uri}: {_TABLE}"
    columns, rows = read_lines(path, name)
    key = next((name for name in _KEYS if name in columns), None)
    if key is None:
        raise DataError(
            f"{options.uri}: {_TABLE} has none of the columns {', '.join(_KEYS)}, by which a file is found."
        )
    own = options.text("group") or next((name for name in ("PatientID",) if name in columns and name != key), None)
    subgroups = subgroup_columns(options)
    used = {*COLUMNS, PATH, "split", own or key, *subgroups}
    several = label_columns(path, columns, used, _columns_only(options))
    labelled = ["label"] if several is None else []
    for needed in [own or key, *labelled, *subgroups]:
        check_column(needed, columns, name)
    if not rows:
        raise DataError(f"{options.uri}: {_TABLE} has no line.")
    problems = _problems(rows, key, [key, *labelled, *([own] if own else [])], several)
    if problems:
        refuse(options, problems)
    names, labels = _one_label(rows) if several is None else several.read(rows)
    splits = tuple(row.get("split") or None for _, row in rows)
    if None in splits and len(set(splits)) > 1:
        raise DataError(f"{options.uri}: {_TABLE} leaves some splits empty; give it for all lines or for none.")
    groups = tuple(str(row[own]) for _, row in rows) if own else None
    values = tuple(str(row[key]).strip() for _, row in rows)
    by_column = {column: tuple(subgroup_of(row, column) for _, row in rows) for column in subgroups}
    return Table(key, values, tuple(number for number, _ in rows), names, labels, splits, groups, by_column)


def _problems(
    rows: Sequence[tuple[int, Mapping[str, Any]]], key: str, needed: Sequence[str], several: LabelColumns | None
) -> list[tuple[str, str]]:
    """What is wrong with the lines: a text without values, and one for the owner's eyes."""
    problems: list[tuple[str, str]] = []
    seen: dict[str, int] = {}
    for number, row in rows:
        where = f"{_TABLE}, line {number}"
        told = list(several.problems(number, row)) if several is not None else []
        if told:
            problems.append((f"{where}: its labels are not as they should be.", told[0]))
        for column in needed:
            if not row.get(column):
                problems.append((f"{where}: {column} must not be empty.",) * 2)
        if (row.get("split") or None) not in (None, *_SPLITS):
            problems.append((f"{where}: the split is neither train nor test.",) * 2)
        first = seen.setdefault(row.get(key) or "", number)
        if first != number:
            problems.append((f"{where}: it has the same {key} as line {first}; keep one of them.",) * 2)
    return problems


def _columns_only(options: Options) -> Options:
    """The options without the table's name, since ``labels`` of ``csv:`` names a column."""
    return options.without(("labels",))


def _one_label(rows: Sequence[tuple[int, Mapping[str, str | None]]]) -> tuple[tuple[str, ...], torch.Tensor]:
    labels = [str(row["label"]) for _, row in rows]
    names = tuple(sorted(set(labels)))
    places = {name: place for place, name in enumerate(names)}
    return names, torch.tensor([places[label] for label in labels])


def refuse(options: Options, problems: Sequence[tuple[str, str]], advice: str = "") -> NoReturn:
    """Raise DataError with (text without values, text for the owner's eyes) of each problem."""
    shown = 3
    more = f" And {len(problems) - shown} more." if len(problems) > shown else ""
    text = " ".join(safe for safe, _ in problems[:shown])
    local = [whole for _, whole in problems]
    raise DataError(f"{options.uri}: {text}{more}{' ' + advice if advice else ''}", local)
