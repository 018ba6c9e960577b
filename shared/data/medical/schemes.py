"""The data URIs of this room: their options, in words that readers understand."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from promptfed.shared.data.options import Options
from promptfed.shared.data.source import DataError, Source

_LARGEST_TILE = 4096  # pixels
_MASKS = ("masks", "mask_classes", "mask_share")
_MOST_CLASSES = 255  # values of a mask of 8 bits


def open_dicom(body: str, options: Options) -> Source:
    """``dicom:FOLDER``: images, series or studies that ``labels=`` (labels.csv) names."""
    _need("pydicom", options)
    from promptfed.shared.data.medical import opening
    from promptfed.shared.data.medical.table import COLUMNS, PATH

    options.check_names((*opening.OPTIONS, "level", "frames", "window"))
    level = options.choice("level", ("image", "series", "study"), "image") or "image"
    frames = opening.checked_pick("frames", options)
    settings = _with_window(options)
    return opening.open_files("dicom", body, options, settings, opening.by_level(level), frames, (*COLUMNS, PATH))


def open_dicomweb(body: str, options: Options) -> Source:
    """``dicomweb:URL?labels=FILE``: images of a PACS, which are kept on this disk."""
    _need("dicomweb_client", options)
    from promptfed.shared.data.medical import opening, pacs
    from promptfed.shared.data.medical.table import COLUMNS

    options.check_names((*opening.OPTIONS, "level", "frames", "window", "token", "study"))
    level = options.choice("level", ("image", "series", "study"), "image") or "image"
    frames = opening.checked_pick("frames", options)
    settings = _with_window(options)
    options = replace(options, uri=re.sub(r"([?&]study)=[^&]*", r"\1=...", options.uri))  # in errors, and so in logs
    table = str(Path(options.text("labels") or "").expanduser().absolute()) if options.text("labels") else ""
    options = replace(options, values={**options.values, "labels": table}) if table else options
    folder, left_out = (Path(), ()) if options.names_only else pacs.fetched(body, options, settings)
    units = opening.by_level(level)
    source = opening.open_files("dicom", str(folder), options, settings, units, frames, tuple(COLUMNS))
    return replace(source, left_out=(*left_out, *source.left_out))


def open_nifti(body: str, options: Options) -> Source:
    """``nifti:FOLDER``: slices of the volumes that ``labels=`` (labels.csv) names by their paths."""
    _need("nibabel", options)
    from promptfed.shared.data.medical import opening
    from promptfed.shared.data.medical.table import PATH

    options.check_names((*opening.OPTIONS, "axis", "slices", "window"))
    axis = options.choice("axis", ("axial", "coronal", "sagittal"), "axial")
    slices = opening.checked_pick("slices", options)
    settings = {"axis": axis, **_with_window(options, percentiles=True)}
    return opening.open_files("nifti", body, options, settings, opening.of_each_file, slices, (PATH,))


def open_slides(body: str, options: Options) -> Source:
    """``wsi:FOLDER``: tiles of the slides that ``labels=`` (labels.csv) names by their paths."""
    _need("tiffslide", options)
    from promptfed.shared.data.medical import opening
    from promptfed.shared.data.medical.table import PATH

    options.check_names((*opening.OPTIONS, "level", "tile", "tissue", "tiles", *_MASKS))
    share = options.number("tissue", 0.5) or 0.0
    if not 0 <= share <= 1:
        raise DataError(f"{options.uri}: tissue={share:g} is not between 0 and 1.")
    tile = options.integer("tile", 256, least=16) or 256
    if tile > _LARGEST_TILE:
        raise DataError(f"{options.uri}: tile={tile} is more than {_LARGEST_TILE}.")
    settings = {"level": options.integer("level", 0), "tile": tile, "tissue": share}
    tiles, names = opening.checked_pick("tiles", options, "all"), _mask_classes(options)
    if names:
        settings |= _masks(options, len(names))
    return opening.open_files("slides", body, options, settings, opening.of_each_file, tiles, (PATH,), names)


def _mask_classes(options: Options) -> tuple[str, ...]:
    """The classes of masks, of which the first has the value 1; none where the table has the labels."""
    if options.text("masks") is None:
        for name in _MASKS[1:]:
            if options.text(name) is not None:
                raise DataError(f"{options.uri}: {name} belongs to masks=FOLDER; give both.")
        return ()
    names = tuple((options.text("mask_classes") or "").split(","))
    if "" in names or len(set(names)) < len(names) or len(names) > _MOST_CLASSES:
        raise DataError(f"{options.uri}: name the classes of the values 1, 2, ... with mask_classes=tumour,stroma.")
    return names


def _masks(options: Options, classes: int) -> dict[str, Any]:
    """What tiles need of the masks. The stamp changes with every file of the folder, and the index with it."""
    folder = Path(options.text("masks") or "").expanduser().absolute()
    if not folder.is_dir():
        raise DataError(f"{options.uri}: there is no folder with masks; check masks=FOLDER.")
    share = options.number("mask_share", 0.5) or 0.0
    if not 0 < share <= 1:
        raise DataError(f"{options.uri}: mask_share={share:g} is not above 0 and at most 1.")
    found = sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in os.scandir(folder))
    stamp = hashlib.sha256(repr(found).encode()).hexdigest()
    return {"masks": str(folder), "stamp": stamp, "mask_classes": classes, "mask_share": share}


def _need(module: str, options: Options) -> None:
    if importlib.util.find_spec(module) is None:
        raise DataError(f"{options.uri}: needs {module}: install promptfed[medical].")


def _with_window(options: Options, percentiles: bool = False) -> dict[str, Any]:
    """``window=center,width`` as two numbers; with ``percentiles`` also ``window=p1,p99``."""
    text = options.text("window")
    if text is None:
        return {}
    found = re.fullmatch(r"p(\d{1,2}(?:\.\d+)?),p(\d{1,3}(?:\.\d+)?)", text) if percentiles else None
    if found is not None and float(found[1]) < float(found[2]) <= 100:
        return {"percentiles": [float(found[1]), float(found[2])]}
    try:
        center, width = map(float, text.split(","))
    except ValueError:
        center = width = float("nan")
    more = ", or two percentiles, as in window=p1,p99" if percentiles else ""
    if not (abs(center) < float("inf") and 1 <= width < float("inf")):
        raise DataError(
            f"{options.uri}: window={text} is not a center and a width of at least 1, as in window=40,400{more}."
        )
    return {"window": [center, width]}
