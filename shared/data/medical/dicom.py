"""One DICOM file: its facts, and the pixels of a frame as they are shown. Runs in a child process (`worker`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pydicom
from pydicom.dataset import Dataset
from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi, pixel_array
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)

from promptfed.shared.data.errors import Unreadable
from promptfed.shared.data.pixels import bounds
from promptfed.shared.files import open_file

MOST_BYTES = 1 << 29  # of one image, uncompressed
MOST_FRAMES = 100_000
_IDS = {
    "patient": "PatientID",
    "study": "StudyInstanceUID",
    "series": "SeriesInstanceUID",
    "sop": "SOPInstanceUID",
    "accession": "AccessionNumber",
}
_PLACE = ("InstanceNumber", "ImagePositionPatient", "ImageOrientationPatient", "NumberOfFrames", "Rows")
_SHOWN = (
    *("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "BitsAllocated", "BitsStored", "PixelRepresentation"),
    *("PhotometricInterpretation", "PlanarConfiguration", "PixelPaddingValue", "PresentationLUTShape"),
    *("ModalityLUTSequence", "RescaleSlope", "RescaleIntercept"),
    *("VOILUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"),
    *(f"{color}PaletteColorLookupTable{part}" for color in ("Red", "Green", "Blue") for part in ("Descriptor", "Data")),
    *(f"Segmented{color}PaletteColorLookupTableData" for color in ("Red", "Green", "Blue")),
)
_OF_FRAMES = {  # in functional groups: the sequence, and what of it counts for a frame
    "PixelValueTransformationSequence": ("RescaleSlope", "RescaleIntercept"),
    "FrameVOILUTSequence": ("WindowCenter", "WindowWidth", "VOILUTFunction"),
}
_FUNCTIONS = ("LINEAR", "LINEAR_EXACT", "SIGMOID")
PACKAGES = {  # decoders that are not part of promptfed[medical], with their modules, by the transfer syntax
    "1.2.840.10008.1.2.4.57": ("python-gdcm", "gdcm"),
    "1.2.840.10008.1.2.4.70": ("python-gdcm", "gdcm"),
    "1.2.840.10008.1.2.4.80": ("pyjpegls", "jpeg_ls"),
    "1.2.840.10008.1.2.4.81": ("pyjpegls", "jpeg_ls"),
}
_JPEG = ("1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51", "1.2.840.10008.1.2.4.57", "1.2.840.10008.1.2.4.70")


def in_eight_bits(shown: np.ndarray) -> np.ndarray:
    """0 to 1 as uint8; what is no number is black."""
    levels: np.ndarray = np.floor(np.clip(np.nan_to_num(shown), 0, 1) * 255 + 0.5).astype(np.uint8)
    return levels


def windowed(values: np.ndarray, center: float, width: float, function: str = "LINEAR") -> np.ndarray:
    """Values through a window onto 0 to 1 (DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    if width < (1 if function == "LINEAR" else 1e-12):
        raise Unreadable("its window has no width; give another with window=center,width")
    if function == "SIGMOID":
        shown: np.ndarray = 1 / (1 + np.exp(np.clip(-4 * (values - center) / width, -700, 700)))
        return shown
    if function == "LINEAR":
        center, width = center - 0.5, width - 1
    if width == 0:
        return np.where(values > center, 1.0, 0.0)
    clipped: np.ndarray = np.clip((values - center) / width + 0.5, 0, 1)
    return clipped


def stretched(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Values from the least to the largest finite one of those that are ``counted``, onto 0 to 1."""
    inside = values[counted & np.isfinite(values)]
    if not inside.size:
        return np.zeros(values.shape)
    least, most = float(inside.min()), float(inside.max())
    shown: np.ndarray = np.clip(
        (np.nan_to_num(values, nan=least).astype(float) - least) / ((most - least) or 1.0), 0, 1
    )
    return shown


def is_named(name: str) -> bool:
    """Whether a file of this name is DICOM whatever its first bytes are."""
    return name.lower().endswith((".dcm", ".dicom"))


def facts(path: Path) -> dict[str, Any] | None:
    """Identifiers, number of frames and place in its series; None if the file is no DICOM image."""
    with open_file(path) as file:
        head, size = file.read(132), os.fstat(file.fileno()).st_size
        if head[128:] != b"DICM" and not is_named(path.name):
            return None
        header = _header(file, ("SOPClassUID", *_IDS.values(), *_PLACE))
    if head[128:] != b"DICM" and not any(header.get(keyword) for keyword in ("SOPClassUID", "Rows")):
        raise Unreadable("it is not a DICOM file")
    if "Rows" not in header:  # a report, a plan, a directory
        return None
    frames = max(1, int(header.get("NumberOfFrames") or 1))
    if frames > min(size, MOST_FRAMES):
        raise Unreadable("its header claims more frames than it can hold")
    ids = {name: str(header.get(keyword) or "").strip() for name, keyword in _IDS.items()}
    return {**ids, "frames": frames, "order": _order(header)}


def _header(file: BinaryIO, keywords: tuple[str, ...]) -> Dataset:
    """The elements named by ``keywords`` that stand before the pixels."""
    file.seek(0)
    return pydicom.dcmread(file, stop_before_pixels=True, force=True, specific_tags=list(keywords))


def _order(header: Dataset) -> float:
    """The place of a slice along the normal of its plane; elsewhere its number."""
    position, plane = header.get("ImagePositionPatient"), header.get("ImageOrientationPatient")
    if position and plane and len(position) == 3 and len(plane) == 6:
        axes = np.array(plane, dtype=float).reshape(2, 3)
        return round(float(np.cross(*axes) @ np.array(position, dtype=float)), 4)
    return float(header.get("InstanceNumber") or 0)


def pixels(path: Path, place: int, settings: Mapping[str, Any]) -> np.ndarray:
    """Frame ``place`` as uint8, grey ``(H, W)`` or RGB ``(H, W, 3)``.

    settings: ``window``, a center and a width that replace the file's.

    Raises:
        Unreadable: the pixels cannot be decoded; the text names the package that could.
    """
    with open_file(path) as file:
        header = _header(file, _SHOWN)
        _check_size(header)
        syntax = _syntax(header)
        frame = _attempted(lambda: _decoded(file, header, syntax, place), syntax)
    colored = _colors(frame, header)
    return _grey(frame, _of_frame(header, place), settings.get("window")) if colored is None else colored


def _colors(frame: np.ndarray, header: Dataset) -> np.ndarray | None:
    """A frame's colors as RGB (H, W, 3) in 8 bits; None of a grey frame."""
    if header.get("SamplesPerPixel", 1) == 3:
        eight: np.ndarray = (frame >> max(0, int(header.get("BitsStored") or 8) - 8)).astype(np.uint8)
        return eight
    if header.get("PhotometricInterpretation") == "PALETTE COLOR":
        found: np.ndarray = apply_color_lut(frame, header)
        return (found >> 8).astype(np.uint8) if found.dtype == np.uint16 else found
    return None


def _syntax(header: Dataset) -> UID:
    given = header.file_meta.get("TransferSyntaxUID")
    if given:
        return UID(given)
    implicit, little = header.original_encoding
    return ImplicitVRLittleEndian if implicit else ExplicitVRLittleEndian if little else ExplicitVRBigEndian


def _check_size(header: Dataset) -> None:
    """Raise Unreadable if there are no pixels, or too many."""
    sides = [int(header.get(name) or 0) for name in ("Rows", "Columns")]
    size = sides[0] * sides[1] * int(header.get("SamplesPerPixel") or 1) * (int(header.get("BitsAllocated") or 8) // 8)
    if min(sides) < 1:
        raise Unreadable("its image has no pixels")
    if size > MOST_BYTES:
        raise Unreadable(f"its header claims {size / 1e9:,.1f} GB for one image; at most 0.5 GB are read")


def _decoded(file: BinaryIO, header: Dataset, syntax: UID, place: int) -> np.ndarray:
    index = place if int(header.get("NumberOfFrames") or 1) > 1 else None
    if syntax != DeflatedExplicitVRLittleEndian:
        try:
            frame: np.ndarray = pixel_array(file, index=index, transfer_syntax_uid=syntax)
            return frame
        except (ValueError, KeyError, AttributeError):  # of files that mix encodings, which the other way copes with
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise
    file.seek(0)
    whole: np.ndarray = pixel_array(pydicom.dcmread(file, force=True), index=index)
    return whole


def _attempted(decode: Callable[[], np.ndarray], syntax: UID) -> np.ndarray:
    """What ``decode`` returns. Raises Unreadable if it cannot: the text names the package that could."""
    try:
        return decode()
    except MemoryError:
        raise
    except Exception as error:
        raise Unreadable(_advice(syntax, error)) from error


def _advice(syntax: UID, error: Exception) -> str:
    if syntax.is_private or not syntax.is_transfer_syntax:  # its text may be anything
        return "its pixels are in a private or unknown format; export it uncompressed"
    if not isinstance(error, (RuntimeError, NotImplementedError)) or not syntax.is_compressed:
        return "its pixels cannot be decoded; the file is damaged"
    compressed = f"its pixels are compressed as {syntax.name}"
    package, module = PACKAGES.get(syntax, ("", ""))
    if package and importlib.util.find_spec(module) is None:
        return f"{compressed}; install {package}"
    tool = "DCMTK, as in: dcmdjpeg" if syntax in _JPEG else "GDCM, as in: gdcmconv --raw"
    return f"{compressed} and cannot be decoded here; decompress them with {tool} FILE NEW"


def _of_frame(header: Dataset, place: int) -> Dataset:
    """The header with the rescaling and the window of a frame's functional groups."""
    shared, own = header.get("SharedFunctionalGroupsSequence"), header.get("PerFrameFunctionalGroupsSequence")
    groups = [*(shared or [])[:1], *(own or [])[place : place + 1]]
    for group in groups:
        for sequence, keywords in _OF_FRAMES.items():
            for item in (group.get(sequence) or [])[:1]:
                for keyword in keywords:
                    if keyword in item:
                        header[keyword] = item[keyword]
    return header


def _grey(frame: np.ndarray, header: Dataset, window: tuple[float, float] | None) -> np.ndarray:
    """A grey frame (H, W) by its window, by its table, by its `bounds`, or from its least to its largest value."""
    values = apply_modality_lut(frame, header)
    if window is not None:
        shown = windowed(values, *window)
    elif header.get("VOILUTSequence"):
        table = header.VOILUTSequence[0]
        shown = apply_voi(values, header) / (2.0 ** int(table.LUTDescriptor[2]) - 1)
    elif header.get("WindowCenter") is not None and header.get("WindowWidth") is not None:
        center, width = (float(np.atleast_1d(header[name].value)[0]) for name in ("WindowCenter", "WindowWidth"))
        function = str(header.get("VOILUTFunction") or "LINEAR").upper()
        if function not in _FUNCTIONS:
            raise Unreadable("its VOI LUT function is unknown; give a window with window=center,width")
        shown = windowed(values, center, width, function)
    elif int(header.get("BitsStored") or 16) <= 8 and not header.get("PixelRepresentation") and values is frame:
        shown = values / (2.0 ** int(header.BitsStored) - 1)
    elif not header.get("PixelRepresentation") and values is frame and "PixelPaddingValue" not in header:
        shown = values / bounds(values)[1]
    else:
        shown = stretched(values, frame != header.get("PixelPaddingValue"))
    grey = in_eight_bits(shown)
    dark = header.get("PhotometricInterpretation") == "MONOCHROME1" or header.get("PresentationLUTShape") == "INVERSE"
    shown_so: np.ndarray = 255 - grey if dark else grey
    return shown_so
