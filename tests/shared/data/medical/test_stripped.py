"""Files of a PACS as they are kept: the same pixels under every window, and nothing else of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.shared.data.medical.test_dicom import DRAWS, decoded, packaged, save
from tests.shared.data.medical.test_planted import leaks

pydicom = pytest.importorskip("pydicom", reason="DICOM files: pip install '.[medical]'")
from pydicom.dataset import Dataset  # noqa: E402
from pydicom.encaps import encapsulate  # noqa: E402
from pydicom.uid import JPEGBaseline8Bit  # noqa: E402

from promptfed.shared.data.medical.dicom import facts, pixels  # noqa: E402
from promptfed.shared.data.medical.phantoms import dataset  # noqa: E402
from promptfed.shared.data.medical.stripped import stripped  # noqa: E402
from promptfed.shared.data.medical.unreadable import Unreadable  # noqa: E402

MOST = 1 << 26


def test_packaged_files_are_shown_as_before(tmp_path: Path) -> None:
    compared = 0
    for path in packaged():
        told = facts(path, {}) if decoded(path) is not None else None
        if told is None:
            continue
        kept = tmp_path / "kept.dcm"
        kept.write_bytes(stripped(pydicom.dcmread(path), MOST))
        assert (facts(kept, {}) or {})["frames"] == told["frames"], path.name
        for place in {0, told["frames"] - 1}:
            for settings in ({}, {"window": [300, 900]}):
                assert np.array_equal(pixels(kept, place, settings), pixels(path, place, settings)), path.name
        compared += 1
    assert compared > 70


SECRET = "QX4711ZK"


def in_high_bits() -> Dataset:
    """Overlays of old files lie in the bits that pixels leave, and some writers put more behind the pixels."""
    values = DRAWS.integers(0, 4096, (16, 16)).astype(np.uint16)
    data = dataset(values | 0x5000, "p")
    data.PixelData = (values | 0x5000).tobytes() + SECRET.encode()
    return data


def in_a_comment() -> Dataset:
    values = DRAWS.integers(0, 256, (16, 16), dtype=np.uint8)
    data, stream = dataset(values, "p"), io.BytesIO()
    Image.fromarray(values).save(stream, "JPEG", comment=SECRET.encode(), quality=95)
    data.file_meta.TransferSyntaxUID, data.PixelData = JPEGBaseline8Bit, encapsulate([stream.getvalue()])
    data["PixelData"].VR = "OB"
    return data


def in_codes() -> Dataset:
    data = dataset(DRAWS.integers(0, 4096, (16, 16)).astype(np.uint16), "p")
    data.RescaleSlope, data.RescaleIntercept, data.RescaleType = 1, -1024, SECRET
    data.WindowCenter, data.WindowWidth, data.WindowCenterWidthExplanation = [40, 4711], [400, 4711], SECRET
    data.PresentationLUTShape = SECRET
    item = Dataset()
    item.LUTDescriptor, item.LUTExplanation = [16, 0, 8], SECRET
    item["LUTDescriptor"].VR = "US"
    item.add_new("LUTData", "OW", np.arange(16, dtype="<u2").tobytes() + SECRET.encode())
    data.VOILUTSequence = [item]
    return data


@pytest.mark.parametrize("planted", [in_high_bits, in_a_comment, in_codes])
def test_what_lies_beside_the_pixels_is_gone(tmp_path: Path, planted: Callable[[], Dataset]) -> None:
    path = save(planted(), tmp_path / "a.dcm")
    kept = stripped(pydicom.dcmread(path), MOST)
    assert leaks([SECRET], path.read_bytes()) == [SECRET]
    assert leaks([SECRET], kept) == []
    assert b"4711" not in kept
    (tmp_path / "kept.dcm").write_bytes(kept)
    assert np.array_equal(pixels(tmp_path / "kept.dcm", 0, {}), pixels(path, 0, {}))


def test_too_many_pixels_are_refused(tmp_path: Path) -> None:
    path = save(dataset(np.zeros((4, 64, 64), dtype=np.uint8), "p"), tmp_path / "a.dcm")
    with pytest.raises(Unreadable, match="take more than"):
        stripped(pydicom.dcmread(path), 3 * 64 * 64)
