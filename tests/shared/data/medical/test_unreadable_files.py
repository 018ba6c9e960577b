"""Files that are broken, hostile or slow, and the index that spares reading files again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from promptfed.shared.data import open_source
from tests.shared.data.medical.test_dicom import DRAWS, refused, save

pydicom = pytest.importorskip("pydicom", reason="DICOM files: pip install '.[medical]'")
from pydicom.encaps import encapsulate  # noqa: E402
from pydicom.uid import DeflatedExplicitVRLittleEndian, JPEG2000Lossless  # noqa: E402

from promptfed.shared.data import readers as reading  # noqa: E402
from promptfed.shared.data.medical.phantoms import dataset, scan, write_patients  # noqa: E402
from promptfed.shared.data.readers import Request, readers  # noqa: E402


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
    assert child.read(Request("facts", "x")).error == "reading it takes more than 0 s"


def test_a_pipe_is_no_file_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.dcm")
    answer = readers().submit(Request("facts", str(tmp_path / "pipe.dcm"))).result()
    assert "not an ordinary file" in (answer.error or "")
