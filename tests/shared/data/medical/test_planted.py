"""Identifiers of patients appear nowhere outside their files, in whatever way they are written."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
from collections import defaultdict
from pathlib import Path

import httpx
import numpy as np
import pytest

import promptfed
from promptfed.shared.data import DataError, open_source
from tests.shared.data.medical.test_dicom import save, table

pydicom = pytest.importorskip("pydicom", reason="DICOM files: pip install '.[medical]'")
from promptfed.shared.data.medical.phantoms import CLASSES, dataset, scan  # noqa: E402

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
        plain,
        secret.lower().encode(),
        secret.encode("utf-16-le"),
        secret.encode("utf-16-be"),
        plain.hex().encode(),
    ]
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


def test_a_folder_that_cannot_be_listed_is_named_to_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
