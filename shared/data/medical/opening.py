"""Opens DICOM files as a source: the images of each line of a table of labels, with their patients as groups."""

from __future__ import annotations

import importlib.util
import threading
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from PIL import Image

from promptfed.shared.data.folder import SKIP, TEMPLATE, skips
from promptfed.shared.data.medical.index import (
    COLUMNS,
    PATH,
    Broken,
    Facts,
    Index,
    Item,
    Keys,
    Listed,
    Shown,
    Table,
    home,
    kept_in,
    read_table,
    refuse,
)
from promptfed.shared.data.options import Options, divided
from promptfed.shared.data.readers import Answer, readers
from promptfed.shared.data.source import DataError, Source, Split
from promptfed.shared.service.reasons import named, why

OPTIONS = ("labels", "columns", "group", "groups", "index", SKIP)
TABLE = "labels.csv"
DIGEST = 32  # bytes of an image's digest
AHEAD_BYTES = 64_000_000  # of decoded images that wait to be used

Found = Sequence[tuple[Listed, Facts]]


def open_files(body: str, options: Options, settings: Mapping[str, Any], level: str, pick: str) -> Source:
    """Open the files in the folder ``body``.

    Args:
        body, options: the folder and the options of the URI.
        settings: for the reader; all that the pixels depend on.
        level: what belongs together in the files of a line: ``image``, ``series`` or ``study``.
        pick: which images of what belongs together are used: ``middle``, ``all`` or a number.

    Raises:
        DataError: the table, files or options cannot be used. Only its ``problems`` name files.
    """
    root = _folder(body, options)
    table = read_table(root / (options.text("labels") or TABLE), options)
    if options.names_only:
        return divided(Split(table.labels, _unread), table.splits, table.names, None, TEMPLATE, options)
    with kept_in(folder := home(options.text("index")), options.uri):
        index = Index(root, folder, Keys(folder, options.uri), settings)
        found, broken = index.facts(_listed(index, options))
        items, lines, missing = _items(table, index, found, level, pick)
        del found  # of many files it takes much memory
        shown, undecoded = index.shown(items)
    told = tuple(local for _, local in _left_out(root, [*broken, *undecoded], missing, options))
    if not (kept := [row for row, size in enumerate(shown) if size is not None]):
        raise DataError(f"{options.uri}: no image can be read.", told)
    items = [items[row] for row in kept]
    images = _Images(index, items, [shown[row] for row in kept], options.uri)
    rows = [lines[row] for row in kept]
    splits = [table.splits[row] for row in rows]
    groups = _groups(table, index, items, rows)
    index.release()
    whole = Split(table.labels[rows], images.read, groups, digest=images.digest, ahead=images.ahead)
    whole.subgroups = {column: tuple(values[row] for row in rows) for column, values in table.subgroups.items()}
    return divided(whole, splits, table.names, None, TEMPLATE, options, told)


def _listed(index: Index, options: Options) -> list[Listed]:
    try:
        return index.listed()
    except OSError as error:
        refuse(options, [(f"a folder under it cannot be listed: {why(error)}.", f"{named(error)}.")])


def _left_out(root: Path, broken: Sequence[Broken], missing: Sequence[str], options: Options) -> list[tuple[str, str]]:
    """What cannot be read, without values and for the owner's eyes. Raises DataError unless that may be left out."""
    local = [f"{root / one.file.path}: {one.reason}." for one in broken]
    safe = [f"file {one.file.id}: {one.reason}." for one in broken]
    problems = [*zip(safe, local, strict=True), *((text, text) for text in missing)]
    if problems and not skips(options):
        refuse(options, problems, "`promptfed data show` names the files; on_unreadable=skip leaves them out.")
    return problems


def _folder(body: str, options: Options) -> Path:
    """The folder that the URI names. Raises DataError."""
    if not body:
        raise DataError(f"{options.uri}: names no folder; write the path of one after the colon.")
    root = Path(body).expanduser()
    if not root.is_dir():
        raise DataError(f"{options.uri}: there is no folder {root}; check the path.")
    return root


def _unread(row: int) -> Image.Image:
    raise DataError(f"image {row} is not read where only class names are asked for")


def _units(files: Found, level: str) -> list[list[Item]]:
    """What belongs together: each file, or the files of a series or of a study in order."""
    together: dict[str, list[tuple[Listed, Facts]]] = {}
    for file, facts in files:
        unit = {"image": file.id, "series": facts.series or file.id, "study": facts.study or file.id}[level]
        together.setdefault(unit, []).append((file, facts))
    return [_in_order(unit) for unit in together.values()]


def _in_order(files: Sequence[tuple[Listed, Facts]]) -> list[Item]:
    """The places of files: series by series in the order of their first paths, slices by their places."""
    first: dict[str, int] = {}
    for _, facts in files:
        first.setdefault(facts.series, len(first))
    ordered = sorted(files, key=lambda both: (first[both[1].series], both[1].order, both[0].path))
    return [Item(file, place) for file, facts in ordered for place in range(facts.frames)]


def picked(unit: Sequence[Item], pick: str) -> list[Item]:
    """The middle place of a unit, all of them, or a number of them that are evenly spread."""
    if pick == "all":
        return list(unit)
    count = min(1 if pick == "middle" else int(pick), len(unit))
    return [unit[(2 * number + 1) * len(unit) // (2 * count)] for number in range(count)]


def checked_frames(options: Options) -> str:
    """The option ``frames``: middle, all, or a number of at least 1. Raises DataError."""
    text = options.text("frames", "middle") or "middle"
    if text not in ("middle", "all") and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise DataError(f"{options.uri}: frames={text} is not middle, all or a number of at least 1.")
    return text


def _items(table: Table, index: Index, found: Found, level: str, pick: str) -> tuple[list[Item], list[int], list[str]]:
    """The images of the table's lines, the line of each, and a sentence for each line without a file."""
    by_value: dict[str, list[tuple[Listed, Facts]]] = {}
    for file, facts in found:
        name = file.id if table.key == PATH else getattr(facts, COLUMNS[table.key])
        if name:
            by_value.setdefault(name, []).append((file, facts))
    items, lines, missing = [], [], []
    for line, value in enumerate(table.values):
        kind = "file" if table.key == PATH else COLUMNS[table.key]
        files = by_value.get(index.value(kind, value), [])
        chosen = [item for unit in _units(files, level) for item in picked(unit, pick)]
        if not chosen:
            number = table.numbers[line]
            missing.append(f"the table of labels, line {number}: no file that can be read has its {table.key}.")
        items += chosen
        lines += [line] * len(chosen)
    return items, lines, missing


def _groups(table: Table, index: Index, items: Sequence[Item], lines: Sequence[int]) -> list[str]:
    """The patient of each image, a keyed id; the study or the file where none is known."""
    given = [index.value("patient", name) for name in table.groups or [""] * len(table.values)]
    facts = [index.facts_of(item.file) for item in items]
    return [
        given[line] or own.patient or own.study or item.file.id
        for item, line, own in zip(items, lines, facts, strict=True)
    ]


class _Images:
    """The images of a source. Those that are soon asked for are decoded ahead, up to `AHEAD_BYTES`.

    Threads that preprocess images read at the same time. Of each image little is kept, since there may be very many.
    """

    def __init__(self, index: Index, items: Sequence[Item], shown: Sequence[Shown | None], uri: str) -> None:
        self.paths = [item.file.path for item in items]
        self._places = [item.place for item in items]
        self._index, self._uri = index, uri
        known = [size for size in shown if size is not None]
        self._digests = b"".join(size.digest for size in known)
        self._sizes = array("q", (3 * size.width * size.height for size in known))
        self._ahead: dict[int, Future[Answer]] = {}
        self._wanted: deque[int] = deque()
        self._turn = threading.Lock()

    def digest(self, row: int) -> str:
        return self._digests[DIGEST * row : DIGEST * (row + 1)].hex()

    def ahead(self, rows: Sequence[int]) -> None:
        """Have the images at ``rows`` decoded before they are read; those of earlier calls are forgotten."""
        known = set(rows)
        with self._turn:
            self._ahead = {row: waiting for row, waiting in self._ahead.items() if row in known}
            self._wanted = deque(row for row in rows if row not in self._ahead)
            self._fill()

    def _fill(self) -> None:
        room = AHEAD_BYTES - sum(self._sizes[row] for row in self._ahead)
        while self._wanted and (room >= self._sizes[self._wanted[0]] or not self._ahead):
            row = self._wanted.popleft()
            self._ahead[row] = self._submitted(row)
            room -= self._sizes[row]

    def read(self, row: int) -> Image.Image:
        with self._turn:
            if row in self._wanted:
                self._wanted.remove(row)
            waiting = self._ahead.pop(row, None) or self._submitted(row)
            self._fill()
        answer = waiting.result()
        if answer.image is None or answer.digest != self.digest(row):
            why = answer.error or "it is not what it was when the data were opened; start again"
            raise DataError(f"{self._uri}: file {self._index.keys.id('file', self.paths[row])}: {why}.")
        return answer.image

    def _submitted(self, row: int) -> Future[Answer]:
        return readers().submit(self._index.request("pixels", self.paths[row], self._places[row]))


def open_dicom(body: str, options: Options) -> Source:
    """``dicom:FOLDER``: images, series or studies that ``labels=`` (labels.csv) names."""
    _need("pydicom", options)

    options.check_names((*OPTIONS, "level", "frames", "window"))
    level = options.choice("level", ("image", "series", "study"), "image") or "image"
    return open_files(body, options, _with_window(options), level, checked_frames(options))


def _need(module: str, options: Options) -> None:
    if importlib.util.find_spec(module) is None:
        raise DataError(f"{options.uri}: needs {module}: install promptfed[medical].")


def _with_window(options: Options) -> dict[str, Any]:
    """``window=center,width`` as two numbers."""
    text = options.text("window")
    if text is None:
        return {}
    try:
        center, width = map(float, text.split(","))
    except ValueError:
        center = width = float("nan")
    if not (abs(center) < float("inf") and 1 <= width < float("inf")):
        raise DataError(f"{options.uri}: window={text} is not a center and a width of at least 1, as in window=40,400.")
    return {"window": [center, width]}
