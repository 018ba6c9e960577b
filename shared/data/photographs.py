"""Photographs that others publish in packages, read in place: ``solar:`` of elpv-dataset, ``stamps:`` of Tux Paint."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from PIL import Image

from promptfed.shared import get_extra
from promptfed.shared.data.image_files import read_image
from promptfed.shared.data.options import Options, SolarOptions, StampsOptions
from promptfed.shared.data.source import DataError, ImageDomain, Source, Split
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import TEMPLATE

TESTED = 4  # of so many photographs one is for tests

SOLAR_PACKAGE = "elpv_dataset"
KINDS = {"mono": "monocrystalline", "poly": "polycrystalline"}
GRADES = ("functional", "possibly defective", "probably defective", "defective")
"""What the labels 0, 1/3, 2/3 and 1 say: how probable a defect is."""

CATEGORIES = {
    "animals/birds": "bird", "animals/fish": "fish", "animals/insects": "insect", "animals/mammals": "mammal",
    "clothes": "piece of clothing", "food/fruit": "fruit", "food/vegetables": "vegetable",
    "hobbies/music": "musical instrument", "household/tools": "tool", "plants/flowers": "flower",
    "plants/trees": "tree", "town/roadsigns": "road sign", "vehicles": "vehicle",
}  # fmt: skip
DRAWN = {"cartoon", "plastic", "symbols", "toys"}  # folders of what is no photograph of the thing
MIRRORED = "_mirror"  # of the names of files that show another one mirrored
MOST_WORDS, QUOTES = 4, str.maketrans("", "", "\"'“”")  # of a caption's name, and in it


def open_solar(body: str, options: SolarOptions) -> Source:
    """Photographs of solar cells by electroluminescence: ``solar?domain=mono&defect=0.5&per_class=100``."""
    if body:
        raise DataError(f"{options.uri}: solar takes nothing before its options, as in solar?domain=mono.")
    kind = options.domain
    labelled = [(path, grade) for path, grade, own in _cells(options) if kind in (None, own)]
    names: tuple[str, ...]
    if options.defect == "grades":
        names, classes = GRADES, [grade for _, grade in labelled]
    else:
        names, classes = (GRADES[0], GRADES[-1]), [int(grade / 3 >= options.defect) for _, grade in labelled]
    words = f"an electroluminescence photo of a {{}} {KINDS.get(kind or '', '')} solar cell"
    domain = None if kind is None else ImageDomain(kind, words)
    template = "an electroluminescence photo of a {} solar cell."
    return _source([path for path, _ in labelled], names, classes, read_image, domain, template, options)


def _cells(options: Options) -> list[tuple[Path, int, str]]:
    """The file of each cell, its grade from 0 to 3, and its kind. Raises DataError."""
    found = find_spec(SOLAR_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise DataError(f"{options.uri}: needs the package elpv-dataset: {get_extra('photos')}.")
    folder = Path(found.submodule_search_locations[0], "data")
    table, cells = folder / "labels.csv", []
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{options.uri}: {table} cannot be read ({why(error)}): install elpv-dataset again.") from None
    for number, line in enumerate(lines, 1):
        fields = re.fullmatch(r"(images/[\w.-]+)\s+([01]\.\d+)\s+(mono|poly)", line.strip())
        grade = -1.0 if fields is None else 3 * float(fields[2])
        if fields is None or grade > 3.1 or abs(grade - round(grade)) > 0.1:
            text = f"line {number} is not a path, one of 0.0, 0.33, 0.67 and 1.0, and mono or poly"
            raise DataError(f"{options.uri}: {table}, {text}: install elpv-dataset again.")
        cells.append((folder / fields[1], round(grade), fields[3]))
    return cells


def open_stamps(body: str, options: StampsOptions) -> Source:
    """Cut-out photographs on white squares: ``stamps?level=kinds``, or ``level=names`` by their captions."""
    if body:
        raise DataError(f"{options.uri}: stamps takes nothing before its options, as in stamps?level=names.")
    root, by_kinds = Path(options.root).expanduser(), options.level == "kinds"
    files = [path for path in sorted(root.rglob("*.png")) if _is_photograph(path.relative_to(root))]
    named = {path: _category(path.relative_to(root)) if by_kinds else caption_of(path) for path in files}
    files = [path for path in files if named[path]]
    if not files:
        text = "apt-get install tuxpaint-stamps-default, or give the folder of its stamps by root="
        raise DataError(f"{options.uri}: there are no stamps in {root}: {text}.")
    names = tuple(sorted({str(named[path]) for path in files}))
    classes = [names.index(str(named[path])) for path in files]
    return _source(files, names, classes, squared, None, TEMPLATE, options, root)


def _is_photograph(path: Path) -> bool:
    return not DRAWN & set(path.parts) and not path.stem.endswith(MIRRORED)


def _category(path: Path) -> str | None:
    parts = path.parts
    return CATEGORIES.get("/".join(parts[:2]), CATEGORIES.get(parts[0]))


def caption_of(picture: Path) -> str | None:
    """The name that the caption beside a picture begins with, as in "A badger."; None if it has none."""
    try:
        text = picture.with_suffix(".txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.match(r"(?:an?|the|some|two) (?:pair of )?([^.!?(,:;—]+)", text.partition("\n")[0], re.IGNORECASE)
    name = "" if found is None else found[1].translate(QUOTES).strip()
    return name if name and len(name.split()) <= MOST_WORDS else None


def squared(path: Path) -> Image.Image:
    """A cut-out in the middle of a white square."""
    image = read_image(path)
    side = max(image.size)
    square = Image.new("RGB", (side, side), "white")
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _source(
    files: Sequence[Path],
    names: tuple[str, ...],
    classes: Sequence[int],
    read: Callable[[Path], Image.Image],
    domain: ImageDomain | None,
    template: str,
    options: SolarOptions | StampsOptions,
    root: Path | None = None,
) -> Source:
    """The photographs, of each class at most ``per_class=``; every fourth is for tests.

    Digests of the files' places decide, so that a photograph is on one side whatever else is chosen.
    """
    places = [str(path.relative_to(root)) if root is not None else path.name for path in files]
    order = [hashlib.sha256(f"{options.split_seed}/{place}".encode()).digest() for place in places]
    rows: list[int] = []
    for label in range(len(names)):
        own = sorted((row for row in range(len(files)) if classes[row] == label), key=order.__getitem__)
        rows += own[: options.per_class]
    rows.sort()
    tested = torch.tensor([order[row][-1] % TESTED == 0 for row in rows], dtype=torch.bool)
    kept = [files[row] for row in rows]
    same = read is read_image
    whole = Split(
        torch.tensor([classes[row] for row in rows], dtype=torch.int64),
        lambda row: read(kept[row]),
        path=(lambda row: kept[row]) if same else (lambda row: None),
        name=lambda row: str(kept[row]),
    )
    train, test = (~tested).nonzero()[:, 0], tested.nonzero()[:, 0]
    return Source(options.uri, names, domain, template, whole.select(train), whole.select(test))
