"""``folder:`` and ``csv:`` images on disk. All images are decoded when the source is opened, so that none fails later.

All problems of a folder are reported together. Evaluators use every image as a test image, regardless of splits.
"""

from __future__ import annotations

import csv
import logging
import os
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageOps

from promptfed.shared.data.cutting import UNKNOWN, divided, kept_names, only, with_classes
from promptfed.shared.data.errors import shortened
from promptfed.shared.data.image_files import READERS, image_digest, read_image
from promptfed.shared.data.options import CsvOptions, FolderOptions, Options, TableOptions
from promptfed.shared.data.partition import strata
from promptfed.shared.data.pixels import GREY, Grey, Scale
from promptfed.shared.data.source import DataError, ImageDomain, Source, Split, in_words, one_scale
from promptfed.shared.files import open_file
from promptfed.shared.plain_text import likeness, merged, quoted, seen
from promptfed.shared.service import reasons
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import TEMPLATE

log = logging.getLogger("promptfed.data")

NAMES_COLUMN = "labels"
SEPARATOR = "|"
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # other than commas, that tables come with
_CELLS = {"": UNKNOWN, "0": 0, "1": 1, "0.0": 0, "1.0": 1}  # what a cell of a class's column may hold

Rows = Sequence[tuple[int, dict[str, str]]]  # the lines of a table with their numbers
WORDS_FILE = "domain.txt"  # file in a folder that describes its images in words
_SPLITS = ("train", "test")
_OF_FILE_MANAGERS = frozenset({"thumbs.db", "desktop.ini"})  # files that Windows creates beside images
_LEAVE_OUT = "Leave classes out with only=NAME,NAME or, those of fewer images, with min_per_class=2."
_SIDE, _COLUMNS, _LETTERS, _LINES, _LINE = 64, 12, 12, 5, 12


def read_lines(path: Path, name: str) -> tuple[list[str], Rows]:
    """The columns of a table that is called ``name``, and its rows with the numbers of their last lines.

    No row is mended: of one with too many or too few cells nobody knows which cell is missing or was divided.

    Raises:
        DataError: it is no CSV file in UTF-8, separates by other than commas, has two columns of one name, or a
            malformed row.
    """
    lines: list[tuple[int, list[str]]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            for cells in reader:
                lines.append((reader.line_num, cells))
    except (UnicodeDecodeError, csv.Error) as error:
        if isinstance(error, csv.Error) and ("end of data" in str(error) or "expected after" in str(error)):
            begun = lines[-1][0] + 1 if lines else 1
            text = "a quote is not closed, or text follows it; write a quote within quotes twice"
            raise DataError(f"{name}, line {begun}: {text}.") from None
        raise DataError(f"{name} is not a CSV file in UTF-8; save it as one.") from None
    except OSError as error:
        raise DataError(f"{name} cannot be read: {why(error)}.") from None
    lines = [(number, cells) for number, cells in lines if cells and (len(cells) > 1 or cells[0].strip())]
    columns = lines[0][1] if lines else []
    found = [words for mark, words in _SEPARATORS.items() if len(columns) == 1 and mark in columns[0]]
    if found:
        raise DataError(f"{name} separates its columns by {found[0]}; separate them by commas.")
    twice = [column for column, count in Counter(columns).items() if count > 1 and column]
    if twice:
        raise DataError(f"{name} has the column {twice[0]} twice; rename or remove one of them.")
    wrong = [f"{name}, line {number}: {text}" for number, cells in lines[1:] if (text := _miscounted(cells, columns))]
    if wrong:
        raise DataError(" ".join(shortened(wrong)), wrong)
    return columns, [(number, dict(zip(columns, cells, strict=True))) for number, cells in lines[1:]]


def _miscounted(cells: Sequence[str], columns: Sequence[str]) -> str:
    """What is wrong with the number of a row's cells; empty if nothing is."""
    if len(cells) < len(columns):
        return f"{columns[len(cells)] or 'a cell'} is missing: give every line {len(columns)} cells."
    given = f"{len(cells)} cells where the first line has {len(columns)}"
    return "" if len(cells) == len(columns) else f"{given}; put a cell that holds a comma in quotes."


def misread(rows: Rows, keys: Collection[str], labels: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The line, and what is wrong with a cell in the columns ``keys`` or ``labels``.

    A space at an end would make another patient or domain of "p1 ", and a quote that is closed some lines later one
    cell of them all. Labels with such spaces are told as class names.
    """
    for number, row in rows:
        for column in (*keys, *labels):
            cell = row.get(column, "")
            if "\n" in cell or "\r" in cell:
                yield number, f"{column} holds a line break; close its quote, or write it in one line."
            elif column in keys and cell != cell.strip():
                yield number, f"{column} begins or ends with a space; remove it."


def check_column(needed: str, columns: Sequence[str], name: str) -> None:
    """Raise DataError if a table that is called ``name`` lacks a column; one that is written otherwise is told."""
    if needed in columns:
        return
    near = [column for column in columns if seen(column).strip() == seen(needed)]
    if near:
        raise DataError(f"{name} calls its column {quoted(near, [needed])[0]}; call it {needed}.")
    raise DataError(f"{name} has no column {needed}; its first line names the columns, as in path,label.")


@dataclass(frozen=True)
class LabelColumns:
    """Where ``table`` has the labels: a column for each class, or with ``names`` one column that lists the classes."""

    table: Path
    columns: tuple[str, ...]
    names: bool

    def problems(self, number: int, row: Mapping[str, str]) -> Iterator[str]:
        """One sentence for each cell of a line that cannot be read."""
        for column in self.columns:
            where, cell = f"{self.table}, line {number}", row[column]
            if self.names and cell.strip() and not all(map(str.strip, cell.split(SEPARATOR))):
                yield f"{where}: {column} is {cell}, with an empty name; write names separated by one {SEPARATOR}."
            elif not self.names and cell.strip() not in _CELLS:
                advice = "correct it, give columns=NAME,NAME of the classes, or call a column of names label or labels"
                yield f"{where}: {column} is {cell}, not 1 (present), 0 (absent) or empty (unknown); {advice}."

    def read(self, rows: Rows) -> tuple[tuple[str, ...], torch.Tensor]:
        """The class names, and labels ``(N, C)`` int8 of lines without `problems`.

        Raises:
            DataError: there is no class, or two columns would become one.
        """
        if not self.names:
            if clauses := merged(self.columns, words_of):
                raise DataError(f"{self.table}: the columns {'; '.join(clauses)}.")
            cells = [[_CELLS[row[column].strip()] for column in self.columns] for _, row in rows]
            return tuple(map(words_of, self.columns)), _labels(cells)
        column = self.columns[0]
        listed = [_names_in(row[column]) for _, row in rows]
        names = tuple(sorted(set().union(*listed)))
        if not names:
            raise DataError(f"{self.table}: the column {column} names no class; write some, as in cat|dog.")
        joined = [number for number, row in rows if SEPARATOR not in row[column] and set(row[column]) & {",", ";"}]
        if joined:
            more = f" and {len(joined) - 1} more" if len(joined) > 1 else ""
            text = f"{column} holds a comma or a semicolon and no {SEPARATOR}, which separates names: it is one name"
            _tell(f"{self.table}, line {joined[0]}{more}: {text}")
        return names, _labels([[int(name in own) for name in names] for own in listed])


@lru_cache(64)
def _tell(text: str) -> None:
    """Log, once for each source."""
    log.warning("%s", text)


def words_of(name: str) -> str:
    """The class that a column, or a library's name, stands for."""
    return " ".join(name.replace("_", " ").split())


def label_columns(
    table: Path, columns: Sequence[str], others: Collection[str], options: TableOptions, given: str | None = None
) -> LabelColumns | None:
    """Where ``table`` has several labels per image; None if it has one, in the column ``label``.

    ``given`` names the column of names (default: labels), ``columns=NAME,NAME`` the columns of classes; without either
    of them these are all columns but ``others``.

    Raises:
        DataError: a named column is missing, or both options are given.
    """
    if given is not None and options.columns:
        raise DataError(f"{options.uri}: give labels= or columns=, not both.")
    wanted = options.columns if given is None else (given,)
    for name in wanted:
        if name not in columns:
            alike = likeness([name], columns)
            raise DataError(f"{table} has no column {name}{alike}; choose one of {', '.join(columns)}.")
    if wanted:
        return LabelColumns(table, wanted, given is not None)
    if "label" in columns:
        return None
    if NAMES_COLUMN in columns:
        return LabelColumns(table, (NAMES_COLUMN,), True)
    classes = tuple(column for column in columns if column not in others)
    if wrong := [name for name in classes if seen(name).strip() in ("", "label", NAMES_COLUMN)]:
        meant = seen(wrong[0]).strip()
        shown = quoted(wrong, [meant])[0]
        change = f"calls a column {shown}; call it {meant}" if meant else "has a column without a name"
        raise DataError(f"{table} {change}, or give columns=NAME,NAME of the classes.")
    return LabelColumns(table, classes, False) if classes else None


def subgroup_of(row: Mapping[str, str], column: str) -> str:
    """The value of a line in a column of subgroups."""
    return row[column] or "unknown"


def _names_in(cell: str) -> set[str]:
    return {name.strip() for name in cell.split(SEPARATOR) if name.strip()}


def _labels(cells: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(cells, dtype=torch.int8)


@dataclass(frozen=True)
class _Item:
    path: Path
    label: str
    split: str | None
    group: str | None = None
    subgroups: tuple[tuple[str, str], ...] = ()  # column and value
    digest: str = ""  # of its image, once that was read
    grey: Scale | None = None  # by which it was read, if it has more than 8 bits


@dataclass(frozen=True)
class _Listing:
    """The contents of a folder or table: its items, and the labels without images."""

    items: list[_Item]
    where: Path
    domain: ImageDomain | None
    empty: tuple[Path, ...] = ()  # class folders without an image
    by_folders: bool = False  # whether splits are folders
    wrong: tuple[str, ...] = ()  # problems of what stands in the place of an item


def open_folder(body: str, options: FolderOptions) -> Source:
    """Open class folders, plain or inside ``train`` and ``test``; ``domain=`` names a folder of class folders."""
    root = _existing(body, options)
    domain = options.domain
    if domain is not None:
        if domain not in _subfolders(root):
            folders = ", ".join(_subfolders(root)) or "none"
            raise DataError(f"{options.uri}: {root} has no domain folder {domain}; it has {folders}.")
        root = root / domain
    return _source(_grouped(_listing(root, domain, options), options), options)


def _grouped(listing: _Listing, options: FolderOptions) -> _Listing:
    """Set each item's group: the first capture of the regular expression ``group=`` in the file's name."""
    given = options.group
    if given is None:
        return listing
    try:
        pattern = re.compile(given)
    except re.error as error:
        raise DataError(f"{options.uri}: group={given} is not a regular expression ({error}).") from None
    if pattern.groups < 1:
        raise DataError(f"{options.uri}: group={given} captures nothing; put the part that names the group in (...).")
    matches = [pattern.search(item.path.name) for item in listing.items]
    groups = [match.group(1) if match is not None else None for match in matches]
    items = [replace(item, group=group) for item, group in zip(listing.items, groups, strict=True)]
    wrong = [f"{item.path}: its name has no group ({given})." for item in items if not item.group]
    return replace(listing, items=items, wrong=(*listing.wrong, *wrong))


def _listing(root: Path, domain: str | None, options: Options) -> _Listing:
    names = _subfolders(root)
    splits: list[str | None] = [name for name in _SPLITS if name in names]
    if not splits:
        splits = [None]
    elif len(names) > len(splits) or (len(splits) == 1 and options.role == "trainer"):
        raise DataError(_unlike_splits(root, names))
    items: list[_Item] = []
    empty: list[Path] = []
    wrong: list[str] = []
    for split in splits:
        images, lacking, nested = _class_items(root if split is None else root / split, split)
        items += images
        empty += lacking
        wrong += nested
    folders = (item.path.parent.name for item in items)
    wrong += [f"{root}: the class folders {clause}." for clause in merged(folders, _label)]
    first: dict[str, Path] = {}
    for item, true in zip(items, true_paths(item.path for item in items), strict=True):
        if first.setdefault(true, item.path) != item.path and os.path.isfile(true):
            wrong.append(f"{item.path} is the same file as {first[true]}; keep one of them.")
    words = _domain(domain, root / WORDS_FILE, [] if domain is None else _subfolders(root.parent))
    return _Listing(items, root, words, tuple(empty), splits != [None], tuple(wrong))


def _unlike_splits(root: Path, names: list[str]) -> str:
    """The reason why the folders ``names`` are neither a train and a test folder nor only class folders."""
    present = [name for name in _SPLITS if name in names]
    missing = next((name for name in _SPLITS if name not in names), None)
    why = f"has {present[0]} but no {missing} folder" if missing else "has class folders beside train and test"
    text = f"{root} {why}; give both train and test, or class folders alone."
    return f"{text} Evaluators (--role evaluator) need no train folder." if names == ["test"] else text


def _class_items(root: Path, split: str | None) -> tuple[list[_Item], list[Path], list[str]]:
    """The images of the class folders in ``root``, the folders without images, and a problem for each nested folder."""
    names = _subfolders(root)
    if not names:
        raise DataError(f"{root} has no class folder; put the images of each class into a folder of the class's name.")
    items: list[_Item] = []
    empty, nested = [], []
    for name in names:
        files = sorted(p for p in (root / name).iterdir() if not _is_hidden(p))
        if not files:
            empty.append(root / name)
        for path in files:
            if path.is_dir():
                advice = f"if {name} is a domain, add domain={name} to the URI"
                nested.append(f"{path} is a folder where images should be; {advice}.")
            else:
                items.append(_Item(path, _label(name), split))
    return items, empty, nested


def _label(folder: str) -> str:
    return folder.replace("_", " ")


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name.lower() in _OF_FILE_MANAGERS


def open_csv(body: str, options: CsvOptions) -> Source:
    """Open a table with the columns path and label, or several labels per image as `label_columns` finds them.

    Optional columns: split (train or test), domain, the group, and with ``groups=NAME,NAME`` those of subgroups.
    """
    table = _existing(body, options, folder=False)
    domain, group, subgroups = options.domain, options.group, options.groups
    columns, lines = read_lines(table, str(table))
    several = label_columns(
        table, columns, {"path", "split", "domain", group or "path", *subgroups}, options, options.labels
    )
    wanted = [*(["domain"] if domain is not None else []), *([group] if group is not None else []), *subgroups]
    for needed in ("path", *(["label"] if several is None else []), *wanted):
        check_column(needed, columns, str(table))
    rows = [(number, row) for number, row in lines if _wanted(row, domain)]
    labelled = ("label",) if several is None else several.columns
    wrong = [f"{table}, line {number}: {text}" for number, text in misread(lines, ("split", *wanted), labelled)]
    wrong += [problem for number, row in rows for problem in _row_problems(table, number, row, group, several)]
    wrong += _listed_twice(table, rows)
    if wrong:
        items = [_csv_item(table, row, group, subgroups) for _, row in rows if row["path"]]
        read = [] if options.names_only else _read(item for item in items if several is None or item.path.exists())
        _refuse([*wrong, *(str(item) for item in read if isinstance(item, DataError))])
    items = [_csv_item(table, row, group, subgroups) for _, row in rows]
    _check_splits(table, items, domain, options)
    words = _domain(domain, table.parent / WORDS_FILE, (row.get("domain", "") for _, row in lines))
    listing = _Listing(items, table, words)
    if several is None:
        return _source(listing, options)
    names, labels = several.read(rows)
    readable, unreadable, left_out = _readable(items, options)
    _refuse(unreadable)
    known = {item.path for item in readable}
    kept = [row for row, item in enumerate(items) if item.path in known]
    source = _divided(replace(listing, items=readable), names, labels[kept], options)
    return replace(only(source, options), left_out=left_out)


def _check_splits(table: Path, items: Sequence[_Item], domain: str | None, options: Options) -> None:
    """Raise DataError if there is no item, or if splits are given for some only."""
    if not items:
        raise DataError(f"{table} has no image" + (f" of the domain {domain}." if domain is not None else "."))
    given = {item.split for item in items}
    if len(given) == 1 and given != {None} and options.role == "trainer":
        split = given.pop()
        text = f"{table} has only the split {split}; give train and test, or no split."
        raise DataError(f"{text} Evaluators need --role evaluator." if split == "test" else text)
    if None in given and len(given) > 1:
        raise DataError(f"{table} leaves the split of some images empty; give it for all or for none.")


def _wanted(row: Mapping[str, str], domain: str | None) -> bool:
    return domain is None or row["domain"] == domain


def _row_problems(
    table: Path, number: int, row: Mapping[str, str], group: str | None, several: LabelColumns | None
) -> Iterator[str]:
    where, split = f"{table}, line {number}", row.get("split") or None
    yield from () if several is None else several.problems(number, row)
    if not row["path"] or (several is None and not row["label"]):
        yield f"{where}: {'path and label' if several is None else 'path'} must not be empty."
    elif "\\" in row["path"] and not (table.parent / row["path"]).exists():
        yield f"{where}: there is no image {row['path']}; write / between folders."
    elif several is not None and not (table.parent / row["path"]).exists():
        yield f"{where}: there is no image {row['path']}; correct the path, or remove the line."
    if split not in (None, *_SPLITS):
        yield f"{where}: the split is {split}, not train or test."
    if group is not None and not row[group]:
        yield f"{where}: the group ({group}) must not be empty."


def _listed_twice(table: Path, rows: Rows) -> Iterator[str]:
    """One sentence for each line with an earlier line's image, that could be in train and test, or have two labels."""
    known: dict[str, int] = {}
    given = [(number, row["path"]) for number, row in rows if row["path"]]
    for (number, path), true in zip(given, true_paths(table.parent / path for _, path in given), strict=True):
        first = known.setdefault(true, number)
        if first != number:
            yield f"{table}, line {number}: {path} is the image of line {first} too; keep one line for each image."


def true_paths(paths: Iterable[Path]) -> Iterator[str]:
    """Where the files are, whatever links and dots lead there; each folder is looked up once."""
    folders: dict[str, str] = {}
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        true = os.path.join(folders[folder], name)
        yield os.path.realpath(true) if os.path.islink(true) or name in ("..", ".") else true


def _csv_item(table: Path, row: Mapping[str, str], group: str | None, subgroups: Sequence[str]) -> _Item:
    split, own_group = row.get("split") or None, row[group] if group is not None else None
    values = tuple((name, subgroup_of(row, name)) for name in subgroups)
    return _Item(table.parent / row["path"], row.get("label") or "", split, own_group, values)


def _source(listing: _Listing, options: FolderOptions) -> Source:
    """The source without the classes that ``only=`` and ``min_per_class=`` exclude. Raises DataError."""
    names = tuple(sorted({item.label for item in listing.items}))
    if not names:
        _refuse(listing.wrong, _emptiness(listing.empty))
    wanted = kept_names(names, _usable(listing, options), options)
    items, unreadable, left_out = _readable([item for item in listing.items if item.label in wanted], options)
    classes = [] if options.names_only else _problems(listing, items, options)
    _refuse([*listing.wrong, *unreadable], classes, _LEAVE_OUT)
    # Labels refer to all names, so that the seeded split of a class does not depend on excluded classes.
    labels = torch.tensor([names.index(item.label) for item in items])
    source = replace(_divided(replace(listing, items=items), names, labels, options), left_out=left_out)
    return source if len(wanted) == len(names) else with_classes(source, [names.index(name) for name in wanted])


def _divided(listing: _Listing, names: tuple[str, ...], labels: torch.Tensor, options: FolderOptions) -> Source:
    """The items with ``labels`` of the classes ``names`` in train and test. Raises DataError as `divided`."""
    items = listing.items
    groups = [item.group for item in items if item.group is not None] or None
    read = not options.names_only
    grey = one_scale((item.grey for item in items), options.uri, options.grey if read else None)
    whole = Split(
        labels,
        lambda row: read_image(items[row].path, grey),
        groups,
        digest=(lambda row: items[row].digest) if read else None,
        path=lambda row: items[row].path,
    )
    whole.grey = grey
    columns = [name for name, _ in items[0].subgroups] if items else []
    whole.subgroups = {name: tuple(dict(item.subgroups)[name] for item in items) for name in columns}
    return divided(whole, [item.split for item in items], names, listing.domain, TEMPLATE, options)


def _refuse(files: Sequence[str], classes: Sequence[str] = (), advice: str = "") -> None:
    """Raise DataError for problems of files and of classes, if there are any; ``advice``: what helps with classes."""
    if files or classes:
        told = [*shortened(classes), *([advice] if classes and advice else []), *shortened(files)]
        raise DataError(" ".join(told), [*classes, *files])


def _usable(listing: _Listing, options: FolderOptions) -> Counter[str]:
    """Images by class, without classes that lack a folder in train or test."""
    counts = Counter(item.label for item in listing.items)
    if listing.by_folders and not options.is_whole_test:
        for label in _absent(listing.items):
            counts[label] = 0
    return counts


def _absent(items: Iterable[_Item]) -> dict[str, str]:
    """For each class, the existing split in which it has no image."""
    items = list(items)
    splits, labels = {item.split for item in items}, sorted({item.label for item in items})
    present = {(item.label, item.split) for item in items}
    return {label: split for split in filter(None, splits) for label in labels if (label, split) not in present}


def _problems(listing: _Listing, items: list[_Item], options: Options) -> list[str]:
    """One sentence for each class that cannot be used."""
    problems = []
    if options.only is None and options.min_per_class is None:  # may exclude empty folders
        problems += _emptiness(listing.empty)
    if options.is_whole_test:
        return problems
    if items and items[0].split is None:
        counts = Counter(item.label for item in items)
        single = sorted(label for label, count in counts.items() if count < 2)
        problems += [f"{listing.where}: the class {label} has one image; two are needed to split." for label in single]
    elif listing.by_folders:  # a table may have classes without test images
        lacking = sorted(_absent(items).items(), key=lambda both: both[1])
        problems += [f"{listing.where / split} has no folder for the class {label}." for label, split in lacking]
    return problems


def _emptiness(folders: Iterable[Path]) -> list[str]:
    return [f"the class folder {folder} is empty; add images or remove it." for folder in folders]


def _readable(items: list[_Item], options: FolderOptions) -> tuple[list[_Item], tuple[str, ...], tuple[str, ...]]:
    """The items to be used, and a sentence for each unreadable one: those to refuse, and those that are left out."""
    if options.names_only:
        return items, (), ()
    read = _read(items, options.grey_or_known)
    wrong = tuple(str(item) for item in read if isinstance(item, DataError))
    kept = [item for item in read if not isinstance(item, DataError)]
    return (kept, (), wrong) if options.on_unreadable == "skip" else (items if wrong else kept, wrong, ())


def _read(items: Iterable[_Item], grey: Grey | None = None) -> list[_Item | DataError]:
    """Each item with the digest and the scale of its image, or why it cannot be read."""

    def read(item: _Item) -> _Item | DataError:
        try:
            image = read_image(item.path, grey)
            return replace(item, digest=image_digest(image), grey=image.info.get(GREY))
        except DataError as error:
            return error

    with ThreadPoolExecutor(READERS, "images") as threads:
        return list(threads.map(read, items))


def _domain(name: str | None, words_file: Path, beside: Iterable[str]) -> ImageDomain | None:
    """The domain of the folder ``name``, described by the words in the description file or else by its name.

    A domain's name has letters, digits, dots, underscores and hyphens: the folder "Real World" becomes "Real-World".
    ``beside``: the names of all domains there are.
    """

    def declare(domain: str) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "-", domain)

    declared = declare(name or "")
    if clauses := merged((one for one in beside if declare(one) == declared), declare):
        raise DataError(f"{words_file.parent}: the domains {clauses[0]}.")
    if words_file.exists() and not words_file.is_dir():
        try:
            with open_file(words_file) as file:
                return ImageDomain(declared, in_words(file.read().decode("utf-8-sig")))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{words_file} cannot be read: {reasons.why(error)}.") from None
        except DataError as error:
            raise DataError(f"{words_file}: {error}") from None
    if name is None:
        return None
    words = name.replace("_", " ")
    article = "an" if words[:1].lower() in "aeiou" else "a"
    return ImageDomain(declared, f"{article} {words} of a {{}}")


def _existing(body: str, options: Options, folder: bool = True) -> Path:
    kind = "folder" if folder else "file"
    if not body:
        raise DataError(f"{options.uri}: names no {kind}; write {kind}:/path.")
    path = Path(body).expanduser()
    if not folder and path.exists() and not path.is_file():
        raise DataError(f"{options.uri}: {path} is not a readable file.")
    if not (path.is_dir() if folder else path.is_file()):
        raise DataError(f"{options.uri}: there is no {kind} {path}; check the path.")
    return path


def _subfolders(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def contact_sheet(
    split: Split, class_names: Sequence[str], count: int, notes: Sequence[str] = (), copies: Sequence[int] = ()
) -> Image.Image:
    """``count`` images above their class names, with a note each where ``notes`` are given.

    The rows ``copies`` come first, in a red frame, on at most half of the sheet; then all in turn by note and class.
    """
    classes = strata(split.labels)  # of several classes of an image, the rarest
    kinds = sorted(set(notes)) or [""]
    kind = torch.tensor([kinds.index(note) for note in notes or [""]])
    rows = list(dict.fromkeys([*copies[: count // 2], *spread(kind * len(class_names) + classes, count)]))[:count]
    captions = []
    for row in rows:
        label, told = int(classes[row]), [*notes[row : row + 1], *(["a copy"] if row in copies else [])]
        words = class_names[label] if 0 <= label < len(class_names) else "none"
        captions.append([*textwrap.wrap(words, _LETTERS, max_lines=_LINES, placeholder="..."), *told])
    columns, height = min(_COLUMNS, len(rows)), _SIDE + 8 + _LINE * max(map(len, captions))
    sheet = Image.new("RGB", (columns * (_SIDE + 8) + 8, -(-len(rows) // columns) * height + 8), "white")
    pen = ImageDraw.Draw(sheet)
    for at, (row, caption) in enumerate(zip(rows, captions, strict=True)):
        left, top = 8 + at % columns * (_SIDE + 8), 8 + at // columns * height
        sheet.paste(ImageOps.pad(split.image(row), (_SIDE, _SIDE), color="white"), (left, top))
        if row in copies:
            pen.rectangle((left - 2, top - 2, left + _SIDE + 1, top + _SIDE + 1), outline="red", width=2)
        pen.multiline_text((left, top + _SIDE + 1), "\n".join(caption), fill="black", spacing=1)
    return sheet


def spread(labels: torch.Tensor, count: int) -> list[int]:
    """At most ``count`` rows: the first of every class, then the second of every class, and so on."""
    seen: dict[int, int] = {}
    turns = []
    for row, label in enumerate(labels.tolist()):
        seen[label] = seen.get(label, 0) + 1
        turns.append((seen[label], label, row))
    return [row for _, _, row in sorted(turns)[:count]]
