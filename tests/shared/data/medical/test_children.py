"""``dicom:`` at length, as child processes read it: pydicom's own files, hostile ones, many partitions."""

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
from pydicom.encaps import encapsulate
from pydicom.uid import DeflatedExplicitVRLittleEndian, JPEG2000Lossless

from promptfed.client_service.privacy.protection import groups_of
from promptfed.shared.data import open_source
from promptfed.shared.data import readers as reading
from promptfed.shared.data.image_files import image_digest
from promptfed.shared.data.medical.dicom import pixels
from promptfed.shared.data.medical.phantoms import dataset, scan, write_patients
from promptfed.shared.data.readers import Request, readers
from promptfed.shared.spec.spec import PrivacySpec
from tests.shared.data.medical.test_dicom import DRAWS, literal, save, table


def packaged() -> list[Path]:
    root = Path(pydicom.__file__).parent / "data" / "test_files"
    return sorted(path for path in root.rglob("*") if path.is_file())


def decoded(path: Path) -> np.ndarray | None:
    """What pydicom makes of a file's pixels."""
    try:
        return pydicom.dcmread(path).pixel_array
    except Exception:
        return None


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


def test_threads_read_the_images_that_the_digests_are_of(tmp_path: Path) -> None:
    source = open_source(f"dicom:{write_patients(tmp_path / 'a', 5, 4, 3)}")
    rows = range(len(source.train))
    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(lambda row: image_digest(source.train.image(row)), rows))
    assert digests == [source.train.digest(row) for row in rows]


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
