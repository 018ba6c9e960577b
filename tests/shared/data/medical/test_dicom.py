"""One DICOM file: its facts, and its pixels as they are shown, against pydicom's own or by hand."""

# ruff: noqa: E402 - the rest needs pydicom
from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pydicom = pytest.importorskip("pydicom", reason="DICOM files: pip install '.[medical]'")
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset
from pydicom.pixels import apply_modality_lut, apply_voi_lut
from pydicom.sequence import Sequence

from promptfed.shared.data.errors import Unreadable
from promptfed.shared.data.medical import dicom
from promptfed.shared.data.medical.dicom import pixels, windowed
from promptfed.shared.data.medical.phantoms import CLASSES, dataset, scan, write_patients

DRAWS = np.random.default_rng(5)


def save(data: Dataset, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)
    return path


def table(folder: Path, *rows: list[str]) -> str:
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return f"dicom:{folder}"


def literal(path: Path | str) -> np.ndarray:
    """pydicom's own modality and VOI transformations, from their range onto 0 to 255."""
    data = pydicom.dcmread(path)
    values = apply_modality_lut(data.pixel_array, data)
    low, high = (-(1 << data.BitsStored - 1), (1 << data.BitsStored - 1) - 1)
    if not data.PixelRepresentation:
        low, high = 0, (1 << data.BitsStored) - 1
    slope, intercept = float(data.get("RescaleSlope", 1)), float(data.get("RescaleIntercept", 0))
    shown = (apply_voi_lut(values, data) - (low * slope + intercept)) / ((high - low) * slope)
    return np.floor(np.clip(shown, 0, 1) * 255 + 0.5)


@pytest.mark.parametrize("function", [None, "LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize(("center", "width"), [(40, 400), (-600.5, 1500), (1024, 1), (0.5, 2)])
def test_windows_equal_pydicoms(tmp_path: Path, function: str | None, center: float, width: float) -> None:
    data = dataset(scan("nodule", DRAWS), "a")
    data.RescaleSlope, data.RescaleIntercept, data.WindowCenter, data.WindowWidth = 1, -1024, center, width
    if function:
        data.VOILUTFunction = function
    path = save(data, tmp_path / "a.dcm")
    assert np.abs(pixels(path, 0, {}).astype(float) - literal(path)).max() <= 1
    assert pixels(path, 0, {}).std() > 0 or width == 1


def test_frames_have_windows_of_their_own(tmp_path: Path) -> None:
    values = np.stack([scan("clear", DRAWS)] * 2)
    data = dataset(values, "a")
    groups = []
    for center in (1000, 1500):
        window, group = Dataset(), Dataset()
        window.WindowCenter, window.WindowWidth = center, 200
        group.FrameVOILUTSequence = Sequence([window])
        groups.append(group)
    data.PerFrameFunctionalGroupsSequence = Sequence(groups)
    path = save(data, tmp_path / "a.dcm")
    for place, center in enumerate((1000, 1500)):
        expected = np.floor(windowed(values[place], center, 200) * 255 + 0.5)
        assert np.array_equal(pixels(path, place, {}), expected)


def test_palettes_give_pydicoms_colors() -> None:
    path = get_testdata_file("examples_palette.dcm")
    data = pydicom.dcmread(path)
    colors = pydicom.pixels.apply_color_lut(data.pixel_array, data)
    expected = colors >> 8 if colors.dtype == np.uint16 else colors
    assert np.array_equal(pixels(Path(path), 0, {}), expected)


def test_shares_of_white_are_rounded_to_levels() -> None:
    shares = [np.nan, -1, 0, 0.49 / 255, 0.5 / 255, 100.4 / 255, 1, 2, np.inf]
    assert dicom.in_eight_bits(np.array(shares)).tolist() == [0, 0, 0, 0, 1, 100, 255, 255, 255]


@pytest.mark.parametrize(("center", "width", "function", "values", "shown"), [
    (100, 11, "LINEAR", [94, 94.5, 99.5, 100.5, 104.5, 105], [0, 0, 0.5, 0.6, 1, 1]),
    (100, 1, "LINEAR", [99, 99.5, 99.6], [0, 0, 1]),
    (100, 10, "LINEAR_EXACT", [94, 95, 100, 101, 105, 106], [0, 0, 0.5, 0.6, 1, 1]),
    (100, 0.5, "LINEAR_EXACT", [99.75, 100, 100.25], [0, 0.5, 1]),
    (100, 4, "SIGMOID", [99, 100, 101], [1 / (1 + np.e), 0.5, 1 / (1 + np.exp(-1))]),
    (0, 4, "SIGMOID", [-1e6, -700, 700, 1e6], [0, 0, 1, 1]), (100, 0.99, "LINEAR", [0], None),
    (100, 1e-12, "LINEAR_EXACT", [99, 100, 101], [0, 0.5, 1]), (100, 0.9e-12, "LINEAR_EXACT", [0], None),
    (100, 0, "SIGMOID", [0], None),
])  # fmt: skip
def test_a_window_is_a_ramp_or_a_sigmoid(
    center: float, width: float, function: str, values: list[float], shown: list[float] | None
) -> None:
    if shown is None:
        with pytest.raises(Unreadable, match="its window has no width"):
            windowed(np.array(values), center, width, function)
    else:
        with np.errstate(over="raise"):
            assert windowed(np.array(values), center, width, function) == pytest.approx(shown, abs=1e-9)


@pytest.mark.parametrize(("values", "counted", "shown"), [
    ([1, 2, 5], [True] * 3, [0, 0.25, 1]), ([-3, 2, 5], [True, True, False], [0, 1, 1]),
    ([-3, 2, 5], [False, True, True], [0, 0, 1]), ([4, 4, 5], [True, True, False], [0, 0, 1]),
    ([np.nan, 2, 4, np.inf, 3], [True] * 5, [0, 0, 1, 1, 0.5]), ([np.nan, 1], [True, False], [0, 0]),
])  # fmt: skip
def test_values_are_stretched_between_those_that_count(
    values: list[float], counted: list[bool], shown: list[float]
) -> None:
    assert dicom.stretched(np.array(values), np.array(counted)).tolist() == shown


TABLE = Dataset()
TABLE.LUTDescriptor = [256, 0, 10]
TABLE.add_new("LUTData", "OW", np.arange(1023, -1, -4, dtype="<u2").tobytes())
SMALL = Dataset()
SMALL.LUTDescriptor = [4, 0, 8]
SMALL.add_new("LUTData", "OW", np.array([0, 10, 130, 255], dtype="<u2").tobytes())
EXACT = {"WindowCenter": 100, "WindowWidth": 10}
GREYS: list[tuple[str, list[float], dict[str, Any], Any, Any]] = [
    ("u1", [0, 7, 255], {}, None, [0, 7, 255]),
    ("u1", [0, 7, 255], {"PhotometricInterpretation": "MONOCHROME1"}, None, [255, 248, 0]),
    ("u1", [0, 7, 255], {"PresentationLUTShape": "INVERSE"}, None, [255, 248, 0]),
    ("u1", [0, 127], {"BitsStored": 7}, None, [0, 255]),
    ("u1", [9, 7, 8], {"PixelPaddingValue": 9}, None, [9, 7, 8]),
    ("i1", [-10, 0, 10], {"PixelRepresentation": 1}, None, [0, 128, 255]),
    ("u1", [10, 20, 30], {"RescaleSlope": 2, "RescaleIntercept": 5}, None, [0, 128, 255]),
    ("u2", [0, 2048, 4095], {}, None, [0, 128, 255]),
    ("u2", [0, 3, 509], {"BitsStored": 9}, None, [0, 1, 254]),
    ("u2", [4000, 100, 200, 300], {"PixelPaddingValue": 4000}, None, [255, 0, 128, 255]),
    ("i2", [-300, 0, 300], {"PixelRepresentation": 1}, None, [0, 128, 255]),
    ("u2", [100, 200, 300], {"RescaleSlope": 2, "RescaleIntercept": 5}, None, [0, 128, 255]),
    ("u2", [95, 101, 105], {**EXACT, "VOILUTFunction": "Linear_exact"}, None, [0, 153, 255]),
    ("u2", [95, 100, 105], {"WindowCenter": [100, 1], "WindowWidth": [11, 1]}, None, [13, 140, 255]),
    ("u2", [0, 2048, 4095], {"WindowCenter": 100}, None, [0, 128, 255]),
    ("u2", [0, 2048, 4095], {"WindowWidth": 100}, None, [0, 128, 255]),
    ("u2", [95, 100, 105], {"WindowCenter": 1, "WindowWidth": 1}, [100, 11], [13, 140, 255]),
    ("u1", [0, 100, 255], {"VOILUTSequence": [TABLE]}, None, [255, 155, 1]),
    ("u1", [0, 1, 2, 3], {"VOILUTSequence": [SMALL]}, None, [0, 10, 130, 255]),
    ("u1", [95, 100, 105], {"VOILUTSequence": [TABLE]}, [100, 11], [13, 140, 255]),
    ("u1", [0], {**EXACT, "VOILUTFunction": "LOG"}, None, "its VOI LUT function is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "header", "window", "shown"), GREYS)
def test_grey_pixels_are_shown_by_the_first_that_is_known(
    tmp_path: Path, kind: str, values: list[float], header: dict[str, Any], window: Any, shown: Any
) -> None:
    data = dataset(np.array([values], dtype=kind).view("u" + kind[1:]), "a")
    for keyword, value in header.items():
        setattr(data, keyword, value)
    path, settings = save(data, tmp_path / "a.dcm"), {} if window is None else {"window": window}
    if isinstance(shown, str):
        with pytest.raises(Unreadable, match=shown):
            pixels(path, 0, settings)
    else:
        assert pixels(path, 0, settings).tolist() == [shown]


def test_colours_keep_their_highest_eight_bits() -> None:
    header, frame = Dataset(), np.array([[[0, 16, 4095]]], dtype=np.uint16)
    header.SamplesPerPixel = 3
    for bits, shown in ((12, [0, 1, 255]), (None, [0, 16, 255]), (7, [0, 16, 255])):
        header.BitsStored = bits
        colours = dicom._colors(frame, header)
        assert (colours.dtype, colours.tolist()) == (np.uint8, [[shown]])
    header.SamplesPerPixel = 1
    assert dicom._colors(frame, header) is None


def test_colours_of_a_file_are_read(tmp_path: Path) -> None:
    values = DRAWS.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    assert np.array_equal(pixels(save(dataset(values, "a"), tmp_path / "a.dcm"), 0, {}), values)


@pytest.mark.parametrize(
    ("implicit", "little", "name"),
    [(True, True, "Implicit VR Little"), (False, True, "Explicit VR Little"), (False, False, "Explicit VR Big")],
)
def test_an_encoding_that_is_not_named_is_that_of_the_header(
    tmp_path: Path, implicit: bool, little: bool, name: str
) -> None:
    data = dataset(np.array([[1, 300]], dtype="<u2" if little else ">u2"), "a")
    data["PixelData"].VR = "OW"
    del data.file_meta.TransferSyntaxUID
    data.save_as(tmp_path / "a.dcm", implicit_vr=implicit, little_endian=little, enforce_file_format=False)
    assert dicom._syntax(pydicom.dcmread(tmp_path / "a.dcm", force=True)).name.startswith(name)
    data.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.5"
    assert dicom._syntax(data) == "1.2.840.10008.1.2.5"


@pytest.mark.parametrize(("sides", "samples", "bits", "says"), [
    ((4, 5), 3, 16, ""), ((4, 5), 3, 24, "its header claims 0.0 GB for one image; at most 0.5 GB are read"),
    ((12, 10), None, None, ""), ((11, 11), None, None, "its header claims"), ((1, 1), 1, 8, ""),
    ((0, 9), 1, 8, "its image has no pixels"), ((9, None), 1, 8, "its image has no pixels"),
])  # fmt: skip
def test_an_image_has_pixels_and_not_too_many(
    monkeypatch: pytest.MonkeyPatch, sides: Any, samples: int | None, bits: int | None, says: str
) -> None:
    monkeypatch.setattr(dicom, "MOST_BYTES", 120)
    header = Dataset()
    header.Rows, header.Columns, header.SamplesPerPixel, header.BitsAllocated = *sides, samples, bits
    told = ""
    try:
        dicom._check_size(header)
    except Unreadable as error:
        told = str(error)
    assert told.startswith(says)
    assert bool(told) == bool(says)


JPEG, JPEG_LS, JPEG_2000, PLAIN = (
    "1.2.840.10008.1.2.4.70",
    "1.2.840.10008.1.2.4.80",
    "1.2.840.10008.1.2.4.90",
    "1.2.840.10008.1.2",
)


@pytest.mark.parametrize(("syntax", "error", "installed", "says"), [
    ("1.2.3.4", RuntimeError(), False, "its pixels are in a private or unknown format; export it uncompressed"),
    ("1.2.840.10008.1.1", RuntimeError(), False, "its pixels are in a private or unknown format"),
    (PLAIN, RuntimeError(), False, "its pixels cannot be decoded; the file is damaged"),
    (JPEG, ValueError(), False, "its pixels cannot be decoded; the file is damaged"),
    (JPEG, NotImplementedError(), False, "; install python-gdcm"),
    (JPEG_LS, RuntimeError(), False, "; install pyjpegls"),
    (JPEG, RuntimeError(), True, "cannot be decoded here; decompress them with DCMTK, as in: dcmdjpeg FILE NEW"),
    (JPEG_2000, RuntimeError(), False, "decompress them with GDCM, as in: gdcmconv --raw FILE NEW"),
])  # fmt: skip
def test_pixels_that_cannot_be_decoded_have_advice(
    monkeypatch: pytest.MonkeyPatch, syntax: str, error: Exception, installed: bool, says: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)

    def failing() -> Any:
        raise error

    with pytest.raises(Unreadable) as caught:
        dicom._attempted(failing, pydicom.uid.UID(syntax))
    assert says in str(caught.value)


def test_a_lack_of_memory_is_not_taken_for_damage() -> None:
    def failing() -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        dicom._attempted(failing, pydicom.uid.UID(PLAIN))


def test_deflated_files_and_mixed_encodings_are_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    data = dataset(values, "a")
    plain = save(data, tmp_path / "plain.dcm")
    data.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    for path in (plain, save(data, tmp_path / "deflated.dcm")):
        assert np.array_equal(pixels(path, 1, {}), values[1])
    real, asked = dicom.pixel_array, []

    def refusing(given: Any, **options: Any) -> Any:
        asked.append(options)
        if not isinstance(given, Dataset):
            raise KeyError("mixed")
        return real(given, **options)

    monkeypatch.setattr(dicom, "pixel_array", refusing)
    assert np.array_equal(pixels(plain, 2, {}), values[2])
    assert [one["index"] for one in asked] == [2, 2]
    monkeypatch.setattr(dicom, "MOST_BYTES", plain.stat().st_size)
    assert np.array_equal(pixels(plain, 2, {}), values[2])
    monkeypatch.setattr(dicom, "MOST_BYTES", plain.stat().st_size - 1)
    with pytest.raises(Unreadable, match="cannot be decoded"):
        pixels(plain, 2, {})


def test_a_frames_own_group_replaces_what_frames_share() -> None:
    def group(**sequences: dict[str, float]) -> Dataset:
        whole = Dataset()
        for name, values in sequences.items():
            item = Dataset()
            for keyword, value in values.items():
                setattr(item, keyword, value)
            setattr(whole, name, [item, Dataset()])
        return whole

    shared = group(
        FrameVOILUTSequence={"WindowCenter": 1, "WindowWidth": 2}, PixelValueTransformationSequence={"RescaleSlope": 5}
    )
    own = [group(FrameVOILUTSequence={"WindowCenter": 10 + k, "Rows": 7}) for k in range(2)]
    shown = []
    for place, both in (
        (0, (shared, own)),
        (1, (shared, own)),
        (2, (shared, own)),
        (1, (None, own)),
        (0, (shared, None)),
    ):
        header = Dataset()
        header.WindowWidth = 3
        if both[0] is not None:
            header.SharedFunctionalGroupsSequence = [both[0], group(FrameVOILUTSequence={"WindowWidth": 9})]
        if both[1] is not None:
            header.PerFrameFunctionalGroupsSequence = both[1]
        found = dicom._of_frame(header, place)
        shown.append([found.get(name) for name in ("WindowCenter", "WindowWidth", "RescaleSlope", "Rows")])
    wanted = [[10, 2, 5, None], [11, 2, 5, None], [1, 2, 5, None], [11, 3, None, None], [1, 2, 5, None]]
    assert shown == wanted


@pytest.mark.parametrize(("header", "order"), [
    ({}, 0.0), ({"InstanceNumber": 7}, 7.0), ({"InstanceNumber": 7, "ImagePositionPatient": [1, 2, 3]}, 7.0),
    ({"InstanceNumber": 7, "ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}, 7.0),
    ({"InstanceNumber": 7, "ImagePositionPatient": [1, 2], "ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}, 7.0),
    ({"InstanceNumber": 7, "ImagePositionPatient": [1, 2, 3], "ImageOrientationPatient": [1, 0, 0]}, 7.0),
    ({"ImagePositionPatient": [1, 2, 1.00005], "ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}, 1.0001),
    ({"ImagePositionPatient": [3, 4, 5], "ImageOrientationPatient": [0, 1, 0, 0, 0, 1]}, 3.0),
    ({"ImagePositionPatient": [3, 4, 5], "ImageOrientationPatient": [0, 0, 1, 0, 1, 0]}, -3.0),
])  # fmt: skip
def test_a_slice_is_placed_along_its_normal_or_by_its_number(header: dict[str, Any], order: float) -> None:
    data = Dataset()
    for keyword, value in header.items():
        setattr(data, keyword, value)
    assert dicom._order(data) == pytest.approx(order, abs=1e-9)


def test_facts_are_those_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(np.zeros((3, 2, 2), dtype=np.uint8), " p1 ", 9, "1.2", "3.4")
    data.AccessionNumber = "acc"
    ids = {"patient": "p1", "study": "3.4", "series": "1.2", "sop": data.SOPInstanceUID, "accession": "acc"}
    path = save(data, tmp_path / "scan")
    assert dicom.facts(path) == {**ids, "frames": 3, "order": 9.0}
    bare = tmp_path / "bare.DICOM"
    bare.write_bytes(path.read_bytes()[132:])
    assert dicom.facts(bare) == {**ids, "frames": 3, "order": 9.0}
    assert dicom.facts(bare.rename(tmp_path / "bare.txt")) is None
    for frames, says in (("5", None), ("0", None), ("6", "its header claims more frames than it can hold")):
        monkeypatch.setattr(dicom, "MOST_FRAMES", 5)
        data.NumberOfFrames = frames
        save(data, path)
        if says is None:
            assert (dicom.facts(path) or {})["frames"] == max(1, int(frames))
        else:
            with pytest.raises(Unreadable, match=says):
                dicom.facts(path)
    monkeypatch.setattr(dicom, "MOST_FRAMES", 9000)
    size = path.stat().st_size
    for more in (0, 2):
        data.NumberOfFrames = str(size + 2 + more)
        save(data, path)
        assert path.stat().st_size == size + 2
        if not more:
            assert (dicom.facts(path) or {})["frames"] == size + 2
    with pytest.raises(Unreadable, match="more frames"):
        dicom.facts(path)


def test_a_file_without_an_image_has_no_facts(tmp_path: Path) -> None:
    data = dataset(np.zeros((2, 2), dtype=np.uint8), "a")
    del data.PixelData, data.Rows
    assert dicom.facts(save(data, tmp_path / "report")) is None
    bare = tmp_path / "report.dcm"
    bare.write_bytes((tmp_path / "report").read_bytes()[132:])
    assert dicom.facts(bare) is None
    bare.write_bytes(b"no DICOM at all" * 40)
    with pytest.raises(Unreadable, match="it is not a DICOM file"):
        dicom.facts(bare)


# Drawn scans: the means of 4 x 4 squares, from the stored 0 of -1024. The things lie in the middle.
BODY = [39, 462, 487, 51, 422, 1027, 1025, 487, 443, 1021, 1026, 505, 49, 527, 547, 64]
THINGS = {
    "clear": {},
    "nodule": {6: 1065, 10: 1123},
    "line": {2: 696, 3: 98, 6: 1157, 10: 1158, 13: 671, 14: 605},
    "stripes": {4: 667, 5: 1140, 6: 1138, 7: 716, 8: 878, 9: 1218, 10: 1223, 11: 912},
}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_drawn_scan_stays_the_same(kind: str) -> None:
    values = scan(kind, np.random.default_rng(3)).astype(float)
    squares = [THINGS[kind].get(place, level) for place, level in enumerate(BODY)]
    assert values.reshape(4, 16, 4, 16).mean((1, 3)).reshape(-1).tolist() == pytest.approx(squares, abs=1)
    assert (values[:4, :4].min(), values[28:36, 28:36].std() > 20) == (0, True)


@pytest.mark.parametrize("seed", [2, 3])
def test_drawn_patients_have_a_series_each(tmp_path: Path, seed: int) -> None:
    root = write_patients(tmp_path / "a" / "b", 2, 3, seed, "Q", 16)
    files = sorted(root.rglob("*.dcm"))
    assert [str(path.relative_to(root)) for path in files] == [f"Q000{k}/000{n}.dcm" for k in (0, 1) for n in (1, 2, 3)]
    data = [pydicom.dcmread(path) for path in files]
    assert [one.InstanceNumber for one in data] == [1, 2, 3] * 2
    assert [one.PatientID for one in data] == ["Q0000"] * 3 + ["Q0001"] * 3
    assert {one.PhotometricInterpretation for one in data} == {"MONOCHROME1" if seed % 2 else "MONOCHROME2"}
    assert len({one.SeriesInstanceUID for one in data}) == len({one.StudyInstanceUID for one in data}) == 2
    facts = (
        "Rows",
        "BitsAllocated",
        "BitsStored",
        "HighBit",
        "PixelRepresentation",
        "RescaleSlope",
        "RescaleIntercept",
    )
    assert {tuple(one[name].value for name in facts) for one in data} == {(16, 16, 12, 11, 0, 1, -1024)}
    assert {(one.WindowCenter, one.WindowWidth) for one in data} == {(40, 1600)}
    with (root / "labels.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["SOPInstanceUID"] for row in rows] == [one.SOPInstanceUID for one in data]
    assert write_patients(tmp_path / "a" / "b", 1, 1, seed, "Q", 16) == root


@pytest.mark.parametrize(("shape", "frames", "samples", "sides", "kind"), [
    ((2, 5), None, 1, (2, 5), "MONOCHROME2"), ((4, 2, 5), 4, 1, (2, 5), "MONOCHROME2"),
    ((2, 5, 3), None, 3, (2, 5), "RGB"), ((2, 3, 4), 2, 1, (3, 4), "MONOCHROME2"),
])  # fmt: skip
def test_a_drawn_header_is_of_its_pixels(shape: Any, frames: Any, samples: int, sides: Any, kind: str) -> None:
    data = dataset(np.zeros(shape, dtype=np.uint8), "p", 4, "1.2", "3.4")
    assert (data.get("NumberOfFrames"), data.SamplesPerPixel, (data.Rows, data.Columns)) == (frames, samples, sides)
    assert (data.PhotometricInterpretation, data.get("PlanarConfiguration")) == (kind, 0 if samples == 3 else None)
    assert (data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation) == (8, 8, 7, 0)
    assert (data.SeriesInstanceUID, data.StudyInstanceUID, data.InstanceNumber) == ("1.2", "3.4", 4)
    assert dataset(np.zeros(shape, dtype=np.uint16), "p").BitsStored == 12
