"""Tables of labels, patients and the index of ``dicom:``; files are read in this process."""

# ruff: noqa: E402 - the rest needs pydicom
from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

pydicom = pytest.importorskip("pydicom", reason="DICOM files: pip install '.[medical]'")
from pydicom.dataset import Dataset

from promptfed.client_service.privacy.protection import groups_of
from promptfed.shared.data import DataError, Source, open_source, worker
from promptfed.shared.data import readers as reading
from promptfed.shared.data.errors import Unreadable
from promptfed.shared.data.image_files import image_digest
from promptfed.shared.data.medical import opening
from promptfed.shared.data.medical.phantoms import dataset, scan, write_patients
from promptfed.shared.data.options import DicomOptions
from promptfed.shared.data.readers import Request
from promptfed.shared.data.registry import class_names_of
from promptfed.shared.spec.spec import PrivacySpec
from tests.shared.data.medical.test_dicom import DRAWS, save, table
from tests.shared.data.test_changed_files import CHANGED, exchange

pytestmark = pytest.mark.usefixtures("read_here")


def images(source: Source) -> list[np.ndarray]:
    """Those of train and of test."""
    return [np.asarray(split.image(row)) for split in (source.train, source.test) for row in range(len(split))]


def refused(uri: str) -> DataError:
    with pytest.raises(DataError) as caught:
        open_source(uri)
    return caught.value


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
    table(tmp_path, ["PatientID", "label"], ["a", "x"], ["nobody", "y"])
    text = str(refused(uri))
    assert "line 3: no file that can be read has its PatientID" in text
    assert "nobody" not in text
    table(tmp_path, ["name", "label"], ["a", "x"])
    assert "none of the columns SOPInstanceUID" in str(refused(uri))
    for option, words in {"frames=0": "frames=0", "window=1": "window=1", "level=room": "level=room"}.items():
        assert words in str(refused(f"{uri}?{option}"))


def test_privacy_clips_by_patient(tmp_path: Path) -> None:
    source = open_source(f"dicom:{write_patients(tmp_path / 'a', 10, 4, 3)}")
    privacy = PrivacySpec(level="sample", clip=0.3, noise_multiplier=2.0, delta=1e-3, unit="group", per_group=3)
    units = groups_of(privacy, source.train)
    assert len(units) == 8
    for unit in units:
        assert len(unit) == 3
        assert len({source.train.groups[row] for row in unit}) == 1


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


def table_of(tmp_path: Path, text: str, query: str = "") -> opening.Table:
    (tmp_path / "labels.csv").write_text(text)
    return opening.read_table(tmp_path / "labels.csv", DicomOptions.parse("dicom:scans", query))


@pytest.mark.parametrize(("text", "query", "key", "groups", "splits"), [
    ("path,ward,label,split\na,p,x,train\nb,q,y,test\n", "group=ward", "path", ("p", "q"), ("train", "test")),
    ("PatientID,SOPInstanceUID,label\np,1,x\nq,2,y\n", "", "SOPInstanceUID", ("p", "q"), (None, None)),
    ("PatientID,label,split\np,x,\nq,y,\n", "", "PatientID", None, (None, None)),
    ("PatientID,label,ward\np,x,1\nq,y,2\n", "group=ward", "PatientID", ("1", "2"), (None, None)),
])  # fmt: skip
def test_a_table_is_read_by_its_finest_key(
    tmp_path: Path, text: str, query: str, key: str, groups: object, splits: tuple[object, ...]
) -> None:
    table = table_of(tmp_path, text, query)
    assert (table.key, table.groups, table.splits) == (key, groups, splits)
    assert (table.names, table.labels.tolist(), table.numbers) == (("x", "y"), [0, 1], (2, 3))


def test_a_column_of_groups_is_no_class(tmp_path: Path) -> None:
    table = table_of(tmp_path, "SOPInstanceUID,PatientID,ward,mass\n1,p,w,1\n2,p,v,0\n", "group=ward")
    assert (table.names, table.groups, table.labels.tolist()) == (("mass",), ("w", "v"), [[1], [0]])


@pytest.mark.parametrize(("text", "query", "says", "told"), [
    ("PatientID,label\n", "", "the table of labels has no line", None),
    ("PatientID,label\na,\n", "", "line 2: label must not be empty", None),
    ("SOPInstanceUID,PatientID,label\n1,,x\n", "", "line 2: PatientID must not be empty", None),
    ("SOPInstanceUID,label\n,x\n", "", "line 2: SOPInstanceUID must not be empty", None),
    ("PatientID,label,split\na,x,Train\n", "", "line 2: the split is neither train nor test", None),
    ("PatientID,label,split\na,x,train\nb,y,\n", "", "leaves some splits empty", None),
    ("PatientID,label\na,x\nb,x\na,y\n", "", "line 4: it has the same PatientID as line 2; keep one of them", None),
    ("PatientID,mass\na,9\n", "", "line 2: its labels are not as they should be", "mass is 9"),
    ("PatientID,label\n,x\n,x\n,x\n", "", "line 2; keep one of them. And 2 more.", "line 4"),
    ("PatientID,label\n,x\n,y\n", "", "the same PatientID as line 2; keep one of them.", None),
    ("PatientID,label\na,x\n", "group=ward", "has no column ward", None),
    ("path,label,ward\na,x,w \n", "group=ward", "line 2: ward begins or ends with a space", None),
])  # fmt: skip
def test_tables_are_refused_by_line_and_column(
    tmp_path: Path, text: str, query: str, says: str, told: str | None
) -> None:
    with pytest.raises(DataError) as caught:
        table_of(tmp_path, text, query)
    assert says in str(caught.value)
    assert (" more." in str(caught.value)) == (" more." in says)
    if told is not None:
        assert told not in str(caught.value)
        assert any(told in problem for problem in caught.value.problems)


def listed(path: str) -> opening.Listed:
    return opening.Listed(path, f"id-{path}", 1, "t")


def facts(series: str = "", order: float = 0.0, frames: int = 1, **ids: str) -> opening.Facts:
    return opening.Facts(**dict.fromkeys(opening.IDS, "") | {"series": series} | ids, frames=frames, order=order)


def test_series_follow_their_first_paths_and_slices_their_places() -> None:
    files = [
        (listed("a"), facts("s2", 2.0)), (listed("b"), facts("s1", 1.0)), (listed("c"), facts("s2", 1.0, study="t")),
        (listed("d"), facts("s1", 1.0)), (listed("e"), facts("", 0.0, 2)), (listed("f"), facts()),
    ]  # fmt: skip

    def units(level: str) -> list[str]:
        return ["".join(f"{item.file.path}{item.place}" for item in unit) for unit in opening._units(files, level)]

    assert units("image") == ["a0", "b0", "c0", "d0", "e0e1", "f0"]
    assert units("series") == ["c0a0", "b0d0", "e0e1", "f0"]
    assert units("study") == ["a0", "b0", "c0", "d0", "e0e1", "f0"]
    assert "".join(item.file.path for item in opening._in_order(files)) == "cabdeef"
    one = opening._units([(file, own._replace(study="t")) for file, own in files], "study")
    assert "".join(item.file.path for item in one[0]) == "cabdeef"
    assert opening._units(files, "series")[0][0].file == listed("c")


@pytest.mark.parametrize(("length", "pick", "places"), [
    (1, "middle", [0]), (4, "middle", [2]), (5, "middle", [2]), (3, "all", [0, 1, 2]), (6, 3, [1, 3, 5]),
    (10, 4, [1, 3, 6, 8]), (2, 3, [0, 1]), (0, "middle", []), (5, 1, [2]),
])  # fmt: skip
def test_places_are_picked_evenly(length: int, pick: str | int, places: list[int]) -> None:
    assert opening.picked(list(range(length)), pick) == places


def test_images_have_the_group_of_the_table_else_of_their_headers(tmp_path: Path) -> None:
    folder = opening.home(None)
    index = opening.Index(tmp_path, folder, opening.Keys(folder, "dicom:scans"), {})
    known = [facts(patient="p", study="s"), facts(study="s"), facts()]
    index._facts = {f"id-{name}": (1, "t", own) for name, own in zip("abc", known, strict=True)}
    items = [opening.Item(listed(name), 0) for name in "abc"]
    text = "path,label\na,x\nb,x\nc,y\n"
    assert opening._groups(table_of(tmp_path, text), index, items, [0, 1, 2]) == ["p", "s", "id-c"]
    wards = table_of(tmp_path, "path,label,ward\na,x,w1\nb,x,w2\nc,y,w1\n", "group=ward")
    assert opening._groups(wards, index, items, [2, 1, 0]) == [index.value("patient", f"w{k}") for k in (1, 2, 1)]


def test_ids_hang_on_the_secret_and_on_what_they_are_of(tmp_path: Path) -> None:
    keys = opening.Keys(tmp_path / "a", "dicom:scans")
    ids = [
        keys.id("file", "x"),
        keys.id("root", "x"),
        keys.id("file", "xy"),
        opening.Keys(tmp_path / "b", "u").id("file", "x"),
    ]
    assert len(set(ids)) == 4
    assert all(len(one) == 16 for one in ids)
    assert opening.Keys(tmp_path / "a", "dicom:scans").id("file", "x") == ids[0]
    key = tmp_path / "a" / opening.KEY_FILE
    assert (key.stat().st_mode & 0o777, key.stat().st_size) == (0o600, 32)
    key.write_bytes(key.read_bytes()[1:])
    with pytest.raises(DataError, match=r"cannot be kept in .*/a: its file key is damaged.*; name a folder"):
        opening.Keys(tmp_path / "a", "dicom:scans")
    key.unlink()
    key.symlink_to(tmp_path / "b" / opening.KEY_FILE)
    with pytest.raises(DataError, match=f"{key} is a link"):
        opening.Keys(tmp_path / "a", "dicom:scans")


def test_an_index_is_no_link_and_tells_files_of_one_size_and_time_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, bars = opening.Keys(tmp_path / "kept", "dicom:scans"), []
    index = opening.Index(tmp_path, tmp_path / "kept", keys, {})
    monkeypatch.setattr(opening, "tqdm", lambda rows, *names, **options: bars.append((*names, options)) or list(rows))
    index.facts([listed("a")])
    index.digests([opening.Item(listed("a"), 0)])
    quiet = {"leave": False, "disable": None}
    assert bars == [("headers", 1, quiet), ("images", 1, quiet)], "no bar is left behind"
    assert len({index._name(opening.Item(listed(name), place)) for name in "ab" for place in (0, 1)}) == 4
    assert all(index._mask(str(number), 1, "t") < 1 << 64 for number in range(9)), "as many bits as a number has"
    index._file.rename(tmp_path / "other")
    index._file.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=f"{index._file} is a link"):
        opening.Index(tmp_path, tmp_path / "kept", keys, {})


def test_an_index_of_many_dead_lines_is_written_anew(tmp_path: Path) -> None:
    keys = opening.Keys(tmp_path / "kept", "dicom:scans")

    def opened() -> opening.Index:
        return opening.Index(tmp_path, tmp_path / "kept", keys, {})

    file = opened()._file
    assert (file.stat().st_mode & 0o777, file.read_text()) == (0o600, "")
    own = facts("s", 1.5, 3, patient="p")
    index = opened()
    index._facts = {"f": (7, "t", own), "g": (8, "u", None)}
    live = "".join(index._stored()) + json.dumps(["p", "n", 5, "ab" * 32]) + "\n"
    for dead, left in ((103, 107), (104, 3)):
        file.write_text("".join(["{cut\n", '["f", "f", 7, "t", ["p", 1]]\n', *["\n"] * (dead - 2), live]))
        file.chmod(0o600)
        again = opened()
        assert again._facts == index._facts
        assert again._digests == {"n": bytes.fromhex("ab" * 32)}
        assert file.read_text().count("\n") == left
        assert file.stat().st_mode & 0o777 == 0o600
    assert opened()._facts == index._facts
    again.release()
    assert (again._facts, again._digests) == ({}, {})


def test_ordinary_files_are_listed_with_their_times(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("b/2", "b/.hidden", ".secret/1", "a"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"xyz")
    (root / "c").symlink_to(root / "a")
    (root / "d").symlink_to(root / "b")
    os.mkfifo(root / "pipe")
    index = opening.Index(root, tmp_path / "kept", opening.Keys(tmp_path / "kept", "u"), {})
    about = (root / "a").stat()
    found = index.listed()
    assert [one.path for one in found] == ["a", "b/2", "c"]
    assert found[0] == opening.Listed(
        "a", index.keys.id("file", "a"), 3, f"{about.st_mtime_ns} {about.st_ctime_ns} {about.st_ino}"
    )
    known = about.st_size, found[0].times
    index._facts[found[0].id] = *known, None
    assert index.listed()[0].times is known[1]
    assert [opening._quiet(new) for new in ([], [1])] == [True, None]


def test_only_the_table_is_read_for_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = table(tmp_path, ["PatientID", "label"], ["a", "x"], ["b", "y"])
    assert class_names_of(uri) == ("x", "y")
    options = DicomOptions(uri=uri, names_only=True)
    with pytest.raises(DataError, match="image 1 is not read where only class names are asked for"):
        opening.open_dicom(str(tmp_path), options).train.image(1)
    for wrong, says in (("dicom:", "names no folder"), (f"dicom:{tmp_path}/none", "there is no folder"),
                        (f"{uri}?labels=none.csv", "there is no table of labels"),
                        (f"{uri}?on_unreadable=skip", "no image can be read")):  # fmt: skip
        assert says in str(refused(wrong))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs pydicom: " in str(refused(uri))


def test_lines_find_files_by_path_and_images_are_named_by_ids(tmp_path: Path, own_index: Path) -> None:
    shades = (("a", 10), ("b", 20), ("c", 30))
    for name, shade in shades:
        save(dataset(np.full((2, 2), shade, dtype=np.uint8), name), tmp_path / f"{name}.dcm")
    uri = table(tmp_path, ["path", "label", "sex"], ["b.dcm", "x", "f"], ["a.dcm", "y", ""], ["c.dcm", "y", "m"])
    source = open_source(f"{uri}?groups=sex&window=10.5,41&index={tmp_path}/kept", "evaluator")
    assert [int(one[0, 0, 0]) for one in images(source)] == [191, 128, 255]
    assert source.test.labels.tolist() == [0, 1, 1]
    index = source.test._read.__self__._index
    assert (index._facts, index._digests) == ({}, {}), "of very many files it would take much memory"
    assert list(source.test.subgroups["sex"]) == ["f", "unknown", "m"]
    assert [source.test.digest(row) for row in range(3)] == [image_digest(source.test.image(row)) for row in range(3)]
    assert not list(own_index.rglob("*.jsonl"))
    (tmp_path / "b.dcm").unlink()
    name = opening.Keys(tmp_path / "kept", "u").id("file", "b.dcm")
    with pytest.raises(DataError, match=f"{name}: it is gone"):
        source.test.image(0)
    skipped = open_source(f"{uri}?on_unreadable=skip", "evaluator")
    assert skipped.test.labels.tolist() == [1, 1]
    assert skipped.left_out == ("the table of labels, line 2: no file that can be read has its path.",)


@pytest.mark.parametrize(("error", "says"), [
    (Unreadable("its words"), "its words"), (ImportError(), "its reader is not installed; "),
    (MemoryError(), "it needs more than 3 GB of memory"), (RecursionError(), "its sequences are nested too deeply"),
    (FileNotFoundError(), "it is gone"), (OSError("QX"), "it cannot be opened, or is not an ordinary file"),
    (KeyError("QX"), "its content cannot be read; the file is damaged"),
])  # fmt: skip
def test_a_childs_errors_are_our_own_words(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def failing(path: Path) -> None:
        raise error

    monkeypatch.setattr("promptfed.shared.data.medical.dicom.facts", failing)
    told, body = worker.answer({"do": "facts", "path": "x", "settings": {}})
    assert (told["error"].removeprefix(says) == "" or says.endswith("; "), body) == (True, ())
    assert told["error"].startswith(says)


def test_a_child_answers_in_lines_and_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(dataset(np.arange(12, dtype=np.uint8).reshape(3, 4), "a"), tmp_path / "a.dcm")
    asked = [{"do": do, "path": str(path), "place": 0, "settings": {}} for do in ("facts", "check", "pixels")]
    requests, answers = (tmp_path / "requests").open("w+b"), io.BytesIO()
    requests.write(b"".join(json.dumps(one).encode() + b"\n" for one in asked))
    requests.seek(0)
    worker.serve(requests, answers)
    first, second, third, body = answers.getvalue().split(b"\n", 3)
    assert json.loads(first)["facts"]["frames"] == 1
    assert json.loads(third) == {"mode": "L", "size": [4, 3], "bytes": 12}
    assert body == bytes(range(12))
    shown = Image.frombytes("L", (4, 3), body).convert("RGB")
    assert json.loads(second) == {"mode": "L", "size": [4, 3], "digest": image_digest(shown)}
    for large, size in ((12, [4, 3]), (11, [2, 2])):
        monkeypatch.setattr(worker, "LARGE", large)
        monkeypatch.setattr("promptfed.shared.data.image_files.SHRUNK", 3)
        monkeypatch.setattr("promptfed.shared.data.image_files.LEAST_SIDE", 1)
        assert worker.answer(asked[2])[0]["size"] in (tuple(size), size)


@pytest.mark.parametrize(("poll", "answered"), [(True, 1), (False, 2)])
def test_a_child_ends_where_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poll: bool, answered: int
) -> None:
    """After the first request nothing more is ready; without a way to look it reads to the end."""
    ready, waits = [[True], []], []

    def look(reading: Any, *rest: Any) -> tuple[list[Any], list[Any], list[Any]]:
        waits.append(rest[-1])
        return ready.pop(0), [], []

    system = SimpleNamespace(select=look, **({"poll": None} if poll else {}))
    monkeypatch.setattr(worker, "select", system)
    line = json.dumps({"do": "facts", "path": str(tmp_path / "none"), "settings": {}}).encode() + b"\n"
    answers = io.BytesIO()
    worker.serve(io.BytesIO(line * 2), answers)
    assert answers.getvalue().count(b"it is gone") == answered
    assert waits == [worker.IDLE_SECONDS] * 2 * poll


def test_a_child_cuts_the_images_that_were_opened(tmp_path: Path) -> None:
    paths = [tmp_path / f"{k}.png" for k in range(2)]
    for k, path in enumerate(paths):
        Image.new("RGB", (8, 6), (50 * k, 0, 9)).save(path)
    known = [image_digest(Image.open(path)) for path in paths]
    settings = {"cut": {"scale": 4, "crop": [4, 4], "resample": 3}, "paths": list(map(str, paths)), "greys": [None] * 2}
    told, parts = worker.answer({"do": "cut", "path": "", "settings": settings | {"digests": known}})
    assert told == {"bytes": 96}
    assert [bytes(part) for part in parts] == [bytes([50 * k] * 16 + [0] * 16 + [9] * 16) for k in range(2)]
    told, _ = worker.answer({"do": "cut", "path": "", "settings": settings | {"digests": known[::-1]}})
    assert told == {"error": "a file is not what it was when the data were opened"}


def test_a_folder_that_cannot_be_listed_is_named_to_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = table(tmp_path, ["path", "label"], ["a", "x"])

    def refusing(root: Path, under: str) -> Any:
        raise PermissionError(13, "Permission denied", f"{root}/secret")

    monkeypatch.setattr(opening, "_entries", refusing)
    error = refused(uri)
    assert "a folder under it cannot be listed: permission denied" in str(error)
    assert "secret" not in str(error)
    assert "secret" in " ".join(error.problems)


def test_headers_of_files_that_were_exchanged_are_read_again(tmp_path: Path) -> None:
    """Files of equal size and time of change, as archives leave them: a patient's files are under another's name."""
    root = write_patients(tmp_path / "a", 6, 3, 1)
    lines = [f"{path.relative_to(root)},c{k % 2}" for k, path in enumerate(sorted(root.rglob("*.dcm")))]
    (root / "labels.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    size = max(path.stat().st_size for path in root.rglob("*.dcm"))
    for path in root.rglob("*.dcm"):
        os.truncate(path, size)
        os.utime(path, ns=(10**18, 10**18))

    def patients(source: Source) -> dict[str, str]:
        parts = (source.train, source.test)
        return {part.digest(row): (part.groups or ())[row] for part in parts for row in range(len(part))}

    before = open_source(f"dicom:{root}")
    known = patients(before)
    folders = sorted({path.parent for path in root.rglob("*.dcm")})
    exchange(folders[0], folders[1])
    os.utime(folders[0]), os.utime(folders[1])
    with pytest.raises(DataError, match=rf"file [0-9a-f]{{16}} {CHANGED}"):
        [part.image(row) for part in (before.train, before.test) for row in range(len(part))]
    after = open_source(f"dicom:{root}")
    assert patients(after) == known, "pixels stay with the patient of their own header"
    assert [part.image(row).size for part in (after.train, after.test) for row in range(len(part))]
