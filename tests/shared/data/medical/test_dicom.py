"""``dicom:``: what is read of which files, windows, tables of labels, patients."""

# ruff: noqa: E402 - the rest needs pydicom
from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pydicom = pytest.importorskip("pydicom", reason="DICOM files: pip install '.[medical]'")
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.pixels import apply_modality_lut, apply_voi_lut
from pydicom.sequence import Sequence
from pydicom.uid import DeflatedExplicitVRLittleEndian, JPEG2000Lossless

from promptfed.client_service.privacy.protection import groups_of
from promptfed.shared.data import DataError, Source, open_source
from promptfed.shared.data import readers as reading
from promptfed.shared.data.image_files import image_digest
from promptfed.shared.data.medical.dicom import pixels, windowed
from promptfed.shared.data.medical.phantoms import dataset, scan, write_patients
from promptfed.shared.data.partition import grouped
from promptfed.shared.data.readers import Request, readers
from promptfed.shared.spec.spec import PrivacySpec

DRAWS = np.random.default_rng(5)


def save(data: Dataset, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)
    return path


def table(folder: Path, *rows: list[str]) -> str:
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return f"dicom:{folder}"


def images(source: Source) -> list[np.ndarray]:
    """Those of train and of test."""
    return [np.asarray(split.image(row)) for split in (source.train, source.test) for row in range(len(split))]


def refused(uri: str) -> DataError:
    with pytest.raises(DataError) as caught:
        open_source(uri)
    return caught.value


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


def test_windows_of_packaged_files_equal_pydicoms() -> None:
    compared = 0
    for path in packaged():
        values = decoded(path)
        if values is None or values.ndim != 2 or "WindowCenter" not in (data := pydicom.dcmread(path)):
            continue
        shown = pixels(path, 0, {}).astype(float)
        shown = 255 - shown if data.PhotometricInterpretation == "MONOCHROME1" else shown
        assert np.abs(shown - literal(path)).max() <= 1, path.name
        compared += 1
    assert compared >= 10


def test_a_table_of_values_is_applied(tmp_path: Path) -> None:
    data = dataset(np.arange(256, dtype=np.uint8).reshape(16, 16), "a")
    item = Dataset()
    item.LUTDescriptor, item.LUTData = [256, 0, 8], bytes(range(255, -1, -1))
    item["LUTData"].VR = "OW"
    item.LUTData = np.arange(255, -1, -1, dtype="<u2").tobytes()
    data.VOILUTSequence = Sequence([item])
    path = save(data, tmp_path / "a.dcm")
    assert np.array_equal(pixels(path, 0, {}), np.arange(255, -1, -1).reshape(16, 16))


def test_a_window_of_the_uri_replaces_the_files(tmp_path: Path) -> None:
    values = scan("line", DRAWS)
    data = dataset(values, "a")
    data.RescaleSlope, data.RescaleIntercept, data.WindowCenter, data.WindowWidth = 2, -1000, 5, 9
    path = save(data, tmp_path / "a.dcm")
    expected = np.clip((values * 2.0 - 1000 - 299.5) / 999 + 0.5, 0, 1)
    assert np.array_equal(pixels(path, 0, {"window": [300, 1000]}), np.floor(expected * 255 + 0.5))


def test_eight_bits_without_a_window_are_shown_as_they_are_and_monochrome1_is_inverted(tmp_path: Path) -> None:
    values = DRAWS.integers(0, 256, (20, 30), dtype=np.uint8)
    data = dataset(values, "a")
    assert np.array_equal(pixels(save(data, tmp_path / "a.dcm"), 0, {}), values)
    data.PhotometricInterpretation = "MONOCHROME1"
    assert np.array_equal(pixels(save(data, tmp_path / "b.dcm"), 0, {}), 255 - values)


def test_more_bits_without_a_window_go_from_the_least_to_the_largest_value_without_padding(tmp_path: Path) -> None:
    data = dataset(np.array([[4000, 100, 200, 300]], dtype=np.uint16), "a")
    data.PixelPaddingValue = 4000
    data["PixelPaddingValue"].VR = "US"
    assert pixels(save(data, tmp_path / "a.dcm"), 0, {}).tolist() == [[255, 0, 128, 255]]


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


def packaged() -> list[Path]:
    root = Path(pydicom.__file__).parent / "data" / "test_files"
    return sorted(path for path in root.rglob("*") if path.is_file())


def decoded(path: Path) -> np.ndarray | None:
    """What pydicom makes of a file's pixels."""
    try:
        return pydicom.dcmread(path).pixel_array
    except Exception:
        return None


COMPRESSED = {  # what packaged files need that promptfed[medical] does not install
    "1.2.840.10008.1.2.4.51": "dcmdjpeg",  # of 12 bits
    "1.2.840.10008.1.2.4.57": "install python-gdcm",
    "1.2.840.10008.1.2.4.70": "install python-gdcm",
    "1.2.840.10008.1.2.4.80": "install pyjpegls",
    "1.2.840.10008.1.2.4.81": "install pyjpegls",
    "1.2.840.10008.1.2.4.91": "gdcmconv",  # with a mark in the middle that ends it
}


def test_each_packaged_file_is_read_or_its_package_named() -> None:
    paths = packaged()
    assert len(paths) > 100
    facts = list(readers().each(Request("facts", str(path)) for path in paths))
    shown = list(readers().each(Request("pixels", str(path)) for path in paths))
    read, named = 0, set()
    for path, fact, answer in zip(paths, facts, shown, strict=True):
        if decoded(path) is not None:
            data = pydicom.dcmread(path)
            assert fact.facts is not None, path.name
            assert answer.image is not None, path.name
            assert answer.image.size == (data.Columns, data.Rows)
            read += 1
        elif answer.image is None and fact.facts is not None:
            syntax = pydicom.dcmread(path, force=True).file_meta.get("TransferSyntaxUID")
            assert COMPRESSED.get(syntax, "damaged") in (answer.error or ""), (path.name, syntax, answer.error)
            named.add(syntax)
    assert read >= 82
    assert len(named & set(COMPRESSED)) >= 3


def test_palettes_give_pydicoms_colors() -> None:
    path = get_testdata_file("examples_palette.dcm")
    data = pydicom.dcmread(path)
    colors = pydicom.pixels.apply_color_lut(data.pixel_array, data)
    expected = colors >> 8 if colors.dtype == np.uint16 else colors
    assert np.array_equal(pixels(Path(path), 0, {}), expected)


@pytest.fixture
def study(tmp_path: Path) -> tuple[Path, list[Dataset]]:
    """Two patients with two series of three slices, stored against their order; a pixel's value is the slice."""
    files = []
    for patient in "ab":
        for number in range(2):
            shared = {"series": pydicom.uid.generate_uid(), "study": f"1.2.{ord(patient)}"}
            for place in range(3):
                data = dataset(np.full((4, 4), 100 * number + 10 * place, dtype=np.uint8), patient, 3 - place, **shared)
                data.AccessionNumber = f"acc-{patient}"
                data.ImageOrientationPatient, data.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [0, 0, place]
                save(data, tmp_path / patient / f"{number}{2 - place}.dcm")
                files.append(data)
    return tmp_path, files


LEVELS = [
    ("SOPInstanceUID", "SOPInstanceUID", "", [0, 10, 20, 100, 110, 120]),
    ("SeriesInstanceUID", "SeriesInstanceUID", "level=series", [10, 110]),
    ("SeriesInstanceUID", "SeriesInstanceUID", "level=series&frames=all", [0, 10, 20, 100, 110, 120]),
    ("StudyInstanceUID", "StudyInstanceUID", "level=study&frames=2", [10, 110]),
    ("AccessionNumber", "AccessionNumber", "level=study", [100]),
    ("AccessionNumber", "AccessionNumber", "level=series", [10, 110]),
    ("PatientID", "PatientID", "level=series&frames=2", [0, 20, 100, 120]),
]


@pytest.mark.parametrize(("column", "attribute", "options", "expected"), LEVELS)
def test_levels_and_keys(
    study: tuple[Path, list[Dataset]], column: str, attribute: str, options: str, expected: list[int]
) -> None:
    root, files = study
    keys = sorted({str(getattr(data, attribute)): str(data.PatientID) for data in files}.items(), key=lambda k: k[1])
    uri = table(root, [column, "label", "split"], *([key, "x", "train" if of == "a" else "test"] for key, of in keys))
    source = open_source(f"{uri}?{options}")
    for split in (source.train, source.test):
        assert sorted(int(np.asarray(split.image(row))[0, 0, 0]) for row in range(len(split))) == expected


def test_frames_of_a_file(tmp_path: Path) -> None:
    values = np.arange(5, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), dtype=np.uint8)
    for patient in "ab":
        save(dataset(values, patient), tmp_path / f"{patient}.dcm")
    uri = table(tmp_path, ["PatientID", "label", "split"], ["a", "x", "train"], ["b", "x", "test"])
    for option, expected in {
        "": [2],
        "frames=all": [0, 1, 2, 3, 4],
        "frames=2": [1, 3],
        "frames=9": [0, 1, 2, 3, 4],
    }.items():
        assert [int(image[0, 0, 0]) for image in images(open_source(f"{uri}?{option}"))] == expected * 2


def test_several_labels_and_mixed_up_tables(tmp_path: Path) -> None:
    for patient in "ab":
        save(dataset(scan("clear", DRAWS), patient), tmp_path / f"{patient}.dcm")
    uri = table(tmp_path, ["PatientID", "split", "mass", "edema"], ["a", "train", "1", ""], ["b", "test", "0", "1"])
    source = open_source(uri)
    assert (source.class_names, source.train.labels.tolist()) == (("mass", "edema"), [[1, -1]])
    table(tmp_path, ["PatientID", "sex", "label"], ["a", "f", "x"], ["b", "", "y"])
    split = open_source(f"{uri}?groups=sex", "evaluator").test
    assert sorted(zip(split.labels.tolist(), split.subgroups["sex"], strict=True)) == [(0, "f"), (1, "unknown")]
    assert "has no column age" in str(refused(f"{uri}?groups=age"))
    table(tmp_path, ["PatientID", "label"], ["a", "x"], ["a", "y"])
    assert "line 3: it has the same PatientID as line 2" in str(refused(uri))
    table(tmp_path, ["PatientID", "label"], ["a", "x"], ["nobody", "y"])
    text = str(refused(uri))
    assert "line 3: no file that can be read has its PatientID" in text
    assert "nobody" not in text
    table(tmp_path, ["name", "label"], ["a", "x"])
    assert "none of the columns SOPInstanceUID" in str(refused(uri))
    for option, words in {"frames=0": "frames=0", "window=1": "window=1", "level=room": "level=room"}.items():
        assert words in str(refused(f"{uri}?{option}"))


@pytest.mark.parametrize(("shape", "most"), [((12, 10), 255), ((12, 10, 3), 255), ((12, 10), 4095), ((12, 10), 65535)])
def test_the_same_pixels_as_png_are_the_same_data(tmp_path: Path, shape: tuple[int, ...], most: int) -> None:
    """Also where the order of the patients' names is not that of their lines: the index has other names for them."""
    rows, scans = [["path", "label", "patient"]], [["SOPInstanceUID", "label"]]
    for patient in reversed(range(12)):
        for place in range(3):
            values = DRAWS.integers(0, most + 1, shape, dtype=np.uint8 if most == 255 else np.uint16)
            Image.fromarray(values).save(tmp_path / f"{patient}-{place}.png")
            data = dataset(values, f"p{patient}")
            if most == 65535:
                data.BitsStored, data.HighBit = 16, 15
            save(data, tmp_path / "scans" / f"{place}{patient}.dcm")
            label = "xy"[(patient + place) % 2]
            rows.append([f"{patient}-{place}.png", label, f"p{patient}"])
            scans.append([str(data.SOPInstanceUID), label])
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    first, second = f"csv:{tmp_path}/table.csv?group=patient&", f"{table(tmp_path / 'scans', *scans)}?"
    for options in ("validation=0.3", *(f"partition={kind}&clients=2&client=1" for kind in ("iid", "dirichlet"))):
        sources = open_source(first + options), open_source(second + options)
        for one, other in ((getattr(source, side) for source in sources) for side in ("train", "test")):
            assert len(one) == len(other) > 0
            assert [one.digest(row) for row in range(len(one))] == [other.digest(row) for row in range(len(other))]
            assert torch.equal(one.labels, other.labels)
    privacy = PrivacySpec(level="sample", clip=0.3, noise_multiplier=2.0, delta=1e-3, unit="group", per_group=2)
    assert groups_of(privacy, sources[0].train) == groups_of(privacy, sources[1].train)


def test_no_patient_is_on_two_sides_in_a_thousand_partitions(tmp_path: Path) -> None:
    source = open_source(f"dicom:{write_patients(tmp_path / 'a', 30, 4, 3)}")
    from promptfed.shared.data.options import DicomOptions
    from promptfed.shared.data.registry import cut, open_whole

    scheme, body = source.uri.split(":")
    for seed in range(1000):
        values = {"partition": ("iid", "dirichlet")[seed % 2], "clients": "3", "partition_seed": str(seed)}
        if seed % 3 == 0:
            values["validation"] = "0.3"
        if seed % 50 == 0:
            source = open_whole(scheme, body, DicomOptions(uri=source.uri, split_seed=seed))
        known: dict = {}
        sides = [cut(scheme, source, DicomOptions(uri="u", **values, client=k), known) for k in range(3)]
        patients = [set(split.groups) for side in sides for split in (side.train, side.test)]
        assert sum(map(len, patients)) == len(set().union(*patients))
        if "validation" not in values:
            assert sum(len(side.train) + len(side.test) for side in sides) == 120


def test_a_group_has_its_most_frequent_class() -> None:
    classes, members = grouped(["b", "a", "b", "b"], torch.tensor([0, 2, 1, 1]))
    assert (classes.tolist(), [rows.tolist() for rows in members]) == ([1, 2], [[0, 2, 3], [1]])


def test_classes_that_would_divide_a_patient_are_refused(tmp_path: Path) -> None:
    uri = f"dicom:{write_patients(tmp_path / 'a', 10, 6, 3)}"
    assert "would divide a group" in str(refused(f"{uri}?partition=pathological&clients=2&client=0"))


def test_privacy_clips_by_patient(tmp_path: Path) -> None:
    source = open_source(f"dicom:{write_patients(tmp_path / 'a', 10, 4, 3)}")
    privacy = PrivacySpec(level="sample", clip=0.3, noise_multiplier=2.0, delta=1e-3, unit="group", per_group=3)
    units = groups_of(privacy, source.train)
    assert len(units) == 8
    for unit in units:
        assert len(unit) == 3
        assert len({source.train.groups[row] for row in unit}) == 1


def test_threads_read_the_images_that_the_digests_are_of(tmp_path: Path) -> None:
    source = open_source(f"dicom:{write_patients(tmp_path / 'a', 5, 4, 3)}")
    rows = range(len(source.train))
    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(lambda row: image_digest(source.train.image(row)), rows))
    assert digests == [source.train.digest(row) for row in rows]


# Files that are broken, hostile or slow, and the index that spares reading files again.


def test_a_broken_file_is_named_to_its_owner_only_and_can_be_left_out(tmp_path: Path) -> None:
    root = write_patients(tmp_path / "a", 6, 3, 2)
    broken = root / "P0002" / "0002.dcm"
    broken.write_bytes(broken.read_bytes()[:2000])
    (root / "P0003" / "0001.dcm").write_bytes(b"no DICOM at all" * 40)
    error = refused(f"dicom:{root}")
    assert "P000" not in str(error)
    assert "the file is damaged" in str(error)
    assert any(str(broken) in problem for problem in error.problems)
    assert any("0001.dcm: it is not a DICOM file" in problem for problem in error.problems)
    source = open_source(f"dicom:{root}?on_unreadable=skip")
    assert len(source.train) + len(source.test) == 16
    assert any(str(broken) in text for text in source.left_out)


def test_a_later_start_reads_no_file_that_has_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_patients(tmp_path / "a", 5, 3, 2)
    first = open_source(f"dicom:{root}")
    asked: list[str] = []
    submit = reading.Readers.submit

    def counted(self: reading.Readers, request: Request):  # type: ignore[no-untyped-def]
        asked.append(request.do)
        return submit(self, request)

    monkeypatch.setattr(reading.Readers, "submit", counted)
    again = open_source(f"dicom:{root}")
    assert asked == []
    assert again.train.groups == first.train.groups
    assert [again.train.digest(row) for row in range(9)] == [first.train.digest(row) for row in range(9)]
    os.utime(root / "P0001" / "0001.dcm", ns=(1, 1))
    open_source(f"dicom:{root}")
    assert asked == ["facts", "check"]
    open_source(f"dicom:{root}?window=0,100")
    assert asked.count("check") == 16


def test_an_index_that_a_crash_cut_off_is_made_whole(tmp_path: Path, own_index: Path) -> None:
    root = write_patients(tmp_path / "a", 4, 3, 2)
    first = open_source(f"dicom:{root}")
    index = next(own_index.rglob("*.jsonl"))
    index.write_bytes(index.read_bytes()[:-37])
    for _ in range(2):
        again = open_source(f"dicom:{root}")
        assert [again.test.digest(row) for row in range(3)] == [first.test.digest(row) for row in range(3)]


def test_the_index_has_no_number_of_a_header(tmp_path: Path, own_index: Path) -> None:
    """The places of slices are masked by the secret, and read back."""
    for patient in "ab":
        for place in range(3):
            data = dataset(
                np.full((4, 4), 10 * place, dtype=np.uint8), patient, 1_947_110_039 - place, f"1.2.{ord(patient)}"
            )
            save(data, tmp_path / "a" / f"{patient}{place}.dcm")
    (tmp_path / "a" / "labels.csv").write_text("PatientID,label,split\na,x,train\nb,x,test\n")
    for _ in range(2):
        source = open_source(f"dicom:{tmp_path / 'a'}?level=series&frames=all")
        assert [np.asarray(source.train.image(row))[0, 0, 0] for row in range(3)] == [20, 10, 0]
    assert b"19471100" not in b"".join(path.read_bytes() for path in own_index.rglob("*") if path.is_file())


def hostile(folder: Path) -> dict[str, Path]:
    """Files that claim or unpack to what they do not have."""
    folder.mkdir()
    huge = dataset(np.zeros((8, 8), dtype=np.uint16), "a")
    huge.Rows = huge.Columns = 65535
    long = dataset(np.zeros((8, 8), dtype=np.uint16), "a")
    long.NumberOfFrames = 2_000_000_000
    bomb = dataset(np.zeros((8, 8), dtype=np.uint8), "a")
    bomb.PixelData = bytes(1 << 29)
    bomb.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    stream = bytearray(b"\xff\x4f\xff\x51\x00\x29\x00\x00" + b"\x00\x00\xff\xff" * 2 + bytes(8))
    stream += b"\x00\x00\xff\xff" * 2 + bytes(8) + b"\x00\x01\x07\x01\x01" + bytes(400)
    picture = dataset(np.zeros((8, 8), dtype=np.uint8), "a")
    picture.file_meta.TransferSyntaxUID = JPEG2000Lossless
    picture.PixelData = encapsulate([bytes(stream)])
    paths = {name: folder / f"{name}.dcm" for name in ("huge", "long", "bomb", "picture", "deep", "length", "claims")}
    for name, data in {"huge": huge, "long": long, "picture": picture}.items():
        save(data, paths[name])
    bomb.save_as(paths["bomb"], enforce_file_format=True)
    whole = save(dataset(np.zeros((8, 8), dtype=np.uint16), "a"), folder / "whole.dcm").read_bytes()
    head = whole[: whole.index(b"\x08\x00\x16\x00")]
    opened = b"\x08\x00\x40\x11SQ\x00\x00\xff\xff\xff\xff\xfe\xff\x00\xe0\xff\xff\xff\xff"
    paths["deep"].write_bytes(head + opened * 200_000)
    start = whole.index(b"\x08\x00\x18\x00")
    paths["length"].write_bytes(whole[:start] + b"\x08\x00\x18\x00UN\x00\x00\xf0\xff\xff\xff" + whole[start + 8 :])
    end = whole.index(b"\xe0\x7f\x10\x00")
    paths["claims"].write_bytes(whole[:end] + b"\xe0\x7f\x10\x00OW\x00\x00\xfe\xff\xff\xff" + bytes(16))
    (folder / "whole.dcm").unlink()
    return paths


def test_hostile_files_end_in_errors_within_bounds(tmp_path: Path) -> None:
    paths = hostile(tmp_path / "h")
    started = time.monotonic()
    for name, path in paths.items():
        facts, check = readers().each(Request(do, str(path)) for do in ("facts", "check"))
        assert (facts if name == "long" else check).error is not None, name
    assert time.monotonic() - started < 120
    good = save(dataset(scan("clear", DRAWS), "b"), tmp_path / "good.dcm")
    assert readers().submit(Request("check", str(good))).result().error is None


def test_a_file_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SECONDS", 0.5)
    child = reading._Child()
    code = "import time\nfrom promptfed.shared.data import worker\nfrom promptfed.shared.data.medical import dicom\n"
    code += "dicom.facts = lambda path: time.sleep(60)\nworker.main()"
    child._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.read(Request("facts", "x"), None).error == "reading it takes more than 0 s"


def test_a_pipe_is_no_file_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.dcm")
    answer = readers().submit(Request("facts", str(tmp_path / "pipe.dcm"))).result()
    assert "not an ordinary file" in (answer.error or "")
