"""Opens DICOM files as a source: the images of each line of a table of labels, with their patients as groups.

What is known of the files of a folder is stored as an index, so that a later start takes one listing. It has keyed ids
in place of values. A line of it is ``["f", file, size, times, facts]`` or ``["p", pixels, digest]``.
Failures are not stored: a package installed meanwhile, or more memory, may mend them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from PIL import Image
from tqdm import tqdm

from promptfed.shared import get_extra
from promptfed.shared.data.cutting import divided
from promptfed.shared.data.errors import DataError
from promptfed.shared.data.folder import (
    LabelColumns,
    Rows,
    check_column,
    label_columns,
    misread,
    read_lines,
    subgroup_of,
)
from promptfed.shared.data.options import DicomOptions
from promptfed.shared.data.readers import Request, readers
from promptfed.shared.data.source import Source, Split
from promptfed.shared.files import write_whole
from promptfed.shared.machine import expect_own, make_folder, user_cache
from promptfed.shared.service.reasons import named, why
from promptfed.shared.spec.spec import TEMPLATE

KEY_FILE = "key"
_KEY_BYTES = 32

IDS = ("patient", "study", "series", "sop", "accession")
_STALE = 2  # times as many lines as count, at which the index is written anew

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
DIGEST = 32  # bytes of an image's digest


def home(given: str | None) -> Path:
    """The folder of indexes: ``given`` by ``index=``, or one in the user's cache."""
    if given is not None:
        return Path(given).expanduser()
    return user_cache("medical")


@contextmanager
def kept_in(folder: Path, uri: str) -> Iterator[None]:
    """Raise DataError where the index cannot be read or written."""
    try:
        yield
    except OSError as error:
        text = f"{uri}: the index cannot be kept in {folder}: {why(error)}; name a folder with index=FOLDER."
        raise DataError(text) from None


class Keys:
    """Ids under the secret in ``folder``, which is made where there is none."""

    def __init__(self, folder: Path, uri: str) -> None:
        with kept_in(folder, uri):
            make_folder(folder)
            self._key = _key(folder / KEY_FILE)

    def id(self, *text: object) -> str:
        """An id of 16 hexadecimal digits; the first of ``text`` says of what kind of thing."""
        whole = "\0".join(map(str, text)).encode(errors="surrogateescape")
        return hashlib.blake2b(whole, key=self._key, digest_size=8).hexdigest()


def _key(path: Path) -> bytes:
    with suppress(FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    expect_own(path)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError("its file key is damaged: remove the folder")
    return key


class Facts(NamedTuple):
    """A file's keyed identifiers ("" where it has none), its frames, and its place in its series."""

    patient: str
    study: str
    series: str
    sop: str
    accession: str
    frames: int
    order: float


class Listed(NamedTuple):
    """A file of a folder. ``times``: of its change and of its status, and its number on the disk.

    Moved folders, and archives, give other files of equal size the time of change of those that they replace.
    """

    path: str  # within the folder
    id: str
    size: int
    times: str


class Item(NamedTuple):
    """One image: a place in a file."""

    file: Listed
    place: int


@dataclass(frozen=True)
class Broken:
    """A file that cannot be read: its id, its path for the owner's eyes, and the reason."""

    file: Listed
    reason: str


class Index:
    """The index of the files under ``root``, kept in ``folder``."""

    def __init__(self, root: Path, folder: Path, keys: Keys, settings: Mapping[str, Any]) -> None:
        self.root, self.keys, self.settings = root, keys, dict(settings)
        self._file = folder / f"{keys.id('root', root.resolve())}.jsonl"
        self._settings = json.dumps(self.settings)
        self._facts: dict[str, tuple[int, str, Facts | None]] = {}
        self._digests: dict[str, bytes] = {}
        self._load()

    def listed(self) -> list[Listed]:
        """The ordinary files under the root, by their paths; hidden ones are left out."""
        found = []
        for path, entry in _entries(self.root, ""):
            about, name = entry.stat(), self.keys.id("file", path)
            size, times = about.st_size, f"{about.st_mtime_ns} {about.st_ctime_ns} {about.st_ino}"
            known = self._facts.get(name)
            if known is not None and known[:2] == (size, times):
                size, times = known[:2]  # the same values in memory once
            found.append(Listed(path, name, size, times))
        return sorted(found)

    def facts(self, files: Sequence[Listed]) -> tuple[list[tuple[Listed, Facts]], list[Broken]]:
        """The images among ``files`` with their facts, and the files whose headers cannot be read."""
        new = [file for file in files if self._facts.get(file.id, ())[:2] != (file.size, file.times)]
        broken = []
        requests = (Request("facts", str(self.root / file.path)) for file in new)
        with self._file.open("a") as lines:
            answers = zip(new, readers().each(requests), strict=True)
            for file, answer in tqdm(answers, "headers", len(new), leave=False, disable=_quiet(new)):
                if answer.error is not None:
                    broken.append(Broken(file, answer.error))
                    continue
                facts = None if answer.facts is None else self._keyed(answer.facts)
                self._facts[file.id] = file.size, file.times, facts
                lines.write(self._line(file.id))
        bad = {one.file.id for one in broken}
        read = ((file, self._facts[file.id][2]) for file in files if file.id not in bad)
        return [(file, facts) for file, facts in read if facts is not None], broken

    def facts_of(self, file: Listed) -> Facts:
        """The facts of a file that `facts` gave."""
        facts = self._facts[file.id][2]
        assert facts is not None
        return facts

    def _keyed(self, facts: Mapping[str, Any]) -> Facts:
        ids = {name: sys.intern(self.value(name, facts.get(name, ""))) for name in IDS}
        return Facts(**ids, frames=facts["frames"], order=facts["order"])

    def value(self, name: str, text: str) -> str:
        """The keyed id of a header's value."""
        return self.keys.id(name, text) if text else ""

    def digests(self, items: Sequence[Item]) -> tuple[list[bytes | None], list[Broken]]:
        """The `image_digest` of each image, each decoded once; None for images that cannot be decoded."""
        names = ((self._name(item), item) for item in items)  # computed twice, since all of them take memory
        new = list({name: item for name, item in names if name not in self._digests}.items())
        requests = (self.request("check", item.file.path, item.place) for _, item in new)
        broken = []
        with self._file.open("a") as lines:
            answers = zip(new, readers().each(requests), strict=True)
            for (name, item), answer in tqdm(answers, "images", len(new), leave=False, disable=_quiet(new)):
                if answer.error is not None:
                    broken.append(Broken(item.file, answer.error))
                    continue
                self._digests[name] = bytes.fromhex(answer.digest)
                lines.write(json.dumps(["p", name, answer.digest]) + "\n")
        return [self._digests.get(self._name(item)) for item in items], broken

    def release(self) -> None:
        """Forget what is not needed once the images are known: of many files it takes much memory."""
        self._facts.clear()
        self._digests.clear()

    def request(self, do: str, path: str, place: int) -> Request:
        """Have the pixels of an image read."""
        return Request(do, str(self.root / path), place, self.settings)

    def _name(self, item: Item) -> str:
        return self.keys.id("pixels", *item.file[1:], f"[{json.dumps(item.place)}, {self._settings}]")

    def _load(self) -> None:
        count = 0
        if not self._file.exists():
            self._file.touch(mode=0o600)
        expect_own(self._file)
        with self._file.open() as lines:
            for line in lines:
                count += 1
                self._take(line)
        live = len(self._facts) + len(self._digests)
        if count > _STALE * live + 100:
            write_whole(self._file, "".join(self._stored()).encode(), mode=0o600)
        elif count:
            with self._file.open("a") as again:
                again.write("\n")  # the end of a line that a crash cut off

    def _take(self, line: str) -> None:
        try:
            kind, name, *values = json.loads(line)
            if kind == "p":
                self._digests[name] = bytes.fromhex(values[-1])  # behind the sizes that earlier versions wrote
            else:
                size, times, facts = values
                self._facts[name] = size, times, None if facts is None else self._read(name, size, times, facts)
        except (ValueError, TypeError, struct.error):  # an empty line, or one that a crash cut off
            return

    def _line(self, name: str) -> str:
        """The stored line of a file."""
        size, times, facts = self._facts[name]
        own = None
        if facts is not None:
            (bits,) = struct.unpack("<Q", struct.pack("<d", facts.order))
            own = [*facts[:-1], bits ^ self._mask(name, size, times)]
        return json.dumps(["f", name, size, times, own]) + "\n"

    def _read(self, name: str, size: int, times: str, stored: Sequence[Any]) -> Facts:
        *values, masked = stored
        (order,) = struct.unpack("<d", struct.pack("<Q", masked ^ self._mask(name, size, times)))
        return Facts._make([*(sys.intern(value) if type(value) is str else value for value in values), order])

    def _mask(self, name: str, size: int, times: str) -> int:
        """What hides a file's place in its series, which is a number of its header."""
        return int(self.keys.id("order", name, size, times), 16)

    def _stored(self) -> Iterator[str]:
        for name in self._facts:
            yield self._line(name)
        for name, digest in self._digests.items():
            yield json.dumps(["p", name, digest.hex()]) + "\n"


def _entries(root: Path, under: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(root / under) as entries:
        for entry in entries:
            path = f"{under}/{entry.name}" if under else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(root, path)
            elif entry.is_file():
                yield path, entry


def _quiet(new: Iterable[object]) -> bool | None:
    """No bar where nothing is new; else tqdm shows one on a terminal."""
    return None if new else True


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


def read_table(path: Path, options: DicomOptions) -> Table:
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
    own = options.group or next((name for name in ("PatientID",) if name in columns and name != key), None)
    used = {*COLUMNS, PATH, "split", own or key, *options.groups}
    several = label_columns(path, columns, used, options)
    labelled = ["label"] if several is None else []
    for needed in [own or key, *labelled, *options.groups]:
        check_column(needed, columns, name)
    if not rows:
        raise DataError(f"{options.uri}: {_TABLE} has no line.")
    keys = [key, "split", *([own] if own else []), *options.groups]
    problems = [
        (f"{_TABLE}, line {number}: {text}",) * 2
        for number, text in misread(rows, keys, labelled if several is None else several.columns)
    ]
    problems += _problems(rows, key, [key, *labelled, *([own] if own else [])], several)
    if problems:
        refuse(options, problems)
    names, labels = _one_label(rows) if several is None else several.read(rows)
    splits = tuple(row.get("split") or None for _, row in rows)
    if None in splits and len(set(splits)) > 1:
        raise DataError(f"{options.uri}: {_TABLE} leaves some splits empty; give it for all lines or for none.")
    groups = tuple(row[own] for _, row in rows) if own else None
    values = tuple(row[key] for _, row in rows)
    by_column = {column: tuple(subgroup_of(row, column) for _, row in rows) for column in options.groups}
    return Table(key, values, tuple(number for number, _ in rows), names, labels, splits, groups, by_column)


def _problems(rows: Rows, key: str, needed: Sequence[str], several: LabelColumns | None) -> list[tuple[str, str]]:
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


def _one_label(rows: Rows) -> tuple[tuple[str, ...], torch.Tensor]:
    labels = [row["label"] for _, row in rows]
    names = tuple(sorted(set(labels)))
    places = {name: place for place, name in enumerate(names)}
    return names, torch.tensor([places[label] for label in labels])


def refuse(options: DicomOptions, problems: Sequence[tuple[str, str]], advice: str = "") -> NoReturn:
    """Raise DataError with (text without values, text for the owner's eyes) of each problem."""
    shown = 3
    more = f" And {len(problems) - shown} more." if len(problems) > shown else ""
    text = " ".join(safe for safe, _ in problems[:shown])
    local = [whole for _, whole in problems]
    raise DataError(f"{options.uri}: {text}{more}{' ' + advice if advice else ''}", local)


Found = Sequence[tuple[Listed, Facts]]


def open_dicom(body: str, options: DicomOptions) -> Source:
    """``dicom:FOLDER``: images, series or studies that ``labels=`` names.

    Raises:
        DataError: the table, files or options cannot be used. Only its ``problems`` name files.
    """
    if importlib.util.find_spec("pydicom") is None:
        raise DataError(f"{options.uri}: needs pydicom: {get_extra('medical')}.")
    root = _folder(body, options)
    table = read_table(root / options.labels, options)
    if options.names_only:
        return divided(Split(table.labels, _unread), table.splits, table.names, None, TEMPLATE, options)
    with kept_in(folder := home(options.index), options.uri):
        settings = {} if options.window is None else {"window": list(options.window)}  # all that pixels depend on
        index = Index(root, folder, Keys(folder, options.uri), settings)
        found, broken = index.facts(_listed(index, options))
        items, lines, missing = _items(table, index, found, options)
        del found  # of many files it takes much memory
        digests, undecoded = index.digests(items)
    told = tuple(local for _, local in _left_out(root, [*broken, *undecoded], missing, options))
    kept = [(row, digest) for row, digest in enumerate(digests) if digest is not None]
    if not kept:
        raise DataError(f"{options.uri}: no image can be read.", told)
    items = [items[row] for row, _ in kept]
    images = _Images(index, items, [digest for _, digest in kept], options.uri)
    rows = [lines[row] for row, _ in kept]
    splits = [table.splits[row] for row in rows]
    groups = _groups(table, index, items, rows)
    index.release()
    whole = Split(table.labels[rows], images.read, groups, digest=images.digest, name=images.name)
    whole.subgroups = {column: tuple(values[row] for row in rows) for column, values in table.subgroups.items()}
    return divided(whole, splits, table.names, None, TEMPLATE, options, told)


def _listed(index: Index, options: DicomOptions) -> list[Listed]:
    try:
        return index.listed()
    except OSError as error:
        refuse(options, [(f"a folder under it cannot be listed: {why(error)}.", f"{named(error)}.")])


def _left_out(
    root: Path, broken: Sequence[Broken], missing: Sequence[str], options: DicomOptions
) -> list[tuple[str, str]]:
    """What cannot be read, without values and for the owner's eyes. Raises DataError unless that may be left out."""
    local = [f"{root / one.file.path}: {one.reason}." for one in broken]
    safe = [f"file {one.file.id}: {one.reason}." for one in broken]
    problems = [*zip(safe, local, strict=True), *((text, text) for text in missing)]
    if problems and options.on_unreadable == "refuse":
        refuse(options, problems, "`promptfed data show` names the files; on_unreadable=skip leaves them out.")
    return problems


def _folder(body: str, options: DicomOptions) -> Path:
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


def picked(unit: Sequence[Item], pick: str | int) -> list[Item]:
    """The middle place of a unit, all of them, or a number of them that are evenly spread."""
    if pick == "all":
        return list(unit)
    count = min(1 if pick == "middle" else int(pick), len(unit))
    return [unit[(2 * number + 1) * len(unit) // (2 * count)] for number in range(count)]


def _items(table: Table, index: Index, found: Found, options: DicomOptions) -> tuple[list[Item], list[int], list[str]]:
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
        chosen = [item for unit in _units(files, options.level) for item in picked(unit, options.frames)]
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
    """The images of a source, which threads read at the same time. Of each little is kept: there may be very many."""

    def __init__(self, index: Index, items: Sequence[Item], digests: Sequence[bytes], uri: str) -> None:
        self._paths = [item.file.path for item in items]
        self._places = [item.place for item in items]
        self._index, self._uri = index, uri
        self._digests = b"".join(digests)

    def digest(self, row: int) -> str:
        return self._digests[DIGEST * row : DIGEST * (row + 1)].hex()

    def name(self, row: int) -> str:
        return f"{self._uri}: file {self._index.keys.id('file', self._paths[row])}"

    def read(self, row: int) -> Image.Image:
        answer = readers().submit(self._index.request("pixels", self._paths[row], self._places[row])).result()
        if answer.image is None:
            raise DataError(f"{self.name(row)}: {answer.error}.")
        return answer.image
