"""``nifti:``: orientations, windows, damaged volumes, and the same federation from PNG, DICOM and NIfTI."""

from __future__ import annotations

import csv
import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import promptfed
from promptfed.shared.data import DataError, open_source
from tests.shared.data.medical.test_dicom import DRAWS, save

nibabel = pytest.importorskip("nibabel", reason="NIfTI files: pip install '.[medical]'")
from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform  # noqa: E402

from promptfed.shared.data.medical.nifti import AXES, facts, pixels  # noqa: E402
from promptfed.shared.data.medical.phantoms import dataset  # noqa: E402
from promptfed.shared.data.medical.unreadable import Unreadable  # noqa: E402

VOLUME = DRAWS.integers(0, 256, (3, 4, 5), dtype=np.uint8)  # towards right, anterior and superior
CODES = ["".join(codes) for order in itertools.permutations(("LR", "PA", "IS")) for codes in itertools.product(*order)]


def stored(path: Path, codes: str, values: np.ndarray = VOLUME) -> Path:
    """``values`` as an array whose axes run towards ``codes``."""
    change = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(codes))
    affine = np.diag([2, 3, 4, 1]) @ inv_ornt_aff(change, values.shape)
    nibabel.save(nibabel.Nifti1Image(apply_orientation(values, change), affine), path)
    return path


def seen(axis: str, place: int) -> np.ndarray:
    """A slice of `VOLUME` as it is looked at."""
    if axis == "axial":
        return VOLUME[::-1, ::-1, place].T
    return VOLUME[::-1, place, ::-1].T if axis == "coronal" else VOLUME[place, ::-1, ::-1].T


@pytest.mark.parametrize("codes", CODES)
def test_all_48_orientations_show_the_same(tmp_path: Path, codes: str) -> None:
    path = stored(tmp_path / "a.nii.gz", codes)
    assert "".join(nibabel.aff2axcodes(nibabel.load(path).affine)) == codes
    for axis, body in AXES.items():
        assert facts(path, {"axis": axis}) == {"frames": VOLUME.shape[body]}
        for place in range(VOLUME.shape[body]):
            assert np.array_equal(pixels(path, place, {"axis": axis}), seen(axis, place))


def test_a_compressed_volume_is_unpacked_once_and_read_anew_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = stored(tmp_path / "a.nii.gz", "LPS"), []
    unpack = gzip.open
    monkeypatch.setattr(gzip, "open", lambda file: (opened.append(file), unpack(file))[1])
    for place in range(5):
        assert np.array_equal(pixels(path, place, {"axis": "axial"}), seen("axial", place))
    assert opened == [path]
    stored(path, "LPS", 255 - VOLUME)
    for _ in range(2):
        assert np.array_equal(pixels(path, 1, {"axis": "axial"}), 255 - seen("axial", 1))


def test_what_is_no_number_is_black(tmp_path: Path) -> None:
    values = np.array([[[np.nan], [np.inf]], [[-20.0], [20.0]]], dtype=np.float32)
    path = stored(tmp_path / "a.nii", "LAS", values)
    assert pixels(path, 0, {"axis": "axial", "window": [0, 100]}).tolist() == [[180, 255], [77, 0]]


def test_an_oblique_volume_has_the_closest_axes(tmp_path: Path) -> None:
    turn = 0.3
    affine = np.eye(4)
    affine[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    nibabel.save(nibabel.Nifti1Image(VOLUME, affine), tmp_path / "a.nii")
    assert io_orientation(affine)[:, 0].tolist() == [0, 1, 2]
    assert np.array_equal(pixels(tmp_path / "a.nii", 2, {"axis": "axial"}), seen("axial", 2))


def test_windows_in_units_and_percentiles(tmp_path: Path) -> None:
    values = np.arange(101, dtype=np.int16).reshape(101, 1, 1) * np.ones((1, 2, 2), dtype=np.int16) - 50
    path = stored(tmp_path / "a.nii", "RAS", values)
    shown = pixels(path, 0, {"axis": "axial", "window": [0.5, 101]})
    assert np.array_equal(shown[0, ::-1], np.floor(np.clip(np.arange(-50, 51) / 100 + 0.5, 0, 1) * 255 + 0.5))
    shown = pixels(path, 0, {"axis": "axial", "percentiles": [10, 90]})[0, ::-1]
    assert np.array_equal(shown, np.floor(np.clip((np.arange(101) - 10) / 80, 0, 1) * 255 + 0.5))
    assert pixels(path, 0, {"axis": "axial"})[0].tolist()[::100] == [255, 0]


def test_damaged_volumes_are_refused(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.nii", "RAS")
    whole = path.read_bytes()
    claims = bytearray(whole)
    claims[42:48] = np.array([32000, 32000, 32000], dtype="<i2").tobytes()
    (tmp_path / "claims.nii").write_bytes(claims)
    (tmp_path / "claims.nii.gz").write_bytes(gzip.compress(bytes(claims)))
    flat = bytearray(whole)
    flat[40:42] = np.array([2], dtype="<i2").tobytes()
    (tmp_path / "flat.nii").write_bytes(flat)
    for name in ("claims.nii", "claims.nii.gz", "flat.nii"):
        with pytest.raises(Unreadable):
            facts(tmp_path / name, {"axis": "axial"})
    (tmp_path / "cut.nii.gz").write_bytes((gzip.compress(whole, mtime=0))[:-20])
    (tmp_path / "labels.csv").write_text("path,label\ncut.nii.gz,x\na.nii,y\n")
    with pytest.raises(DataError) as caught:
        open_source(f"nifti:{tmp_path}")
    assert "cut.nii.gz" not in str(caught.value)
    assert any("cut.nii.gz" in problem for problem in caught.value.problems)


def test_png_dicom_and_nifti_of_the_same_pixels_give_the_same_state(tmp_path: Path) -> None:
    rows: dict[str, list[list[str]]] = {"png": [["path", "label", "patient"]], "nii": [["path", "label", "PatientID"]]}
    rows["dcm"] = [["SOPInstanceUID", "label"]]
    for kind in rows:
        (tmp_path / kind).mkdir()
    for number in range(16):
        label, patient = "xy"[number % 2], f"p{number // 2}"
        values = DRAWS.integers(0, 128, (20, 16), dtype=np.uint8) + np.uint8(100 * (number % 2))
        Image.fromarray(values).save(tmp_path / "png" / f"{number}.png")
        rows["png"].append([f"{number}.png", label, patient])
        data = dataset(values, patient)
        save(data, tmp_path / "dcm" / f"{number}.dcm")
        rows["dcm"].append([str(data.SOPInstanceUID), label])
        volume = nibabel.Nifti1Image(values[:, :, None].transpose(1, 0, 2), np.diag([-1, -1, 1, 1]))
        nibabel.save(volume, tmp_path / "nii" / f"{number}.nii.gz")
        rows["nii"].append([f"{number}.nii.gz", label, patient])
    for kind, lines in rows.items():
        with (tmp_path / kind / "labels.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
    uris = [f"csv:{tmp_path}/png/labels.csv?group=patient&", f"dicom:{tmp_path}/dcm?", f"nifti:{tmp_path}/nii?"]
    hashes = []
    for uri in uris:
        data = {f"c{k}": f"{uri}partition=iid&clients=2&client={k}" for k in range(2)}
        result = promptfed.run("fedclipadapter", data, rounds=1, class_names=["x", "y"])
        hashes.append(result.state_hash)
    assert len(set(hashes)) == 1
