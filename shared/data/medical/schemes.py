"""``dicom:``: its options, in words that readers understand."""

from __future__ import annotations

import importlib.util
from typing import Any

from promptfed.shared.data.options import Options
from promptfed.shared.data.source import DataError, Source


def open_dicom(body: str, options: Options) -> Source:
    """``dicom:FOLDER``: images, series or studies that ``labels=`` (labels.csv) names."""
    _need("pydicom", options)
    from promptfed.shared.data.medical import opening

    options.check_names((*opening.OPTIONS, "level", "frames", "window"))
    level = options.choice("level", ("image", "series", "study"), "image") or "image"
    return opening.open_files(body, options, _with_window(options), level, opening.checked_frames(options))


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
