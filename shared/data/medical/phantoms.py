"""Drawn scans of invented patients as DICOM files, for the demonstration, tests and benchmarks."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

CLASSES = ("clear", "nodule", "line", "stripes")
SIDE = 64
_INTERCEPT = -1024


def scan(kind: str, draws: np.random.Generator, side: int = SIDE) -> np.ndarray:
    """A drawn slice of one of `CLASSES`, ``(side, side)`` uint16: a body of water in air, with noise."""
    down, across = np.mgrid[:side, :side] / side - 0.5
    wide, high = draws.uniform(0.38, 0.46, 2)
    values = np.where((across / wide) ** 2 + (down / high) ** 2 < 1, 0.0, -1000.0)
    x, y, size = draws.uniform(-0.15, 0.15), draws.uniform(-0.15, 0.15), draws.uniform(0.09, 0.14)
    if kind == "nodule":
        values[(across - x) ** 2 + (down - y) ** 2 < size**2] = 300
    elif kind == "line":
        values[np.abs(across - x + 0.3 * (down - y)) < size / 4] = 700
    elif kind == "stripes":
        values[(np.abs(down - y) < 2 * size) & (np.sin(down * 90) > 0)] = 450
    values += draws.normal(0, 25, values.shape)
    return np.clip(np.round(values - _INTERCEPT), 0, 4095).astype(np.uint16)


def dataset(pixels: np.ndarray, patient: str, number: int = 1, series: str = "", study: str = "") -> Dataset:
    """A DICOM image of uint8 or uint16 ``pixels``, grey ``(H, W)`` or ``(F, H, W)``, or RGB ``(H, W, 3)``."""
    data, meta = Dataset(), FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CTImageStorage
    data.file_meta = meta
    data.SOPClassUID, data.SOPInstanceUID = CTImageStorage, generate_uid()
    meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID
    data.StudyInstanceUID, data.SeriesInstanceUID = study or generate_uid(), series or generate_uid()
    data.PatientID, data.PatientName, data.InstanceNumber, data.Modality = patient, f"Drawn^{patient}", number, "CT"
    colored = pixels.ndim == 3 and pixels.shape[2] == 3
    if pixels.ndim == 3 and not colored:
        data.NumberOfFrames = len(pixels)
    data.Rows, data.Columns = pixels.shape[:2] if colored or pixels.ndim == 2 else pixels.shape[1:]
    data.SamplesPerPixel = 3 if colored else 1
    data.PhotometricInterpretation = "RGB" if colored else "MONOCHROME2"
    if colored:
        data.PlanarConfiguration = 0
    data.BitsAllocated = 8 * pixels.dtype.itemsize
    data.BitsStored = 8 if pixels.dtype == np.uint8 else 12
    data.HighBit, data.PixelRepresentation = data.BitsStored - 1, 0
    data.PixelData = pixels.tobytes()
    return data


def write_patients(folder: Path, patients: int, each: int, seed: int, name: str = "P", side: int = SIDE) -> Path:
    """Scans of invented patients, a series of ``each`` images for every patient, with a table ``labels.csv``.

    Seeds also choose the scanner: every other one stores MONOCHROME1.
    """
    draws = np.random.default_rng([seed, 34])
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(patients):
        patient = f"{name}{number:04d}"
        (folder / patient).mkdir(exist_ok=True)
        study, series = generate_uid(), generate_uid()
        for place in range(each):
            kind = CLASSES[int(draws.integers(len(CLASSES)))]
            data = dataset(scan(kind, draws, side), patient, place + 1, series, study)
            data.RescaleSlope, data.RescaleIntercept = 1, _INTERCEPT
            data.WindowCenter, data.WindowWidth = 40, 1600
            if seed % 2:
                data.PhotometricInterpretation = "MONOCHROME1"
            data.save_as(folder / patient / f"{place + 1:04d}.dcm", enforce_file_format=True)
            rows.append([data.SOPInstanceUID, kind])
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["SOPInstanceUID", "label"], *rows])
    return folder
