"""One NIfTI volume: its slices along an axis of the body, as they are shown. Runs in a child process (`worker`)."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from nibabel.orientations import io_orientation

from promptfed.shared.data.medical.pictures import MOST_BYTES, MOST_FRAMES, in_eight_bits, stretched, windowed
from promptfed.shared.data.medical.unreadable import Unreadable
from promptfed.shared.files import open_file

ENDINGS = (".nii", ".nii.gz")
WHOLE = 1 << 29  # bytes of a volume that is kept unpacked
AXES = {"sagittal": 0, "coronal": 1, "axial": 2}  # the direction that is sliced, of right, anterior and superior

_last: list[tuple[Path, int, int, int]] = []  # the file of the last slice


def facts(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The number of slices along ``axis``; None if the file has another ending."""
    if not path.name.lower().endswith(ENDINGS):
        return None
    volume = _opened(path)
    along = _axis_of(_orientation(volume), AXES[settings["axis"]])
    return {"frames": volume.shape[along]}


def _opened(path: Path) -> Any:
    """The volume, of which nothing but the header is read."""
    with open_file(path):  # no pipe and no device
        volume = nibabel.load(path)
    shape = volume.shape
    if len(shape) < 3 or min(shape) < 1:
        raise Unreadable("it is no volume: it has fewer than three dimensions")
    kind = volume.get_data_dtype()
    if kind.fields is not None or kind.kind not in "iuf":
        raise Unreadable("its values are not plain numbers")
    if max(shape) > MOST_FRAMES or (max(shape) ** 2 * 8 > 4 * MOST_BYTES and _largest_slice(shape) * 8 > MOST_BYTES):
        raise Unreadable("its header claims slices of more than 0.5 GB")
    if path.suffix.lower() == ".nii" and path.stat().st_size < int(np.prod(shape, dtype=object)) * kind.itemsize:
        raise Unreadable("its header claims more than the file holds")
    return volume


def _to_slice(path: Path) -> Any:
    """The volume; a compressed one is unpacked as a whole when it is asked for again, as all its slices are."""
    volume, about = _opened(path), path.stat()
    end = volume.dataobj.offset + int(np.prod(volume.shape, dtype=object)) * volume.get_data_dtype().itemsize
    if path.suffix.lower() != ".gz" or end > WHOLE:
        return volume
    known = (path, about.st_size, about.st_mtime_ns, end)
    again, _last[:] = known in _last, [known]
    return type(volume).from_bytes(_unpacked(*known)) if again else volume


@lru_cache(maxsize=1)
def _unpacked(path: Path, size: int, time: int, end: int) -> bytes:
    with gzip.open(path) as file:
        return file.read(end)


def _largest_slice(shape: tuple[int, ...]) -> int:
    first, second = sorted(int(side) for side in shape[:3])[1:]
    return first * second


def _orientation(volume: Any) -> np.ndarray:
    """``(3, 2)``: for each axis of the array the axis of the body (right, anterior, superior), and 1 or -1."""
    found: np.ndarray = io_orientation(volume.affine)
    if np.isnan(found).any() or len(found) != 3:
        raise Unreadable("its header has no valid orientation")
    return found


def _axis_of(orientation: np.ndarray, body: int) -> int:
    """The axis of the array that runs along an axis of the body."""
    return int(np.flatnonzero(orientation[:, 0] == body)[0])


def pixels(path: Path, place: int, settings: Mapping[str, Any]) -> np.ndarray:
    """Slice ``place`` along ``axis``, counted from left, posterior or inferior, as uint8 ``(H, W)``.

    As radiologists look at it: top is superior (axial: anterior), left is the patient's right (sagittal: anterior).

    settings: ``axis``; ``window``, a center and a width, or ``percentiles``, two of the slice's.
    """
    volume = _to_slice(path)
    orientation = _orientation(volume)
    body = AXES[settings["axis"]]
    along = _axis_of(orientation, body)
    index: list[Any] = [slice(None)] * 3 + [0] * (len(volume.shape) - 3)  # of several volumes the first
    index[along] = place if orientation[along, 1] > 0 else volume.shape[along] - 1 - place
    values = np.asarray(volume.dataobj[tuple(index)])
    across, upward = (axis for axis in range(3) if axis != body)
    if _axis_of(orientation, across) > _axis_of(orientation, upward):
        values = values.T
    for side, axis in enumerate((across, upward)):
        if orientation[_axis_of(orientation, axis), 1] > 0:  # towards right, anterior or superior: seen the other way
            values = np.flip(values, side)
    return in_eight_bits(_shown(values.T, settings))


def _shown(values: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray:
    """Values onto 0 to 1 by the window; 8 bits without a window as they are."""
    if settings.get("window") is not None:
        return windowed(values, *settings["window"])
    if settings.get("percentiles") is not None:
        inside = values[np.isfinite(values)]
        least, most = np.percentile(inside, settings["percentiles"]) if inside.size else (0.0, 0.0)
        return stretched(values, (values >= least) & (values <= most))
    if values.dtype == np.uint8:
        return values / 255
    return stretched(values, np.ones(values.shape, dtype=bool))
