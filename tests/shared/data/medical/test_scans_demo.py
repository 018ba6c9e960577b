"""`promptfed demo --data dicom`: a federation over several patients' DICOM files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("pydicom", reason="DICOM files: pip install '.[medical]'")


def test_a_federation_over_dicom_files_learns() -> None:
    command = [sys.executable, "-m", "promptfed", "demo", "--data", "dicom", "--rounds", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert set(result["federated"]) >= {"client:north", "client:south", "client:west"}
    assert all(result["federated"][name] > result["zero_shot"][name] for name in result["federated"])
