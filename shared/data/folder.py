"""``folder:`` and ``csv:`` images on disk, every one decoded when the source is opened, so that none fails later."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch

from promptfed.shared.data.options import Options
from promptfed.shared.data.partition import train_test
from promptfed.shared.data.source import DataError, Domain, FileImages, Source, Split, read_image

TEMPLATE = "a photo of a {}."
_SPLITS = ("train", "test")
_OF_FILE_MANAGERS = frozenset({"thumbs.db", "desktop.ini"})  # what Windows leaves beside images
_TOLD = 3  # files that are no images, before only their number is told


@dataclass(frozen=True)
class _Item:
    path: Path
    label: str
    split: str | None


def open_folder(body: str, options: Options) -> Source:
    """Class folders, or ``domain=``'s folder of class folders; each either plain or inside ``train`` and ``test``."""
    options.check_names(("domain",))
    root = _existing(body, options)
    domain = options.text("domain")
    if domain is not None:
        if domain not in _subfolders(root):
            folders = ", ".join(_subfolders(root)) or "none"
            raise DataError(f"{options.uri}: {root} has no domain folder {domain}; it has {folders}.")
        root = root / domain
    return _source(_folder_items(root), domain, options, str(root))


def _folder_items(root: Path) -> list[_Item]:
    names = _subfolders(root)
    present = [s for s in _SPLITS if s in names]
    if not present:
        return _class_items(root, None)
    if len(present) == 1 or len(names) > 2:
        missing = next((s for s in _SPLITS if s not in names), None)
        why = f"has {present[0]} but no {missing} folder" if missing else "has class folders beside train and test"
        raise DataError(f"{root} {why}; give both train and test, or class folders alone.")
    items = [item for split in _SPLITS for item in _class_items(root / split, split)]
    for split in _SPLITS:
        absent = {i.label for i in items} - {i.label for i in items if i.split == split}
        if absent:
            raise DataError(f"{root / split} has no folder for the class {sorted(absent)[0]}.")
    return items


def _class_items(root: Path, split: str | None) -> list[_Item]:
    names = _subfolders(root)
    if not names:
        raise DataError(f"{root} has no class folder; put the images of each class into a folder of the class's name.")
    items = []
    for name in names:
        files = sorted(p for p in (root / name).iterdir() if not _is_hidden(p))
        if not files:
            raise DataError(f"the class folder {root / name} is empty; add images or remove it.")
        for path in files:
            if path.is_dir():
                raise DataError(
                    f"{path} is a folder where images should be; if {name} is a domain, add domain={name} to the URI."
                )
            items.append(_Item(path, name.replace("_", " "), split))
    return items


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name.lower() in _OF_FILE_MANAGERS


def open_csv(body: str, options: Options) -> Source:
    """A table with the columns path and label, and optionally split (train or test) and domain."""
    options.check_names(("domain",))
    table = _existing(body, options, folder=False)
    domain = options.text("domain")
    with table.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        columns = reader.fieldnames or []
        for needed in ("path", "label", *(["domain"] if domain is not None else [])):
            if needed not in columns:
                raise DataError(f"{table} has no column {needed}.")
        items = [_csv_item(table, number, row) for number, row in enumerate(reader, 2) if _wanted(row, domain)]
    if not items:
        raise DataError(f"{table} has no image" + (f" of the domain {domain}." if domain is not None else "."))
    given = {item.split for item in items}
    if len(given) == 1 and given != {None}:
        raise DataError(f"{table} has only the split {given.pop()}; give train and test, or no split.")
    if None in given and len(given) > 1:
        raise DataError(f"{table} leaves the split of some images empty; give it for all or for none.")
    return _source(items, domain, options, str(table))


def _wanted(row: dict[str, str], domain: str | None) -> bool:
    return domain is None or row["domain"] == domain


def _csv_item(table: Path, number: int, row: dict[str, str]) -> _Item:
    if not row["path"] or not row["label"]:
        raise DataError(f"{table}, line {number}: path and label must not be empty.")
    split = row.get("split") or None
    if split not in (None, *_SPLITS):
        raise DataError(f"{table}, line {number}: the split is {split}, not train or test.")
    return _Item(table.parent / row["path"], row["label"], split)


def _source(items: list[_Item], domain: str | None, options: Options, where: str) -> Source:
    names = tuple(sorted({item.label for item in items}))
    _check_images(items)
    labels = torch.tensor([names.index(item.label) for item in items])
    whole = Split(labels, FileImages([item.path for item in items]))
    if items[0].split is None:
        counts = torch.bincount(labels, minlength=len(names))
        if counts.min() < 2:
            raise DataError(f"{where}: the class {names[int(counts.argmin())]} has one image; two are needed to split.")
        train, test = train_test(labels, options.split_seed)
    else:
        is_train = torch.tensor([item.split == "train" for item in items])
        train, test = is_train.nonzero()[:, 0], (~is_train).nonzero()[:, 0]
    return Source(options.uri, names, _domain(domain), TEMPLATE, whole.select(train), whole.select(test))


def _check_images(items: list[_Item]) -> None:
    """Read all: whoever mends a folder wants to know of every file that is none. Raises DataError."""
    wrong = []
    for item in items:
        try:
            read_image(item.path)
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        more = f" And {len(wrong) - _TOLD} more." if len(wrong) > _TOLD else ""
        raise DataError(" ".join(wrong[:_TOLD]) + more)


def _domain(name: str | None) -> Domain | None:
    if name is None:
        return None
    words = name.replace("_", " ")
    article = "an" if words[:1].lower() in "aeiou" else "a"
    return Domain(name, f"{article} {words} of a {{}}")


def _existing(body: str, options: Options, folder: bool = True) -> Path:
    kind = "folder" if folder else "file"
    if not body:
        raise DataError(f"{options.uri}: names no {kind}; write {kind}:/path.")
    path = Path(body).expanduser()
    if not (path.is_dir() if folder else path.is_file()):
        raise DataError(f"{options.uri}: there is no {kind} {path}.")
    return path


def _subfolders(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
