"""Identifiers of patients appear nowhere outside their files, in whatever way they are written."""

# ruff: noqa: E402 - the rest needs pydicom
from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser
from typer.testing import CliRunner

pydicom = pytest.importorskip("pydicom", reason="DICOM files: pip install '.[medical]'")
import promptfed
from promptfed.cli.main import app
from promptfed.shared.data import DataError, open_source
from promptfed.shared.data.medical.phantoms import CLASSES, dataset, scan
from tests.shared.data.medical.test_dicom import save, table
from tests.shared.data.medical.test_opening import refused
from tests.support.browser import browser as browser
from tests.support.coordinators import InThread, in_thread
from tests.support.loopback_server import LoopbackServer
from tests.support.waiting import PATIENCE

TEXTS = (
    *("PatientName", "PatientID", "OtherPatientNames", "PatientBirthName", "PatientMotherBirthName", "PatientAddress"),
    *("PatientComments", "PatientInsurancePlanCodeSequence", "EthnicGroup", "Occupation", "AdditionalPatientHistory"),
    *("MilitaryRank", "BranchOfService", "CountryOfResidence", "RegionOfResidence", "PatientReligiousPreference"),
    *("ReferringPhysicianName", "ReferringPhysicianAddress", "ReferringPhysicianTelephoneNumbers"),
    *("PerformingPhysicianName", "OperatorsName", "NameOfPhysiciansReadingStudy", "RequestingPhysician"),
    *("InstitutionName", "InstitutionAddress", "InstitutionalDepartmentName", "StationName", "DeviceSerialNumber"),
    *("AccessionNumber", "StudyID", "StudyDescription", "SeriesDescription", "ProtocolName", "ImageComments"),
    *("RequestedProcedureDescription", "PerformedProcedureStepID", "AdmissionID", "CurrentPatientLocation"),
    *("IssuerOfPatientID", "FillerOrderNumberImagingServiceRequest", "PatientTelephoneNumbers", "MedicalRecordLocator"),
    *("DerivationDescription", "AcquisitionComments", "VisitComments"),
)


def planted(folder: Path) -> list[str]:
    """Scans of eight patients with identifiers wherever a file has room for one; returns them."""
    secrets, rows, draws = [], [["SOPInstanceUID", "label"]], np.random.default_rng(7)
    for number in range(8):
        for place in range(2):
            data = dataset(scan(CLASSES[place + number % 2], draws), "p")
            tags = [
                name for name in TEXTS if pydicom.datadict.dictionary_VR(pydicom.datadict.tag_for_keyword(name)) != "SQ"
            ]
            for at, keyword in enumerate(tags):
                secret = f"QX{number}{place}{at:02d}ZK"
                setattr(data, keyword, secret)
                secrets.append(secret)
            data.InstanceNumber = 1_947_110_039 + 100 * number + place
            secrets += [
                str(data.InstanceNumber),
                f"PRIV{number}{place}ZK",
                f"OVER{number}{place}ZK",
                f"FILE{number}{place}ZK",
                f"DIRS{number}ZK",
            ]
            block = data.private_block(0x0011, "PLANTED", create=True)
            block.add_new(1, "LO", f"PRIV{number}{place}ZK")
            data.add_new(0x60000022, "LO", f"OVER{number}{place}ZK")
            data.add_new(0x60003000, "OW", f"OVER{number}{place}ZK".encode() * 64)
            save(data, folder / f"DIRS{number}ZK" / f"FILE{number}{place}ZK.dcm")
            secrets += [str(data.SOPInstanceUID), str(data.StudyInstanceUID), str(data.SeriesInstanceUID)]
            rows.append([str(data.SOPInstanceUID), CLASSES[place + number % 2]])
    table(folder, *rows)
    assert len(tags) >= 40
    return sorted(set(secrets))


def written(secret: str) -> list[bytes]:
    """All ways to write an identifier that are searched for."""
    plain = secret.encode()
    ways = [
        plain, secret.lower().encode(), secret.encode("utf-16-le"), secret.encode("utf-16-be"), plain.hex().encode(),
    ]  # fmt: skip
    for shift in range(3):  # where it begins within a group of three bytes
        text = base64.b64encode(bytes(shift) + plain)
        ways.append(text[-(-shift * 4 // 3) : -4])
    for name in ("md5", "sha1", "sha256", "blake2b"):
        digest = hashlib.new(name, plain)
        ways += [digest.digest()[:8], digest.hexdigest()[:16].encode()]
    return ways


def leaks(secrets: list[str], *places: bytes) -> list[str]:
    """The secrets that are somewhere in ``places``, in whatever way they are written."""
    begins: dict[int, list[tuple[bytes, str]]] = defaultdict(list)  # by the first four bytes
    for secret in secrets:
        for way in written(secret):
            begins[int.from_bytes(way[:4], "little")].append((way, secret))
    whole, known = b"\n".join(places), np.array(list(begins), dtype=np.uint32)
    found = set()
    for shift in range(4):
        windows = np.frombuffer(whole[shift : shift + (len(whole) - shift) // 4 * 4], dtype="<u4")
        for row in np.flatnonzero(np.isin(windows, known)):
            at = 4 * int(row) + shift
            found |= {secret for way, secret in begins[int(windows[row])] if whole.startswith(way, at)}
    return sorted(found)


def contents(folder: Path) -> bytes:
    """Names and bytes of all files under a folder."""
    parts = [str(path.relative_to(folder)).encode() for path in folder.rglob("*")]
    return b"\n".join([*parts, *(path.read_bytes() for path in folder.rglob("*") if path.is_file())])


def test_planted_identifiers_stay_in_their_files(
    tmp_path: Path,
    own_index: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    secrets = [*planted(tmp_path / "one"), *planted(tmp_path / "two")]
    texts = [secret for secret in secrets if secret.startswith("QX")]
    assert leaks(texts, contents(tmp_path)) == sorted(set(texts))
    wire: list[bytes] = []
    send = httpx.AsyncClient.send

    async def heard(self: httpx.AsyncClient, request: httpx.Request, **options: object) -> httpx.Response:
        body = request.content if hasattr(request, "_content") else b""
        wire.append(str(request.url).encode() + repr(request.headers.raw).encode() + body)
        response = await send(self, request, **options)
        if response.is_closed:
            wire.append(response.content)
        return response

    monkeypatch.setattr(httpx.AsyncClient, "send", heard)
    caplog.set_level(logging.DEBUG)
    data = {name: f"dicom:{tmp_path / name}?on_unreadable=skip" for name in ("one", "two")}
    names = sorted(set(CLASSES[:3]))
    run = promptfed.run("fedclipadapter", data, rounds=1, class_names=names, folder=tmp_path / "state")
    run.export(tmp_path / "export")
    for name in ("one", "two"):
        broken = next((tmp_path / name).rglob("*.dcm"))
        broken.write_bytes(broken.read_bytes()[:-3000])
        with pytest.raises(DataError) as refused:
            open_source(data[name].partition("?")[0])
        wire.append(str(refused.value).encode())
    told = capfd.readouterr()
    everything = [*wire, caplog.text.encode(), told.out.encode(), told.err.encode()]
    assert len(wire) > 5
    kept = [contents(tmp_path / "state"), contents(tmp_path / "export"), contents(own_index)]
    assert all(len(part) > 1000 for part in kept)
    assert leaks(secrets, *everything, *kept) == []


@pytest.mark.parametrize("place", range(3))
def test_the_search_finds_what_is_there(place: int) -> None:
    secret = "QX0012ZK"
    for shown in (secret.encode(), secret.encode("utf-16"), base64.b64encode(b"x" * place + secret.encode() + b"yy")):
        assert leaks([secret], b"..." + shown) == [secret]
    for name in ("md5", "sha1", "sha256"):
        assert leaks([secret], hashlib.new(name, secret.encode()).hexdigest().encode()) == [secret]
    assert leaks([secret], b"nothing") == []


def test_an_image_that_changes_while_it_is_used_is_named_by_its_id(tmp_path: Path) -> None:
    secrets = planted(tmp_path / "one")
    source = open_source(f"dicom:{tmp_path / 'one'}")
    for path in (tmp_path / "one").rglob("*.dcm"):
        path.unlink()
    with pytest.raises(DataError, match=r"file [0-9a-f]{16}: it is gone") as caught:
        source.train.image(0)
    assert leaks(secrets, str(caught.value).encode()) == []


def test_an_unlistable_folder_is_named_to_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = planted(tmp_path / "one")
    scandir = os.scandir

    def refusing(path: str | Path) -> object:
        if "DIRS3ZK" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match="cannot be listed: permission denied") as caught:
        open_source(f"dicom:{tmp_path / 'one'}")
    assert leaks(secrets, str(caught.value).encode()) == []
    assert any("DIRS3ZK" in problem for problem in caught.value.problems)


def test_a_federation_over_dicom_files_learns() -> None:
    command = [sys.executable, "-m", "promptfed", "demo", "--data", "dicom", "--rounds", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert set(result["federated"]) >= {"client:north", "client:south", "client:west"}
    assert all(result["federated"][name] > result["zero_shot"][name] for name in result["federated"])


# Identifiers of patients stay at their sites in a whole federation of processes, in all that it writes and sends.


SYNTAX = "1.2.840.10008.4711.9"  # of no standard


SITES = ("east", "west", "far", "judge", "late")


class Tap(LoopbackServer):
    """Passes bytes on both ways and keeps them."""

    def __init__(self, upstream: str):
        self.heard = bytearray()
        super().__init__(upstream)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected = await self._connected()
        if connected is not None:
            above, below = connected
            await asyncio.gather(self._pass(reader, below), self._pass(above, writer), return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(1 << 16):
            self.heard += part
            writer.write(part)
            await writer.drain()
        writer.close()


class Sites:
    """Folders of planted files, and all that anybody writes elsewhere: ``out``."""

    def __init__(self, folder: Path, server: InThread, tap: Tap):
        self.out, self.server, self.tap = folder / "out", server, tap
        self.data = {name: folder / "data" / name for name in SITES}
        self.secrets = sorted({secret for root in self.data.values() for secret in planted(root)})
        for root in self.data.values():
            broken(root)
        self.environment = {
            **os.environ, **{f"XDG_{name}_HOME": str(self.out / name) for name in ("CACHE", "STATE", "CONFIG")},
            "PROMPTFED_OPERATOR_TOKEN": (server.settings.data_dir / "operator.token").read_text().strip(),
            "PROMPTFED_COORDINATOR": tap.url, "PROMPTFED_CLIENT_COORDINATOR": tap.url,
        }  # fmt: skip
        self.count = 0

    def uri(self, site: str, skip: bool = True) -> str:
        return f"dicom:{self.data[site]}" + "?on_unreadable=skip" * skip

    def start(self, *line: str | Path) -> subprocess.Popen[bytes]:
        """A command whose output is a log."""
        self.count += 1
        log = (self.out / "logs" / f"{self.count}-{line[0]}.log").open("w")
        command = [sys.executable, "-m", "promptfed", *map(str, line)]
        return subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, cwd=self.out)

    def run(self, *line: str | Path) -> tuple[int, str]:
        """A command in a process of its own: its exit code and output."""
        code = self.start(*line).wait(PATIENCE)
        return code, next((self.out / "logs").glob(f"{self.count}-*.log")).read_text()

    def call(self, *line: str | Path) -> tuple[int, str]:
        """A command in this process, which takes a second less than one of its own: its exit code and output."""
        result = CliRunner().invoke(app, [str(part) for part in line], env=self.environment)
        self.count += 1
        (self.out / "logs" / f"{self.count}-{line[0]}.log").write_text(result.output)
        return result.exit_code, result.output

    def done(self, *line: str | Path) -> str:
        code, text = self.call(*line)
        assert code == 0, text
        return text


def broken(root: Path) -> None:
    """Make three files of a folder unreadable, each in another way."""
    paths = sorted(root.rglob("*.dcm"))
    paths[0].write_bytes(paths[0].read_bytes()[:-3000])
    paths[3].write_bytes(b"QX no DICOM at all" * 40)
    paths[6].write_bytes(paths[6].read_bytes().replace(b"1.2.840.10008.1.2.1\0", SYNTAX.encode(), 1))


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    (tmp_path / "out" / "logs").mkdir(parents=True)
    with in_thread(tmp_path / "out" / "coordinator") as server, Tap(server.url) as tap:
        yield Sites(tmp_path, server, tap)


def federation(sites: Sites) -> None:
    """Three sites train for two rounds and choose the better one."""
    names = ", ".join(sorted(set(CLASSES[:3])))
    spec = f"{{name: scans, method: {{name: promptfl, m: 2}}, rounds: 2, class_names: [{names}], start: when_ready, "
    spec += "backbone: {model: promptfed-tiny}, "
    (sites.out / "scans.yaml").write_text(spec + "selection: {share: 0.3}, participation: {min_clients: 3}}")
    sites.done("federation", "create", sites.out / "scans.yaml")
    clients = []
    for site in ("east", "west", "far"):
        invitation = json.loads(sites.done("federation", "invite", "scans", "--json"))["invitation"]
        how = ("--state-dir", sites.out / site, "--log-format", "json" if site == "east" else "text", "--yes")
        clients.append(sites.start("join", invitation, "--name", site, "--data", sites.uri(site), *how))
    try:
        codes = [client.wait(4 * PATIENCE) for client in clients]
        assert codes == [0, 0, 0], contents(sites.out / "logs").decode()
    finally:
        for client in clients:
            client.kill()


def read_everything(sites: Sites, browser: Browser) -> None:
    """All that operators and owners can ask for, into files."""
    sites.done("export", "scans", "--out", sites.out / "export")
    for command in ("status", "clients", "rounds", "metrics", "privacy"):
        sites.done("federation", command, "scans", *(["--json"] if command in ("clients", "rounds") else []))
    for site in ("east", "far"):
        sites.done("site-log", "show", sites.out / site, "--json")
    sent = sites.run("client", "--sent", "--state-dir", sites.out / "east")[1]
    assert re.search(r"no line was changed or removed\n  enrolment: 1 message, [\d,]+ bytes\n", sent)
    page = browser.new_page()
    page.goto(f"{sites.server.url}/")
    (sites.out / "page.html").write_text(page.content())
    path = f"/v1/federations/{sites.server.get('/v1/federations')['federations'][0]['id']}"
    for route in (path, f"{path}/clients", f"{path}/rounds", f"{path}/card", "/metrics"):
        answer = sites.server.http.get(route, headers=sites.server.operator)
        (sites.out / re.sub(r"\W", "_", route)).write_bytes(answer.content)


def evaluation(sites: Sites) -> None:
    """A site tests the export."""
    spec = "{name: tested, rounds: 0, start: when_ready, participation: {min_clients: 1}}"
    (sites.out / "tested.yaml").write_text(spec)
    sites.done("federation", "create", sites.out / "tested.yaml", "--from", sites.out / "export")
    invitation = json.loads(sites.done("federation", "invite", "tested", "--json"))["invitation"]
    own = ("--name", "judge", "--role", "evaluator", "--data", sites.uri("judge"), "--yes")
    code, text = sites.run("join", invitation, "--state-dir", sites.out / "judge", *own)
    assert code == 0, text


def errors(sites: Sites) -> None:
    """Clients that cannot use their data; their errors are logs."""
    table = sites.data["late"] / "labels.csv"
    lines = table.read_text().splitlines()
    uids = [line.split(",")[0] for line in lines[1:]]
    patient = "QX0001ZK"
    tables = {
        "cut": "\n".join(lines).encode(), "column": f"Name,label\n{patient},x".encode(),
        "twice": "\n".join([*lines, lines[5]]).encode(), "nobody": f"PatientID,label\n{patient},x\nQX9999ZK,y".encode(),
        "split": (
            "\n".join(["SOPInstanceUID,label,split", *(f"{uid},x,QX{k:02d}11ZK" for k, uid in enumerate(uids))])
        ).encode(),
        "several": f"SOPInstanceUID,mass\n{uids[0]},{patient}".encode(),
        "latin": f"SOPInstanceUID,label\n{uids[0]},{patient}\xe9".encode("latin-1"),
    }  # fmt: skip
    (sites.out / "index").mkdir()
    for name, content in tables.items():
        table.write_bytes(content)
        text = str(refused(f"{sites.uri('late', skip=False)}?index={sites.out / 'index'}"))
        assert re.search("the table of labels|: file [0-9a-f]{16}: ", text), (name, text)
        (sites.out / "logs" / name).write_text(text)
    table.write_text(f"PatientID,label\n{patient},x\n")
    where = ("--federation", "none", "--name", "files", "--state-dir", sites.out / "late-files", "--yes")
    code, text = sites.run("client", *where, "--data", sites.uri("late", skip=False))
    assert code != 0
    assert "file " in text


def test_planted_identifiers_stay_at_sites(sites: Sites, browser: Browser, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    assert len(leaks(sites.secrets, contents(sites.data["east"]))) > 500
    errors(sites)
    federation(sites)
    read_everything(sites, browser)
    evaluation(sites)
    terminal = sites.data["east"] / "terminal"  # the owner's own
    with terminal.open("w") as own:
        line = ["data", "show", sites.uri("east"), "--out", str(sites.data["east"] / "sheet.png")]
        command = [sys.executable, "-m", "promptfed", *line]
        assert subprocess.run(command, stdout=own, stderr=own, env=sites.environment, check=False).returncode == 0
    assert "FILE" in terminal.read_text()
    everywhere = [contents(sites.out), bytes(sites.tap.heard), caplog.text.encode()]
    assert min(map(len, everywhere)) > 10_000
    assert re.search(r"4 files or\s+lines\s+cannot\s+be\s+read", contents(sites.out / "logs").decode())
    assert leaks([SYNTAX, *sites.secrets], *everywhere) == []
