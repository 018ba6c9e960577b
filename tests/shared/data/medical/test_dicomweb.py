"""``dicomweb:`` against Orthanc, and against a PACS that is not to be trusted."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.sdk.errors import Exit
from promptfed.shared.data import open_source
from promptfed.shared.data.registry import class_names_of
from tests.support.ports import free_port

pytest.importorskip("dicomweb_client", reason="DICOMweb: pip install '.[medical]'")
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.uid import JPEGLSLossless

from promptfed.shared.data.medical import pacs
from promptfed.shared.data.medical.pacs import LISTED
from promptfed.shared.data.medical.phantoms import dataset, scan
from tests.shared.data.medical.test_dicom import refused
from tests.shared.data.medical.test_planted import contents, leaks, planted

PLUGIN = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
Answer = tuple[int, dict[str, str], Iterator[bytes]]


@pytest.fixture(scope="module")
def orthanc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a PACS on this machine."""
    binary = shutil.which("Orthanc")
    if binary is None or not PLUGIN.exists():
        pytest.skip("a PACS: apt-get install orthanc orthanc-dicomweb")
    folder, port = tmp_path_factory.mktemp("orthanc"), free_port()
    settings = {
        "StorageDirectory": str(folder / "storage"),
        "IndexDirectory": str(folder / "storage"),
        "HttpPort": port,
        "DicomServerEnabled": False,
        "RemoteAccessAllowed": False,
        "AuthenticationEnabled": False,
        "Plugins": [str(PLUGIN)],
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
    }
    (folder / "orthanc.json").write_text(json.dumps(settings))
    log = (folder / "log").open("w")
    process = subprocess.Popen([binary, str(folder / "orthanc.json")], stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                if httpx.get(f"{address}/system").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()
        log.close()


@pytest.mark.parametrize("options", ["", "&window=300,900"])
def test_a_pacs_gives_the_same_data_as_its_files(
    tmp_path: Path, own_index: Path, orthanc: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = planted(tmp_path / "files")
    for path in (tmp_path / "files").rglob("*.dcm"):
        assert httpx.post(f"{orthanc}/instances", content=path.read_bytes()).status_code == 200
    labels = tmp_path / "files" / "labels.csv"
    uri = f"dicomweb:{orthanc}/dicom-web?labels={labels}{options}"
    fetched, files = open_source(uri), open_source(f"dicom:{tmp_path / 'files'}?labels=labels.csv{options}")
    for one, other in ((fetched.train, files.train), (fetched.test, files.test)):
        assert len(one) == len(other) > 0
        assert [one.digest(row) for row in range(len(one))] == [other.digest(row) for row in range(len(other))]
        assert len(set(one.groups)) == len(set(other.groups))
        assert np.array_equal(np.asarray(one.image(0)), np.asarray(other.image(0)))
    assert leaks(secrets, contents(own_index)) == []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a later start needs neither PACS nor child"))
    assert len(open_source(uri).train) == len(fetched.train)


def test_a_table_by_study_finds_all_its_images(tmp_path: Path, orthanc: str) -> None:
    for patient in ("s1", "s2"):
        for number in range(3):
            draws = np.random.default_rng(number)
            sent(orthanc, dataset(scan("line", draws), patient, number, study=f"1.2.3.{patient[1]}"))
    (tmp_path / "labels.csv").write_text("StudyInstanceUID,label,split\n1.2.3.1,x,train\n1.2.3.2,x,test\n")
    source = open_source(f"dicomweb:{orthanc}/dicom-web?labels={tmp_path}/labels.csv&level=study&frames=all")
    assert (len(source.train), len(source.test)) == (3, 3)


def test_a_study_limits_the_search_and_its_images_can_be_deleted(tmp_path: Path, own_index: Path, orthanc: str) -> None:
    """Two patients with an image in each of two studies, of whom the table knows only the PatientID."""
    for number, (patient, study) in enumerate((patient, study) for patient in ("both", "other") for study in "12"):
        sent(orthanc, dataset(scan("line", np.random.default_rng(number)), patient, number, study=f"1.9.{study}"))
    (tmp_path / "labels.csv").write_text("PatientID,label,split\nboth,x,train\nother,x,test\n")
    uri = f"dicomweb:{orthanc}/dicom-web?labels={tmp_path}/labels.csv"
    home = own_index / "promptfed" / "medical"
    digests = {}
    for study in ("1.9.1", "1.9.2"):
        source = open_source(f"{uri}&study={study}")
        assert (len(source.train), len(source.test)) == (1, 1)
        digests[study] = source.train.digest(0)
    assert len(set(digests.values())) == 2
    assert len(open_source(uri).train) == 2
    assert "study is no UID" in str(refused(f"{uri}&study=1.9.x"))
    assert len(list(home.glob("pacs-*/*.dcm"))) == 8
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "own.txt").write_text("mine")
    (home / "pacs-link").symlink_to(tmp_path / "elsewhere")
    done = CliRunner().invoke(app, ["data", "clear-pacs", "--index", str(home), "--yes"])
    assert done.exit_code == 0, done.output
    assert "8 images of 3 searches" in done.stdout
    assert list(home.glob("pacs-*/*.dcm")) == []
    assert (tmp_path / "elsewhere" / "own.txt").exists()
    assert len(open_source(uri).train) == 2
    nobody = CliRunner().invoke(app, ["data", "clear-pacs", "--index", str(home)])
    assert nobody.exit_code == Exit.BAD_INPUT
    assert "would be deleted" in nobody.stderr
    assert len(list(home.glob("pacs-*/*.dcm"))) == 4


def sent(orthanc: str, data: Dataset) -> str:
    """Store an image; returns its UID."""
    stream = io.BytesIO()
    data.save_as(stream, enforce_file_format=True)
    httpx.post(f"{orthanc}/instances", content=stream.getvalue()).raise_for_status()
    return str(data.SOPInstanceUID)


def test_a_report_in_a_study_is_passed_over_and_what_cannot_be_decoded_is_told(
    tmp_path: Path, own_index: Path, orthanc: str
) -> None:
    for number, patient in enumerate(("r1", "r2")):
        for place in range(2):
            sent(orthanc, dataset(scan("line", np.random.default_rng(place)), patient, place, study=f"1.7.{number}"))
    report = dataset(scan("line", np.random.default_rng(0)), "r1", 9, study="1.7.0")
    for keyword in ("PixelData", "Rows", "Columns", "BitsAllocated", "BitsStored", "HighBit"):
        delattr(report, keyword)
    sent(orthanc, report)
    (tmp_path / "labels.csv").write_text("StudyInstanceUID,label,split\n1.7.0,x,train\n1.7.1,x,test\n")
    uri = f"dicomweb:{orthanc}/dicom-web?labels={tmp_path}/labels.csv"
    assert (len(open_source(uri).train), len(open_source(uri).test)) == (2, 2)

    other = dataset(np.zeros((8, 8), dtype=np.uint8), "r2", 3, study="1.7.9")
    other.file_meta.TransferSyntaxUID = JPEGLSLossless
    other.PixelData = encapsulate([b"\xff\xd8no image"])
    other["PixelData"].VR = "OB"
    sent(orthanc, other)
    with (tmp_path / "labels.csv").open("a") as file:
        file.write("1.7.9,x,train\n")
    error = str(refused(uri))
    assert "line 4: an image of the PACS: its pixels are compressed as JPEG-LS" in error
    assert "on_unreadable=skip" in error
    for _ in range(2):  # it is told at each start
        source = open_source(f"{uri}&on_unreadable=skip")
        assert (len(source.train), len(source.test)) == (2, 2)
        assert sum("an image of the PACS" in text for text in source.left_out) == 1


def test_an_image_whose_facts_were_lost_is_fetched_again(tmp_path: Path, own_index: Path, orthanc: str) -> None:
    """A kill between an image and its line in the index leaves a file that nothing is known of."""
    for patient in ("k1", "k2"):
        sent(orthanc, dataset(scan("line", np.random.default_rng(0)), patient))
    (tmp_path / "labels.csv").write_text("PatientID,label,split\nk1,x,train\nk2,x,test\n")
    uri = f"dicomweb:{orthanc}/dicom-web?labels={tmp_path}/labels.csv"
    first = open_source(uri)
    home = own_index / "promptfed" / "medical"
    for path in (*home.glob("*.jsonl"), *home.glob(f"pacs-*/{LISTED}")):
        path.unlink()
    again = open_source(uri)
    assert (again.train.groups, again.test.groups) == (first.train.groups, first.test.groups)
    assert len(set(again.train.groups + again.test.groups)) == 2


def test_a_study_that_comes_later_is_found(tmp_path: Path, orthanc: str) -> None:
    sent(orthanc, dataset(scan("line", np.random.default_rng(0)), "l1"))
    (tmp_path / "labels.csv").write_text("PatientID,label,split\nl1,x,train\nl2,x,test\n")
    uri = f"dicomweb:{orthanc}/dicom-web?labels={tmp_path}/labels.csv"
    assert "line 3: no file that can be read has its PatientID" in str(refused(uri))
    sent(orthanc, dataset(scan("line", np.random.default_rng(0)), "l2"))
    assert len(open_source(uri).test) == 1


class Hostile(ThreadingHTTPServer):
    """A PACS that answers a path with a status, headers, and parts of a body."""

    def __init__(self, answer: Callable[[str], Answer]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, headers, parts = answer(self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    for part in parts:
                        self.wfile.write(part)
                except OSError:
                    return

            def log_message(self, *_: object) -> None:
                return

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


JSON = {"Content-Type": "application/dicom+json"}


def instance(number: int, series: str = "1.2.3") -> dict[str, dict[str, object]]:
    uids = {"0020000D": "1.2", "0020000E": series, "00080018": f"1.2.3.{number}"}
    return {tag: {"vr": "UI", "Value": [uid]} for tag, uid in uids.items()}


def listing(*instances: dict[str, dict[str, object]]) -> Answer:
    return 200, JSON, iter([json.dumps(list(instances)).encode()])


def endless(path: str) -> Answer:
    return listing(*(instance(number) for number in range(500)))


def flood(path: str) -> Answer:
    return 200, JSON, (b" " * (1 << 20) for _ in range(1 << 20))


def drops(path: str) -> Answer:
    return 200, JSON, (time.sleep(0.1) or b" " for _ in range(100_000))


def redirect(path: str) -> Answer:
    return 302, {"Location": "http://127.0.0.1:1/"}, iter([])


def others(path: str) -> Answer:
    return listing(instance(1, "1.2.9"))


def nonsense(path: str) -> Answer:
    return 200, JSON, iter([b"<html>"])


def failing(path: str) -> Answer:
    return 503, {}, iter([])


def wrong_image(path: str) -> Answer:
    if "instances?" in path:
        return listing(instance(1))
    stream = io.BytesIO()
    dataset(np.zeros((4, 4), dtype=np.uint8), "a").save_as(stream, enforce_file_format=True)
    body = b"--x\r\nContent-Type: application/dicom\r\n\r\n" + stream.getvalue() + b"\r\n--x--"
    return 200, {"Content-Type": 'multipart/related; type="application/dicom"; boundary=x'}, iter([body])


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (endless, "answers a search without end"),
        (flood, "too long"),
        (drops, "takes more than"),
        (redirect, "the PACS redirects"),
        (others, "other images than those that were asked for"),
        (nonsense, "cannot be read|cannot be reached"),
        (wrong_image, "another image than the one that was asked for"),
        (failing, "answers with status 503"),
    ],
)
def test_a_hostile_pacs_ends_in_an_error(
    tmp_path: Path, answer: Callable[[str], Answer], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is drops:
        monkeypatch.setattr(pacs, "SECONDS", 5.0)
    (tmp_path / "labels.csv").write_text("SeriesInstanceUID,label\n1.2.3,x\n")
    server = Hostile(answer)
    try:
        error = refused(f"dicomweb:http://127.0.0.1:{server.server_port}/?labels={tmp_path}/labels.csv")
    finally:
        server.shutdown()
    assert re.search(says, str(error)), str(error)
    assert "line 2" in str(error)


def test_addresses_and_tables(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("SeriesInstanceUID,label\n1.2.3,x\n1.2.4,y\n")
    labels = f"labels={tmp_path}/labels.csv"
    assert "unencrypted" in str(refused(f"dicomweb:http://pacs.example/x?{labels}"))
    assert "give the PACS as https" in str(refused(f"dicomweb:pacs.example?{labels}"))
    assert "labels=FILE" in str(refused("dicomweb:https://pacs.example/x"))
    assert class_names_of(f"dicomweb:https://pacs.example/x?{labels}") == ("x", "y")
