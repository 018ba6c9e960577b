"""DICOM files with the pixels of another file, what they are shown by, and nothing else of it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.pixels import pixel_array
from pydicom.uid import UID, ExplicitVRLittleEndian, SecondaryCaptureImageStorage

from promptfed.shared.data.medical import dicom
from promptfed.shared.data.medical.unreadable import Unreadable

_NUMBERS = ("PixelPaddingValue", "RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth")
_CODES: Mapping[str, tuple[str, ...]] = {
    "VOILUTFunction": dicom.FUNCTIONS,
    "PresentationLUTShape": ("IDENTITY", "INVERSE"),
}
_FLOATS = {np.dtype(np.float32): "FloatPixelData", np.dtype(np.float64): "DoubleFloatPixelData"}


def stripped(whole: Dataset, most: int) -> bytes:
    """A file that `dicom.pixels` shows as the file of ``whole``.

    Pixels are decoded and stored anew, since compressed ones can have comments, and others bytes behind them.

    Raises:
        Unreadable: they cannot be decoded, or take more than ``most`` bytes.
    """
    dicom.check_size(whole)
    syntax, count = UID(whole.file_meta.TransferSyntaxUID), max(1, int(whole.get("NumberOfFrames") or 1))
    kept, pixels = Dataset(), bytearray()
    for place in range(count):
        frame = dicom.decoded(lambda at=place: pixel_array(whole, index=at if count > 1 else None), syntax)  # type: ignore[misc]
        shown = dicom.colors(frame, whole)
        frame = frame.astype(frame.dtype.newbyteorder("<")) if shown is None else shown[..., :3]
        if place == 0:
            _describe(kept, whole, frame)
        pixels += frame.tobytes()
        if len(pixels) > most:
            raise Unreadable(f"its images take more than {most / 1e9:.1f} GB")
    if count > 1:
        kept.NumberOfFrames = count
    return _file(kept, pixels, frame.dtype)


def _describe(kept: Dataset, whole: Dataset, frame: np.ndarray) -> None:
    """Put into ``kept`` how frames like ``frame`` are stored, and by what of ``whole`` they are shown."""
    kept.Rows, kept.Columns = frame.shape[:2]
    kept.SamplesPerPixel = frame.shape[2] if frame.ndim == 3 else 1
    kept.BitsAllocated = kept.BitsStored = 8 * frame.dtype.itemsize
    if frame.ndim == 3:
        kept.PhotometricInterpretation, kept.PlanarConfiguration, kept.PixelRepresentation = "RGB", 0, 0
    else:
        dark = whole.get("PhotometricInterpretation") == "MONOCHROME1"
        kept.PhotometricInterpretation = "MONOCHROME1" if dark else "MONOCHROME2"
        if frame.dtype.kind != "f":
            kept.BitsStored = min(kept.BitsAllocated, int(whole.get("BitsStored") or kept.BitsAllocated))
            kept.PixelRepresentation = int(frame.dtype.kind == "i")
        _copy(kept, whole, (*_NUMBERS, *_CODES))
        _copy_sequences(kept, whole)
    kept.HighBit = kept.BitsStored - 1


def _copy(kept: Dataset, given: Dataset, keywords: tuple[str, ...]) -> None:
    """Copy numbers, of several the first, and codes, of which others than the known ones become UNKNOWN."""
    for keyword in keywords:
        value: Any = given.get(keyword)
        if value is None:
            continue
        if keyword in _CODES:
            code = str(value).upper()
            setattr(kept, keyword, code if code in _CODES[keyword] else "UNKNOWN")
        else:
            kept.add(given[keyword])
            kept[keyword].value = np.atleast_1d(value)[0]


def _copy_sequences(kept: Dataset, whole: Dataset) -> None:
    """Copy tables, and what counts of the functional groups of frames."""
    for sequence in ("ModalityLUTSequence", "VOILUTSequence"):
        if whole.get(sequence):
            setattr(kept, sequence, [_table(whole[sequence].value[0])])
    for sequence in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        groups = []
        for group in whole.get(sequence) or []:
            own = Dataset()
            for name, keywords in dicom.OF_FRAMES.items():
                for item in (group.get(name) or [])[:1]:
                    setattr(own, name, [Dataset()])
                    _copy(own[name].value[0], item, keywords)
            groups.append(own)
        if groups:
            setattr(kept, sequence, groups)


def _table(item: Dataset) -> Dataset:
    """A table's numbers, as many as it says."""
    kept = Dataset()
    kept.add(item["LUTDescriptor"])
    kept.add(item["LUTData"])
    count = int(item.LUTDescriptor[0]) or 1 << 16
    kept["LUTData"].value = item.LUTData[: 2 * count if isinstance(item.LUTData, bytes) else count]
    return kept


def _file(kept: Dataset, pixels: bytearray, kind: np.dtype[Any]) -> bytes:
    """The file of ``kept`` with ``pixels`` of a ``kind``."""
    kept.SOPClassUID, kept.SOPInstanceUID = SecondaryCaptureImageStorage, "2.25.1"  # of no image in particular
    kept.file_meta = FileMetaDataset()
    kept.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    pixels += bytes(len(pixels) % 2)
    setattr(kept, _FLOATS.get(kind, "PixelData"), bytes(pixels))
    stream = io.BytesIO()
    kept.save_as(stream, enforce_file_format=True)
    return stream.getvalue()
