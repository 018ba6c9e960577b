"""The data URIs of this room: their options, in words that readers understand."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from promptfed.shared.data.options import Options
from promptfed.shared.data.source import DataError, Source


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
